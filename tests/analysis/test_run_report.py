"""The report of a run, and the first lines of its description."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from runs import run

from trainkit.analysis import run_report
from trainkit.analysis.run_report import Report
from trainkit.tracking.store import Store

pytestmark = pytest.mark.usefixtures("store")

REPORT = Report(
    run="a<b-s0",
    recipe="a<b",
    status="FINISHED",
    step=1200,
    metric="val/top1",
    best=(1000, 0.8123456),
    final=0.75,
    baseline=("majority <class>", 0.1),
    samples_per_s=581.24,
    total_s=71.0,
    training_s=33.0,
    compared_with="other-s0",
    changes="compared with other-s0\n\nnote  <script>alert(1)</script> -> x",
    scores={"val": [["", "majority <class>", "final", "best"], ["top1", "0.1000", "0.7500", "0.8123"]]},
    verdict=["data loading <41 %>"],
    warning="",
    facts={"Time of training": {"evaluation": "9 %"}, "Environment": {"versions": "torch 2.14.1"}},
)


def test_the_report_is_one_file_that_runs_and_loads_nothing_and_escapes_names():
    text = run_report.html(REPORT)
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "a&lt;b-s0" in text and "majority &lt;class&gt;" in text and "&lt;script&gt;alert(1)" in text
    assert "0.8123" in text and "581.2" in text and "71 s" in text
    assert "<td>evaluation</td><td>9 %</td>" in text and "prefers-color-scheme: dark" in text
    for command in ("trainkit cp", "trainkit run --resume", "trainkit compare other-s0", "trainkit export"):
        assert command in text


def test_the_description_begins_with_score_throughput_and_time():
    first, second, *_ = run_report.head(REPORT).splitlines()
    assert first.rstrip() == (
        "val/top1 **0.8123** best (step 1,000), 0.75 final, "
        r"0.1 best trivial baseline (majority \<class\>)"
    )
    assert second.startswith("**581.2 samples/s**, 71 s in total, 33 s of training, 1,200 steps.")
    without = run_report.head(replace(REPORT, best=None, final=None, baseline=None))
    assert without.startswith("**581.2 samples/s**")


def test_a_run_keeps_its_report_and_its_page_begins_with_the_score(tmp_path):
    ran = run()
    assert ran.code == 0
    client, run_id = Store.locate().client(), ran.folder.info().run_id
    kept = client.get_run(run_id)
    lines = kept.data.tags["mlflow.note.content"].splitlines()
    assert lines[0].startswith("val/accuracy **") and " best (step " in lines[0]
    assert "samples/s**" in lines[1] and "steps." in lines[1]
    changes = next(k for k, line in enumerate(lines) if "nothing to compare with" in line)
    verdict = next(k for k, line in enumerate(lines) if k > changes and "samples/s" in line)
    assert 1 < changes < verdict
    files = [file.path for file in client.list_artifacts(run_id) if not file.is_dir]
    assert files[0] == run_report.FILE
    text = Path(client.download_artifacts(run_id, run_report.FILE, str(tmp_path))).read_text()
    assert f"<h1>{ran.folder.name}</h1>" in text and "<th>EMA final</th>" in text and "<td>start-up</td>" in text
    assert not re.search(r"https?://|<script", text)
