"""Files written whole, on a system that refuses for a while what another process reads."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from trainkit import files


@pytest.fixture
def windows(monkeypatch):
    """A module `os` of Windows, as far as files go: so many renames are refused, and how files are opened is noted."""

    def system(refused: int) -> list[int]:
        opened = []

        def replace(source, target):
            nonlocal refused
            refused -= 1
            if refused >= 0:
                raise PermissionError(13, "The process cannot access the file because it is being used", str(target))
            os.replace(source, target)

        def open_(path, flags, *rest):
            opened.append(flags)
            return os.open(path, flags, *rest)

        fake = SimpleNamespace(**{**vars(os), "name": "nt", "replace": replace, "open": open_})
        monkeypatch.setattr(files, "os", fake)
        return opened

    return system


def test_a_file_that_somebody_reads_is_replaced_when_it_is_read(tmp_path, windows):
    windows(3)
    files.write_aside(tmp_path / "run.json", "new")
    assert (tmp_path / "run.json").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_is_never_given_back_is_an_error_that_names_it(tmp_path, windows, monkeypatch):
    windows(10**9)
    clock = iter(range(100))
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda s: None))
    with pytest.raises(PermissionError) as caught:
        files.write_aside(tmp_path / "run.json", "new")
    assert caught.value.filename == str(tmp_path / "run.json") and not list(tmp_path.iterdir())


def test_on_posix_a_refusal_is_final(tmp_path, monkeypatch):
    calls = []

    def refuse(source, target):
        calls.append(target)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), "replace": refuse}))
    with pytest.raises(PermissionError):
        files.write_aside(tmp_path / "run.json", "new")
    assert len(calls) == 1


def test_a_file_is_synced_through_what_windows_may_write(tmp_path, windows):
    (tmp_path / "some").write_bytes(b"1")
    opened = windows(0)
    files.sync_file(tmp_path / "some")
    assert opened == [os.O_RDWR]
