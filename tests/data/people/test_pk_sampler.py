"""Samplers of people: whole groups of what is asked for, each person once a pass, and the same rows whoever asks."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from trainkit.data.people.pk_sampler import CHUNK, PK, Cells, Draw, ModalPK, Pairs, Sampler
from trainkit.errors import UserError
from trainkit.interfaces import RGB, TEXT
from trainkit.training.plan import Plan

SPECS = [
    PK(people=2, each=3),
    PK(people=3, each=2),
    ModalPK(people=2, each=4),
    ModalPK(people=2, each=2),
    Pairs(people=3),
    Pairs(people=2, each=4),
]


def titled(spec) -> str:
    return "-".join(str(v) for v in getattr(spec, "__dict__", {"": spec}).values() if v is not None)


def table(counts) -> tuple[np.ndarray, np.ndarray]:
    """Person and modality of each record, shuffled, from counts (persons, 5)."""
    cell = np.repeat(np.arange(np.size(counts)), np.ravel(counts))
    cell = np.random.default_rng(0).permutation(cell)
    return cell // 5, cell % 5


def drawn(spec, counts, seed=0) -> tuple[Draw, np.ndarray, np.ndarray]:
    person, modality = table(counts)
    return Draw(spec, Cells.make(person, modality, len(counts)), seed), person, modality


def rows_of(draw: Draw, epoch: int, first: int, count: int, together: int = 1) -> np.ndarray:
    """Rows of `count` blocks from block `first` of an epoch."""
    return draw.blocks(epoch * (draw.batches // together * together) + first, count, together)


def full(people=12, each=(6, 4, 3, 3, 5)) -> np.ndarray:
    return np.tile(each, (people, 1))


def by_person(counts) -> dict[int, dict[int, set[int]]]:
    """Rows of each person by modality, with dictionaries."""
    person, modality = table(counts)
    found: dict[int, dict[int, set[int]]] = {}
    for row, (who, what) in enumerate(zip(person.tolist(), modality.tolist(), strict=True)):
        found.setdefault(who, {}).setdefault(what, set()).add(row)
    return found


def can_be_drawn(spec, cells: dict[int, set[int]]) -> bool:
    return bool(cells) if isinstance(spec, PK) else RGB in cells and len(cells) > 1


def check_group(spec, group: list[int], cells: dict[int, set[int]]) -> None:
    """That K rows of one person are what the sampler promises. Written from its description, with sets."""
    place = {row: modality for modality, rows in cells.items() for row in rows}
    rgb, others = [r for r in group if place[r] == RGB], [r for r in group if place[r] != RGB]
    sizes = {m: len(rows) for m, rows in cells.items()}

    def few_repeats(rows: list[int], there: int) -> None:
        assert len(set(rows)) == min(len(rows), there), "repeated only where there are too few"
        assert max(Counter(rows).values()) <= -(-len(rows) // there), "and then evenly"

    if isinstance(spec, PK):
        return few_repeats(group, sum(sizes.values()))
    assert len(rgb) == 1
    few_repeats(others, sum(n for m, n in sizes.items() if m != RGB))
    taken = Counter(place[r] for r in set(others))
    for one, size in sizes.items():
        for other in sizes:
            if RGB not in (one, other):
                assert taken[one] >= min(taken[other] - 1, size), "one of each before a second of any"
    return None


counts_of_people = st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=9)


@settings(deadline=None, max_examples=50)
@given(spec=st.sampled_from(SPECS), counts=counts_of_people, seed=st.integers(0, 9), epoch=st.integers(0, 50))
def test_every_group_is_whole_and_each_pass_takes_everybody_once(spec, counts, seed, epoch):
    found = by_person(counts)
    able = {who for who, cells in found.items() if can_be_drawn(spec, cells)}
    units = sum(len(found[who][RGB]) for who in able) if isinstance(spec, Pairs) else len(able)
    if units < spec.people or (isinstance(spec, Pairs) and len(able) < 2):
        with pytest.raises(UserError):
            drawn(spec, counts, seed)
        return
    draw, person, _ = drawn(spec, counts, seed)
    per_pass = units // spec.people
    rows = rows_of(draw, 0, epoch * per_pass, per_pass)
    assert rows.dtype == np.int64 and rows.shape == (per_pass, spec.block)
    groups = rows.reshape(-1, spec.each).tolist()
    for group in groups:
        assert len({int(person[row]) for row in group}) == 1, "K rows in a run for each person"
        check_group(spec, group, found[int(person[group[0]])])
    who = [int(person[group[0]]) for group in groups]
    assert set(who) <= able
    first = [group[0] for group in groups]
    unit = first if isinstance(spec, Pairs) else who
    assert len(set(unit)) == len(unit) == per_pass * spec.people
    if isinstance(spec, Pairs):
        assert all(row in found[int(person[row])][RGB] for row in first)


@settings(deadline=None, max_examples=20)
@given(counts=counts_of_people)
def test_cells_are_those_of_dictionaries(counts):
    person, modality = table(counts)
    cells, found = Cells.make(person, modality, len(counts)), by_person(counts)
    assert (cells.counts() == np.asarray(counts)).all() or not len(person)
    width = len(cells.modalities)
    for place, (start, end) in enumerate(zip(cells.starts[:-1], cells.starts[1:], strict=True)):
        who, what = divmod(place, width)
        rows = cells.rows[start:end].tolist()
        assert rows == sorted(found.get(who, {}).get(cells.modalities[what], set()))
    assert len(cells.rows) == len(person)


def test_records_of_nobody_are_left_out_and_cells_take_few_bytes():
    person, modality = table(full(50))
    person[::7] = -1
    cells = Cells.make(person, modality, 50)
    assert len(cells.rows) == (person >= 0).sum() and (person[cells.rows] >= 0).all()
    whole = Cells.make(*table(full(50)), 50)
    assert whole.rows.dtype == whole.starts.dtype == np.int32
    assert whole.rows.nbytes + whole.starts.nbytes == 4 * 1050 + 4 * 251 <= 8 * 1050
    rgb = Cells.make(np.arange(1000) // 4, np.zeros(1000, int), 250)
    assert rgb.modalities == (RGB,) and rgb.rows.nbytes + rgb.starts.nbytes <= 8 * 1000, (
        "few records of one modality each"
    )


@pytest.mark.parametrize(
    ("person", "modality"),
    [([0, 3], [0, 0]), ([-2, 0], [0, 0]), ([0, 0], [0]), ([0, 1], [0, -1]), ([0, 1], [0, 5]), ([0, 1], [100, 0])],
)
def test_what_is_out_of_range_is_refused_and_not_taken_for_rgb(person, modality):
    with pytest.raises(ValueError, match="for each record"):
        Cells.make(np.asarray(person), np.asarray(modality), 3)


@pytest.mark.parametrize("spec", SPECS, ids=titled)
def test_a_block_is_the_same_however_it_is_asked_for(spec):
    counts = np.random.default_rng(1).integers(0, 5, (40, 5))
    counts[:20] = 4
    draw, _, _ = drawn(spec, counts, seed=3)
    whole = rows_of(draw, 2, 0, 30)
    parts = np.concatenate([rows_of(draw, 2, first, 1) for first in range(30)])
    assert (whole == parts).all(), "in one chunk or one by one"
    again, _, _ = drawn(spec, counts, seed=3)
    assert (rows_of(again, 2, 11, 7) == whole[11:18]).all()
    kept = pickle.loads(pickle.dumps(draw))
    assert (rows_of(kept, 2, 11, 7) == whole[11:18]).all()
    other, _, _ = drawn(spec, counts, seed=4)
    assert (rows_of(other, 2, 0, 30) != whole).mean() > 0.5
    assert (rows_of(draw, 3, 0, 30) != whole).mean() > 0.5


def keys(draw: Draw, world: int, rank: int, together: int, start: int = 0, epochs: int = 3) -> list:
    batch = together * draw.block
    updates = draw.batches // together
    share = together // world
    plan = Plan(epochs * updates, updates, batch, draw.block, share, world, rank)
    return list(plan.keys(SimpleNamespace(order=draw.order), start))


@pytest.mark.parametrize("spec", [PK(people=3, each=4), ModalPK(people=3, each=4), Pairs(people=6)], ids=titled)
def test_processes_share_one_order_and_their_people_differ(spec):
    draw, person, _ = drawn(spec, full(50))
    alone = keys(draw, 1, 0, 4)
    for world in (2, 4):
        ranks = [keys(draw, world, rank, 4) for rank in range(world)]
        woven = [ranks[n % world][n // world] for n in range(len(alone))]
        assert all(a[0] == b[0] and (a[1] == b[1]).all() for a, b in zip(alone, woven, strict=True))
    assert all(len(rows) == spec.block for _, rows in alone), "whole blocks"
    for update in range(len(alone) // 4):
        rows = np.concatenate([rows for _, rows in alone[4 * update : 4 * update + 4]])
        unit = rows[:: spec.each] if isinstance(spec, Pairs) else person[rows[:: spec.each]]
        assert len(set(unit.tolist())) == 4 * spec.people, "on all processes and in all of accumulation"


def test_resuming_anywhere_goes_on_with_the_same_rows():
    draw, _, _ = drawn(ModalPK(people=3, each=4, batches_per_epoch=10), full(50))
    whole = keys(draw, 1, 0, 2)
    for step in (1, 4, 5, 12, 14):
        rest = keys(draw, 1, 0, 2, start=step)
        assert len(rest) == len(whole) - 2 * step
        assert all(a[0] == b[0] and (a[1] == b[1]).all() for a, b in zip(rest, whole[2 * step :], strict=True))


def test_an_order_is_read_in_any_order():
    draw, _, _ = drawn(ModalPK(people=2, each=2, epoch="records"), full(60))
    order = draw.order(5, 2 * draw.block)
    assert order.shape == (len(order), 2 * draw.block) == (draw.batches // 2, 8) and len(order) > CHUNK // 2
    expected = rows_of(draw, 5, 0, 2 * len(order), 2).reshape(order.shape)
    assert (np.stack([order[u, :] for u in range(len(order))]) == expected).all()
    for update in (99, 3, 4, 5, 0, len(order) - 1, 98):
        assert (order[update, 4:9] == expected[update, 4:9]).all()
        assert (order[update] == expected[update]).all()
    for update in (-1, len(order)):
        with pytest.raises(IndexError):
            order[update, 0:3]


def test_a_pass_is_cut_to_whole_updates_and_the_next_leaves_out_others():
    draw, person, _ = drawn(ModalPK(people=4, each=2, epoch="records"), full(30))
    left = Counter()
    for turn in person[rows_of(draw, 0, 0, 6 * 200, 3)[:, ::2]].reshape(200, 24):
        who = turn.tolist()
        assert len(set(who)) == len(who) == 24
        left.update(set(range(30)) - set(who))
    assert set(left) == set(range(30)), "everybody is left out at times"
    # 200 x 6 of 30, 40 each: chance keeps within 5 standard deviations.
    assert max(abs(n - 40) for n in left.values()) < 5 * 40**0.5


def test_passes_go_on_from_epoch_to_epoch():
    draw, person, _ = drawn(PK(people=2, each=2, batches_per_epoch=3), full(24))
    assert draw.batches == 3 and draw.size == 12
    who = [person[rows_of(draw, epoch, 0, 3)[:, ::2]].ravel().tolist() for epoch in range(4)]
    assert sorted(row for part in who for row in part) == list(range(24)), (
        "four epochs of 3 blocks of 2 people are one pass of 24"
    )


@pytest.mark.parametrize(
    ("spec", "batches"),
    [
        (PK(people=5, each=4), 12 // 5),
        (PK(people=5, each=4, epoch="records"), 12 * 21 // 20),
        (PK(people=5, each=4, epoch="records", batches_per_epoch=7), 7),
        (ModalPK(people=3, each=4), 10 // 3),
        (ModalPK(people=3, each=4, epoch="records"), 10 * 21 // 12),
        (Pairs(people=8), 60 // 8),
        (PK(people=12, each=50, epoch="records"), 1),
    ],
    ids=titled,
)
def test_an_epoch_is_as_long_as_it_says(spec, batches):
    """12 people with 21 records, 6 of them RGB; for those who look for two modalities, 2 have only RGB."""
    counts = full(12)
    if not isinstance(spec, PK):
        counts[3:5] = 0
        counts[3:5, RGB] = 21
    draw, _, _ = drawn(spec, counts)
    assert draw.batches == batches and draw.size == batches * spec.block


def taken(draw: Draw, turns: int) -> np.ndarray:
    """(turns, people, K) rows of whole passes, people in their own order."""
    blocks = draw.units // draw.spec.people
    rows = rows_of(draw, 0, 0, turns * blocks).reshape(turns, -1, draw.spec.each)
    return rows


def test_each_record_of_a_cell_comes_once_before_one_comes_again():
    """RGB 6, K of 21: 1 and 4 a draw, so 6 and 5 draws without one twice."""
    for spec, first, last, once in (
        (ModalPK(people=12, each=4), 0, 1, 6),
        (PK(people=12, each=4), 0, 4, 5),
    ):
        draw, person, _ = drawn(spec, full(12))
        rows = taken(draw, 8 * once)
        orders = set()
        for cycle in range(8):
            part = rows[cycle * once : (cycle + 1) * once]
            for who in range(12):
                mine = part[person[part[:, :, 0]] == who][:, first:last]
                assert len(mine) == once and len(set(mine.ravel().tolist())) == mine.size
                orders.add(tuple(mine.ravel().tolist()))
        assert len(orders) > 80, "of 96, in another order every time"


def test_records_meet_each_other_evenly():
    """PK with K = 2 of 5 records: each of the 10 pairs as often, within 5 standard deviations of chance."""
    draw, _, _ = drawn(PK(people=2, each=2), full(2, (2, 1, 1, 0, 1)))
    met = Counter(tuple(sorted(pair)) for pair in taken(draw, 4000).reshape(-1, 2).tolist())
    assert len(met) == 20
    assert max(abs(n - 400) for n in met.values()) < 5 * (400 * 0.9) ** 0.5


def test_modalities_are_asked_alike_often_when_there_are_more_than_places():
    draw, _, modality = drawn(ModalPK(people=4, each=3), full(4))
    other = Counter(tuple(sorted(modality[pair].tolist())) for pair in taken(draw, 1500)[..., 1:].reshape(-1, 2))
    assert set(other) == set(combinations(range(1, 5), 2))
    assert max(abs(n - 1000) for n in other.values()) < 5 * (1000 * 5 / 6) ** 0.5


def test_pairs_take_every_rgb_record_once_an_epoch_and_partners_evenly():
    draw, person, modality = drawn(Pairs(people=8, each=2), full(16))
    rows = rows_of(draw, 3, 0, draw.batches).reshape(-1, 2)
    assert sorted(rows[:, 0].tolist()) == np.flatnonzero(modality == RGB).tolist()
    assert (person[rows[:, 0]] == person[rows[:, 1]]).all() and (modality[rows[:, 1]] != RGB).all()
    many = rows_of(draw, 0, 0, 100 * draw.batches).reshape(-1, 2)[:, 1]
    kinds = np.bincount(modality[many], minlength=5) / len(many)
    assert kinds == pytest.approx([0, 0.25, 0.25, 0.25, 0.25], abs=0.02), "one modality is as likely as another"
    for code, size in ((1, 4), (4, 5)):
        uses = np.bincount(many)[modality == code]
        expected = 100 * 6 / 4 / size
        assert abs(uses - expected).max() < 5 * expected**0.5


@pytest.mark.parametrize("each", [3, 5, 7])
def test_pairs_take_the_caption_of_their_own_image(each):
    """Of three images of a person the first has two captions, the second one, the third none."""
    person = np.repeat(np.arange(6), 9)
    modality = np.tile([0, 0, 0, 1, 2, 3, 4, 4, 4], 6)
    of = np.where(modality == TEXT, 9 * person + np.tile([0, 0, 0, 0, 0, 0, 0, 0, 1], 6), -1)
    spec = Pairs(people=4, each=each, captions="own")
    draws = [Draw(kind, Cells.make(person, modality, 6), 3, of) for kind in (spec, Pairs(people=4, each=each))]
    taken = {0: Counter(), 1: Counter()}
    for own, plain in zip(*(rows_of(draw, 0, 0, 40).reshape(-1, each) for draw in draws), strict=True):
        assert (
            (own[0] == plain[0]) and (modality[own] == modality[plain]).all() and (person[own] == person[own[0]]).all()
        )
        captions = own[modality[own] == TEXT]
        if len(captions) and (image := int(own[0]) % 9) < 2:
            assert of[captions[0]] == own[0] and len(set(captions)) == len(captions)
            taken[image][int(captions[0]) % 9] += 1
        elif len(captions):
            assert (own == plain).all()
    assert taken[1].keys() == {8} and taken[0].keys() == {6, 7}


def test_draws_are_pinned_so_that_no_release_changes_what_a_seed_means():
    counts = full(9, (3, 2, 1, 1, 2))
    assert rows_of(drawn(ModalPK(people=3, each=4), counts)[0], 1, 0, 1).tolist() == [PINNED_MODAL]
    assert rows_of(drawn(PK(people=3, each=3), counts)[0], 0, 1, 1).tolist() == [PINNED_PK]
    assert rows_of(drawn(Pairs(people=3, each=3), counts)[0], 2, 1, 1).tolist() == [PINNED_PAIRS]


PINNED_MODAL = [36, 33, 79, 60, 39, 23, 53, 61, 41, 40, 46, 1]
PINNED_PK = [61, 69, 16, 41, 40, 12, 76, 33, 36]
PINNED_PAIRS = [5, 57, 65, 63, 2, 27, 45, 40, 46]


def test_what_cannot_be_drawn_is_said_with_what_is_needed():
    rgb_only = full(6, (4, 0, 0, 0, 0))
    with pytest.raises(
        UserError, match=r"0 of 6 people can be sampled by modal_pk; .* an RGB record and one of another"
    ):
        drawn(ModalPK(people=2, each=4), rgb_only)
    with pytest.raises(UserError, match=r"0 of 0 people"):
        Draw(PK(people=2, each=2), Cells.make(np.zeros(0, int), np.zeros(0, int), 0), 0)
    with pytest.raises(UserError, match=r"7 people in a step, but only 6 can be sampled; expected 6"):
        drawn(PK(people=7, each=2), rgb_only)
    mixed = full(6)
    mixed[2:, 1:] = 0
    with pytest.raises(UserError, match=r"3 people in a step, but only 2 can be sampled; expected 2 at most"):
        drawn(ModalPK(people=3, each=2), mixed)
    with pytest.raises(UserError, match=r"13 RGB records in a step, but only 12 can be sampled"):
        drawn(Pairs(people=13), mixed)
    mixed[1, 1:] = 0
    with pytest.raises(UserError, match=r"1 of 6 people can be sampled.*at least 2"):
        drawn(Pairs(people=3), mixed)


def test_a_batch_must_be_made_of_blocks_of_different_people():
    draw, _, _ = drawn(ModalPK(people=4, each=3), full(10))
    for batch in (6, 13, 0):
        with pytest.raises(UserError, match=rf"train.batch_size: {batch}; expected a multiple of 12, the 4 x 3"):
            draw.order(0, batch)
    assert draw.order(0, 24).shape == (1, 24)
    with pytest.raises(
        UserError, match=r"12 people in a step, 3 blocks of 4, but only 10 can be sampled; expected 3 at"
    ):
        draw.order(0, 36)
    with pytest.raises(UserError, match=r"12 people in a step"):
        rows_of(draw, 0, 0, 3, 3)
    short, _, _ = drawn(PK(people=4, each=3, batches_per_epoch=1), full(10))
    with pytest.raises(UserError, match=r"24, 2 blocks of data.sampler, of which an epoch has 1; expected 12 at most"):
        short.order(0, 24)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"name": "pk", "people": 1, "each": 4}, "people"),
        ({"name": "pk", "people": 4, "each": 1}, "each"),
        ({"name": "pk", "people": 4, "each": 2, "batches_per_epoch": 0}, "batches_per_epoch"),
        ({"name": "pairs", "people": 0}, "people"),
        ({"name": "other", "people": 4, "each": 4}, "pk"),
    ],
    ids=str,
)
def test_a_block_of_a_recipe_is_checked(block, told):
    with pytest.raises(ValueError, match=told):
        TypeAdapter(Sampler).validate_python(block)
