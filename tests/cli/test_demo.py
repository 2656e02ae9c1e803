"""`trainkit demo`: a training from nothing, and what follows it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from PIL import Image

from trainkit.cli import demo, main
from trainkit.distributed.stop_signal import Stop
from trainkit.tracking.store import Store


@pytest.mark.slow
@pytest.mark.usefixtures("store", "cache")
def test_the_demo_trains_on_digits_and_names_its_report_and_the_commands_for_own_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "prepare_process", lambda recipe: Stop())
    monkeypatch.setattr(demo, "RECIPE", demo.RECIPE.replace("4 epochs", "2 steps").replace("over: 10", "over: 1"))
    for _ in range(2):  # the second time the digits are there
        done = CliRunner().invoke(main.main, ["demo"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    files = sorted((tmp_path / "trainkit-demo" / "digits").rglob("*.png"))
    assert len(files) == 1797 and Image.open(files[0]).size == (32, 32)
    assert {file.parent.name for file in files} == set("0123456789") and len(Store.locate().runs()) == 2
    assert "report.html" in done.output and "trainkit cp convnext mine.yaml --data FOLDER" in done.output
