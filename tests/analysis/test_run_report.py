"""The report of a run, and the first lines of its description."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runs import run

from trainkit import terminal
from trainkit.analysis import run_report
from trainkit.tracking.store import Store

pytestmark = pytest.mark.usefixtures("store")


def test_the_report_is_one_file_that_runs_and_loads_nothing_and_escapes_names():
    table = terminal.Table([["val", "top1"], ["majority <class>", "0.1000"], ["best", "0.8123"]], [2])
    page = ["", terminal.Styled("Finished in 71 s.", "bold green"), "", "a<b-s0", "", table, "", "Time  33 s"]
    page += [terminal.Styled("Warning: <low>", "yellow")]
    text = run_report.html("a<b-s0", page, "note  <script>alert(1)</script> -> x", ["trainkit show a"])
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "<h1>a&lt;b-s0</h1>" in text and "majority &lt;class&gt;" in text and "&lt;script&gt;alert(1)" in text
    assert '<p class="key">Finished in 71 s.</p>' in text and '<p class="note">Warning: &lt;low&gt;</p>' in text
    assert "<tr class=key><td>best</td><td>0.8123</td></tr>" in text and "<th>top1</th>" in text
    assert "Time  33 s</pre>" in text and "trainkit show a</pre>" in text and "prefers-color-scheme: dark" in text


def test_a_run_keeps_its_report_and_its_page_begins_with_the_score(tmp_path):
    ran = run()
    assert ran.code == 0
    client, run_id = Store.locate().client(), ran.folder.info().run_id
    kept = client.get_run(run_id)
    lines = kept.data.tags["mlflow.note.content"].splitlines()
    assert re.match(r"val/accuracy \*\*0\.\d+\*\* best \(step [\d,]+\), 0\.\d+ final", lines[0])
    assert re.match(r"\*\*[\d.]+ samples/s\*\*, .* in total, .* of training, [\d,]+ steps\.", lines[1])
    changes = next(k for k, line in enumerate(lines) if "nothing to compare with" in line)
    verdict = next(k for k, line in enumerate(lines) if k > changes and "samples/s" in line)
    assert 1 < changes < verdict
    files = [file.path for file in client.list_artifacts(run_id) if not file.is_dir]
    assert files[0] == run_report.FILE
    text = Path(client.download_artifacts(run_id, run_report.FILE, str(tmp_path))).read_text()
    assert f"<h1>{ran.folder.name}</h1>" in text and "<td>EMA final</td>" in text and "start-up" in text
    assert "nothing to compare with" in text and f"trainkit export {ran.folder.name} OUT" in text
    assert not re.search(r"https?://|<script", text)
