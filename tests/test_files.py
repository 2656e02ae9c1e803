"""Files written whole."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from trainkit import files


def test_a_refusal_names_the_file_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), "replace": refuse}))
    with pytest.raises(PermissionError) as caught:
        files.write_aside(tmp_path / "run.json", "new")
    assert caught.value.filename == str(tmp_path / "run.json") and not list(tmp_path.iterdir())
