"""What is said of a sampler before training is what it then draws."""

from __future__ import annotations

import numpy as np
import pytest

from trainkit.data.people.pk_report import report
from trainkit.data.people.pk_sampler import PK, Cells, Draw, ModalPK, Pairs

COUNTS = np.array(
    [
        [6, 4, 3, 3, 6],
        [6, 4, 3, 3, 6],
        [6, 0, 3, 3, 6],
        [5, 0, 0, 0, 0],
        [0, 3, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [2, 1, 1, 0, 0],
        [2, 1, 0, 0, 0],
    ]
)
LACKING = "people without records of a modality: rgb 1, nir 2, cp 3, sk 4, text 4"


@pytest.mark.parametrize(
    ("spec", "people", "lines"),
    [
        (
            ModalPK(people=2, each=4),
            8,
            (
                "77 records of 7 people; modal_pk can sample 5 of them, the others have no RGB record or no other",
                LACKING,
                "2 people have too few records: some of them come more than once in a draw",
                "an epoch is 2 blocks of 2 x 4, 16 draws of 69 records",
            ),
        ),
        (
            Pairs(people=3, batches_per_epoch=5),
            2,
            (
                "44 records of 2 people; pairs can sample 2 of them",
                "an epoch is 5 blocks of 3 x 2, 30 draws of 44 records",
            ),
        ),
        (
            PK(people=2, each=5, epoch="records"),
            8,
            (
                "77 records of 7 people; pk can sample 7 of them",
                LACKING,
                "3 people have too few records: some of them come more than once in a draw",
                "an epoch is 7 blocks of 2 x 5, 70 draws of 77 records",
            ),
        ),
    ],
)
def test_the_report_counts_what_is_drawn(spec, people, lines):
    counts = COUNTS[:people]
    cell = np.random.default_rng(0).permutation(np.repeat(np.arange(counts.size), counts.ravel()))
    draw = Draw(spec, Cells.make(cell // 5, cell % 5, people), 0)
    assert report(draw) == lines
    # A pass may leave somebody out, 60 of them not.
    groups = draw.blocks(0, 60 * (draw.units // spec.people)).reshape(-1, spec.each).tolist()
    again = {int(cell[group[0]]) // 5 for group in groups if len(set(group)) < spec.each}
    assert len({int(cell[group[0]]) // 5 for group in groups}) == draw.persons
    assert len(again) == (int(lines[2].split()[0]) if len(lines) == 4 else 0)
