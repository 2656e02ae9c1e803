"""Sets of people verified: every image is read, and what a training leaves out is told."""

from __future__ import annotations

import people_sets
import pytest
from click.testing import CliRunner

from trainkit.cli import main
from trainkit.data import kinds
from trainkit.data.people.index import indexed

pytestmark = pytest.mark.usefixtures("cache")


def ask(*words, code=0) -> str:
    done = CliRunner().invoke(main.main, ["data", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def test_records_that_are_left_out_are_told(tmp_path):
    people_sets.market(tmp_path, train=2, test=2, cameras=2)
    (tmp_path / "bounding_box_test" / "0004_c1s1_000001_01.gif.part").write_bytes(b"x")
    told = [
        "left out 1 images of no person (-1, which Market-1501 calls junk): bounding_box_test/-1_c1s1_000401_03.jpg",
        "left out 1 files that are not images: bounding_box_test/0004_c1s1_000001_01.gif.part",
    ]
    assert sorted(indexed(f"{tmp_path}#test").left_out) == sorted(told)
    out = ask("verify", f"{tmp_path}#test")
    assert all(f"warning: {tmp_path}#test: {said}" in out for said in told) and "0 problems, 2 to look at" in out


def test_only_sets_of_people_are_of_this_kind(tmp_path):
    people_sets.index(tmp_path / "set", 2)
    people_sets.market(tmp_path / "market")
    for place in (tmp_path / "set", tmp_path / "set" / "index.csv", tmp_path / "market", f"{tmp_path}/market#test"):
        assert kinds.at(place).name == "people"
    (tmp_path / "list.csv").write_text("a.png,b.png\n")
    (tmp_path / "classes" / "x").mkdir(parents=True)
    people_sets.picture(tmp_path / "classes" / "x" / "0.png")
    for place in (tmp_path / "list.csv", tmp_path / "classes", tmp_path / "nothing"):
        assert kinds.at(place).name != "people"
