"""docs/tutorials/python.ipynb: its cells run, one after another, in a fresh process in an empty folder."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

import trainkit

PAGE = ROOT / "docs" / "tutorials" / "python.ipynb"
CHECKS = """
assert run.status == other.status == "FINISHED" and run.path.parent.parent.name == "mlruns"
assert list(run.metrics["train/loss"].dropna().index)[-1] == 40 and run.scores["val/top1"] > 0.1
assert list(compared.changes["key"]) == ["optim.lr"] and "verdict  B" in str(compared) and len(compared.scores) >= 6
assert len(predicted) == 3 and set(predicted["class"]) <= set(model.classes) and len(model.classes) == 10
assert predicted["probabilities"].map(sum).sub(1).abs().max() < 1e-5
assert len(embeddings) == 3 and len(output) == 1
assert "did you mean recipes/convnext.yaml?" in str(error_shown)
"""


def cells(kind: str) -> list[str]:
    page = json.loads(PAGE.read_text(encoding="utf-8"))
    assert (page["nbformat"], page["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in page["cells"]}) == len(page["cells"])
    return ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == kind]


def test_it_shows_everything_that_is_offered_and_keeps_no_outputs():
    code, page = "\n".join(cells("code")), json.loads(PAGE.read_text(encoding="utf-8"))
    used = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trainkit"
    }
    assert used == set(trainkit.__all__) - {"__version__"}
    assert not any(cell["outputs"] or cell["execution_count"] for cell in page["cells"] if cell["cell_type"] == "code")


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)\s]+)\)", "\n".join(cells("markdown")))
    assert links and not [link for link in links if not (PAGE.parent / link).exists()]


@pytest.mark.slow
def test_its_cells_run_in_an_empty_folder(tmp_path):
    source = "\n\n".join(cells("code")).replace("print(error)", "error_shown = error")
    hidden = ("TRAINKIT_", "PYTHONPATH", "MLFLOW_TRACKING")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    env |= {"PYTHONPATH": str(ROOT), "TRAINKIT_STORE": str(tmp_path / "mlruns")}
    (tmp_path / "empty").mkdir()
    words = [sys.executable, "-P", "-c", source + CHECKS]
    done = subprocess.run(words, cwd=tmp_path / "empty", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(Path(tmp_path / "empty").iterdir()), "it writes to the store alone"
