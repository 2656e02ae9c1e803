"""The drawn faces: what they are, that they are the same everywhere, and that making them is safe."""

import csv
import hashlib
import json
import multiprocessing
import os

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import drawing
from trainkit.data.synthetic import faces as sample
from trainkit.errors import UserError

DIGEST = (2, "476e1cd88914524f5c03a77d0c71ba971a457d304fac0e9708fdf91ad913df32")
"""Of a few images and all pairs. If it changes on purpose, raise `VERSION` with it."""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A set of few people, kept in a folder of its own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sample, "IDENTITIES", 3)
    monkeypatch.setattr(sample, "PICTURES", 2)
    monkeypatch.setattr(sample, "OTHERS", 20)
    monkeypatch.setattr(sample, "OTHERS_PICTURES", 4)
    monkeypatch.setattr(sample, "PAIRS_PER_FOLD", 8)
    return tmp_path / "cache"


def test_pixels_and_pairs_are_the_same_everywhere_and_belong_to_the_version():
    seen = hashlib.sha256(repr(sample.pairs()).encode())
    for identity in range(0, 120, 4):
        seen.update(sample.draw(identity, identity % 24, 48).tobytes())
    assert (sample.VERSION, seen.hexdigest()) == DIGEST


def test_pairs_are_balanced_in_ten_folds_of_their_own_identities_and_none_comes_twice():
    rows = sample.pairs()
    assert len(rows) == sample.FOLDS * sample.PAIRS_PER_FOLD
    assert len({frozenset(row[:2]) for row in rows}) == len(rows)
    seen: set[str] = set()
    for fold in range(sample.FOLDS):
        part = rows[fold * sample.PAIRS_PER_FOLD : (fold + 1) * sample.PAIRS_PER_FOLD]
        assert sum(row[2] for row in part) * 2 == len(part)
        people = {path.split("/")[0] for row in part for path in row[:2]}
        assert not people & seen
        seen |= people
        for a, b, same in part:
            assert (a.split("/")[0] == b.split("/")[0]) == bool(same)


def test_the_folder_holds_what_it_says_and_is_made_once(small):
    home = sample.folder(16)
    assert home.parent == small
    assert sorted(p.name for p in home.iterdir()) == ["sample.json", "train", "verification"]
    people = sorted(p.name for p in (home / "train").iterdir())
    assert people == ["id00000", "id00001", "id00002"]
    assert [len(list((home / "train" / name).glob("*.png"))) for name in people] == [2, 2, 2]
    with open(home / "verification" / "pairs.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 80
    for row in rows:
        for path in (row["path_a"], row["path_b"]):
            assert (home / "verification" / path).is_file()
            assert path.split("/")[0] not in people
    with Image.open(home / "train" / "id00001" / "01.png") as image:
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), sample.draw(1, 1, 16))
    assert json.loads((home / "sample.json").read_text())["train"] == {"identities": 3, "pictures": 6}
    stamp = (home / "train" / "id00001" / "01.png").stat().st_mtime_ns
    assert sample.folder(16) == home
    assert (home / "train" / "id00001" / "01.png").stat().st_mtime_ns == stamp


def test_what_an_interrupted_process_left_is_drawn_anew(small, monkeypatch):
    write = sample._write

    def half(to, size):
        (to / "train").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "_write", half)
    with pytest.raises(KeyboardInterrupt):
        sample.folder(16)
    monkeypatch.setattr(sample, "_write", write)
    assert len(list(sample.folder(16).glob("train/*/*.png"))) == 6


def test_a_place_that_cannot_be_written_is_said_in_a_sentence(small, monkeypatch):
    def full(to, size):
        to.mkdir(parents=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample, "_write", full)
    with pytest.raises(UserError, match=r"No space left on device.*TRAINKIT_CACHE"):
        sample.folder(16)
    assert not list(small.glob(".*.part"))


def test_a_size_that_makes_no_sense_is_refused():
    with pytest.raises(UserError, match=r"data\.image_size.*8.*expected 16 to 256"):
        sample.folder(8)


def test_the_environment_says_where_sets_are_kept(monkeypatch, tmp_path):
    for name in ("TRAINKIT_CACHE", "TRAINKIT_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert drawing.root() == tmp_path / ".cache" / "trainkit"
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path / "data"))
    assert drawing.root() == tmp_path / "data" / ".trainkit-sample"
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    assert drawing.root() == tmp_path / "cache"


def together(make, cache):
    """What two processes answer that start at the same time; one of them draws the set."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=make, args=(str(cache), queue)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return answers


def _make(cache, queue):
    os.environ["TRAINKIT_CACHE"] = cache
    sample.IDENTITIES, sample.PICTURES, sample.OTHERS, sample.OTHERS_PICTURES, sample.PAIRS_PER_FOLD = 4, 2, 20, 4, 8
    queue.put((os.getpid(), sample.folder(16).stat().st_ino))


@pytest.mark.slow
def test_processes_that_start_together_draw_one_set(tmp_path):
    answers = together(_make, tmp_path)
    assert answers[0][1] == answers[1][1]
    assert answers[0][0] != answers[1][0]
