"""What is said of a sampler before training is what it then draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.data.people import pk_report
from trainkit.data.people.pk_report import repeated, report
from trainkit.data.people.pk_sampler import PK, Cells, Draw, ModalPK, Pairs
from trainkit.errors import UserError
from trainkit.interfaces import RGB

SPECS = [
    PK(people=2, each=3),
    PK(people=2, each=3, short="drop"),
    ModalPK(people=2, each=4),
    ModalPK(people=2, each=4, short="fill"),
    ModalPK(people=2, each=4, short="drop"),
    ModalPK(people=2, each=4, half=True),
    ModalPK(people=2, each=4, ensure_rgb=False),
    Pairs(people=2, each=4),
    Pairs(people=2, each=4, short="fill"),
]

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
NAMES = [f"{number:04d}" for number in range(8)]


def drawn(spec, counts) -> Draw:
    cell = np.random.default_rng(0).permutation(np.repeat(np.arange(np.size(counts)), np.ravel(counts)))
    return Draw(spec, Cells.make(cell // 5, cell % 5, len(counts)), 0)


def test_people_are_counted_by_what_they_have():
    told = report(drawn(ModalPK(people=2, each=4), COUNTS), NAMES, scan_seconds=0.25, scan_bytes=2_000_000)
    assert (told.records, told.persons, told.draw.persons, told.unpaired, told.dropped) == (77, 7, 5, 2, 0)
    assert told.lacking == {"rgb": 1, "nir": 2, "cp": 3, "sk": 4, "text": 4}
    assert told.single == ("0003 (rgb)", "0004 (nir)")
    assert told.short == 2, "0006 has two other records and 0007 one, of three"
    assert told.repeats == pytest.approx((1 + 2) / (5 * 4))
    lengths = {"people": 2, "records": 69 // 8, "anchors": 2}
    assert told.draw.lengths == lengths and told.draw.batches == 2 and told.draw.units == 5
    assert told.draw.bytes == 4 * 77 + 4 * 41 + 4 * 5


def test_what_is_dropped_is_told_apart_from_what_cannot_be_paired():
    told = report(drawn(ModalPK(people=2, each=4, short="drop"), COUNTS), NAMES)
    assert (told.draw.persons, told.unpaired, told.dropped, told.repeats, told.short) == (3, 2, 2, 0.0, 0)


def test_the_report_in_words():
    lines = report(drawn(ModalPK(people=2, each=4), COUNTS), NAMES, 0.25, 2_000_000).sentences()
    assert lines == (
        "77 records of 7 people, scanned in 0.25 s, 2 MB; the sampler's index takes 6.4 bytes a record",
        "modal_pk can sample 5 of 7 people (71.4%); 2 have no RGB record, or no other",
        "people without records of a modality: rgb 1, nir 2, cp 3, sk 4, text 4",
        "people of one modality: 0003 (rgb), 0004 (nir)",
        "15% of draws repeat a record, of 2 people with too few",
        "an epoch is 2 blocks of 2 x 4, 16 draws for 69 records; every person once is 2, as many draws as records is 8",
    )
    whole = report(drawn(Pairs(people=3, batches_per_epoch=5), COUNTS[:2]), NAMES[:2]).sentences()
    assert whole == (
        "44 records of 2 people; the sampler's index takes 5.2 bytes a record",
        "pairs can sample 2 of 2 people (100.0%)",
        "an epoch is 5 blocks of 3 x 2, 30 draws for 44 records; every person once is 1, "
        "as many draws as records is 7, every RGB record once is 4",
    )
    some = report(drawn(ModalPK(people=2, each=4, short="drop"), COUNTS), NAMES).sentences()
    assert some[1].endswith(
        "3 of 7 people (42.9%); 2 have no RGB record, or no other; 2 are dropped for too few records"
    )
    plain = report(drawn(PK(people=2, each=3, short="drop"), COUNTS), NAMES).sentences()
    assert plain[1] == "pk can sample 7 of 7 people (100.0%)"
    mixed = report(drawn(ModalPK(people=2, each=3, ensure_rgb=False), COUNTS), NAMES).sentences()
    assert mixed[1].endswith("2 have records of one modality")


def test_what_the_scan_took_is_said_where_it_is_known():
    told = report(drawn(Pairs(people=2, each=4), COUNTS), NAMES, 0.25, 1_000_000)
    assert ", scanned in 0.25 s, 1 MB; " in told.sentences()[0]
    assert told.draw.persons == 5 and told.lacking["cp"] == 3 and told.draw.lengths["anchors"] == 11
    assert "scan" not in report(drawn(PK(people=2, each=2), COUNTS), NAMES).sentences()[0]


@settings(deadline=None, max_examples=50)
@given(
    spec=st.sampled_from(SPECS),
    counts=st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=2, max_size=8),
)
def test_repeats_are_those_that_are_drawn(spec, counts):
    counts = np.asarray(counts)
    try:
        draw = drawn(spec, counts)
    except UserError:
        return
    told = report(draw, [str(n) for n in range(len(counts))])
    cells = draw.cells
    owner = np.empty(len(cells.rows), np.int64)
    owner[cells.rows] = np.repeat(np.arange(len(counts)), counts.sum(1))
    seen = {}
    # A pass may leave somebody out, 60 of them not.
    for group in draw.rows(0, 0, 60 * (draw.units // 2)).reshape(-1, spec.each).tolist():
        again = spec.each - len(set(group))
        assert seen.setdefault(int(owner[group[0]]), again) == again
    assert len(seen) == told.draw.persons
    expected = repeated(spec, counts)
    assert all(expected[who] == again for who, again in seen.items())
    weight = {who: counts[who, RGB] if isinstance(spec, Pairs) else 1 for who in seen}
    share = sum(weight[who] * again for who, again in seen.items()) / (spec.each * sum(weight.values()))
    assert told.repeats == pytest.approx(share)
    assert told.short == sum(again > 0 for again in seen.values())


def test_names_are_looked_up_for_few():
    """A hundred thousand people of one modality are counted, and the first ones named."""
    counts = np.zeros((100_000, 5), np.int64)
    counts[:, RGB] = 2
    told = report(drawn(PK(people=2, each=2), counts), [str(n) for n in range(100_000)])
    assert pk_report.NAMED == len(told.single) == 5 and told.singles == 100_000
    assert told.sentences()[2] == "people of one modality: 0 (rgb), 1 (rgb), 2 (rgb), 3 (rgb), 4 (rgb) and 99,995 more"
