"""Pairs that are drawn for verification: of other people in each fold, half of one person, none twice."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from trainkit.cli import main
from trainkit.data import pairs_csv
from trainkit.errors import UserError
from trainkit.metrics import verification


def folder(root: Path, people: int, pictures: int) -> Path:
    for person in range(people):
        (root / f"p{person:02d}").mkdir(parents=True)
        for picture in range(pictures):
            (root / f"p{person:02d}" / f"{picture}.png").write_bytes(b"not read")
    return root


def lines(root: Path) -> list[tuple[str, str, int]]:
    with (root / "pairs.csv").open(newline="") as text:
        header, *rest = csv.reader(text)
    assert header == pairs_csv.COLUMNS
    return [(one, other, int(same)) for one, other, same in rest]


def test_each_fold_has_people_of_its_own_and_as_many_same_as_different_pairs(tmp_path):
    root = folder(tmp_path / "faces", 30, 4)
    assert pairs_csv.write_drawn(root, most=200) == (200, 30)
    drawn = lines(root)
    assert len(drawn) == len(set(drawn)) == 200
    people: list[set[str]] = []
    for fold in np.split(np.arange(200), pairs_csv.FOLDS):
        some = [drawn[row] for row in fold]
        assert sum(same for _, _, same in some) == 10
        assert all(
            (one.split("/")[0] == other.split("/")[0]) == bool(same) and one != other for one, other, same in some
        )
        people.append({name.split("/")[0] for pair in some for name in pair[:2]})
    assert not any(people[a] & people[b] for a in range(10) for b in range(a))
    source, protocol = pairs_csv.read_csv(root / "pairs.csv")
    assert len(protocol) == 200 and source.size == len({name for pair in drawn for name in pair[:2]})


def test_few_people_are_in_several_folds_and_the_draw_repeats(tmp_path):
    one, other = folder(tmp_path / "a", 4, 6), folder(tmp_path / "b", 4, 6)
    assert pairs_csv.write_drawn(one) == (120, 4) == pairs_csv.write_drawn(other), (
        "4 x 15 pairs of one person, as many others"
    )
    assert lines(one) == lines(other)
    assert all(sum(same for _, _, same in lines(one)[12 * fold : 12 * fold + 12]) == 6 for fold in range(10))


@pytest.mark.parametrize(("people", "pictures", "most"), [(30, 9, 6000), (30, 9, 200), (4, 6, 40)])
def test_pairs_of_one_person_say_who_is_whom(tmp_path, people, pictures, most):
    pairs_csv.write_drawn(folder(tmp_path / "faces", people, pictures), most)
    _, drawn = pairs_csv.read_csv(tmp_path / "faces" / "pairs.csv")
    units = verification.units({"first": drawn.first, "second": drawn.second, "same": drawn.same})
    assert len(set(np.concatenate([units.of, units.also]).tolist())) == people


def test_pairs_are_not_written_over_and_too_few_are_refused(tmp_path):
    root = folder(tmp_path / "faces", 2, 2)
    with pytest.raises(UserError, match="2 people, 2 pairs of one of them; expected 10 pairs or more"):
        pairs_csv.write_drawn(root)
    assert not (root / "pairs.csv").exists()
    (root / "pairs.csv").write_text("mine")
    said = CliRunner().invoke(main.main, ["data", "pairs", str(root)])
    assert said.exit_code == 2 and "already exists" in said.output
    assert (root / "pairs.csv").read_text() == "mine"


def test_the_verb_says_what_it_drew(tmp_path):
    said = CliRunner().invoke(main.main, ["data", "pairs", str(folder(tmp_path / "faces", 5, 4)), "--most", "40"])
    assert said.exit_code == 0
    assert said.output.startswith(f"{tmp_path}/faces/pairs.csv: 40 pairs of 5 people, half of them of one person\n")
