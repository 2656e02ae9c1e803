"""Pairs that are drawn for verification: of other people in each fold, half of one person, none twice."""

from __future__ import annotations

import numpy as np
import pytest

from trainkit.data import pairs_csv
from trainkit.errors import UserError
from trainkit.metrics import verification


def crowd(people: int, pictures: int) -> dict[str, list[str]]:
    return {f"p{n:02d}": [f"p{n:02d}/{k}.png" for k in range(pictures)] for n in range(people)}


def test_each_fold_has_people_of_its_own_and_as_many_same_as_different_pairs():
    drawn = pairs_csv.draw(crowd(30, 4), "here", most=200)
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


def test_few_people_are_in_several_folds_and_the_draw_repeats():
    drawn = pairs_csv.draw(crowd(4, 6), "here")
    assert len(drawn) == 120, "4 x 15 pairs of one person, as many others"
    assert drawn == pairs_csv.draw(crowd(4, 6), "here")
    assert all(sum(same for _, _, same in drawn[12 * fold : 12 * fold + 12]) == 6 for fold in range(10))


@pytest.mark.parametrize(("people", "pictures", "most"), [(30, 9, 6000), (30, 9, 200), (4, 6, 40)])
def test_pairs_of_one_person_say_who_is_whom(tmp_path, people, pictures, most):
    (tmp_path / "pairs.csv").write_text(pairs_csv.written(pairs_csv.draw(crowd(people, pictures), "here", most)))
    _, drawn = pairs_csv.read_csv(tmp_path / "pairs.csv")
    units = verification.units({"first": drawn.first, "second": drawn.second, "same": drawn.same})
    assert len(set(np.concatenate([units.of, units.also]).tolist())) == people


def test_too_few_pairs_are_refused():
    with pytest.raises(UserError, match="here: 2 people, 2 pairs of one of them; expected 10 pairs or more"):
        pairs_csv.draw(crowd(2, 2), "here")
