"""Randomness as a pure function: pinned, uniform, independent from stream to stream, and free of hidden state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainkit import seeding

ROWS = np.arange(100_000)
PINNED_NUMBER = 5192706445441871157
PINNED_UNIFORM = [0.008059903778410815, 0.43053148472412883, 0.8635503910049872]
PINNED_ORDER = [2, 8, 4, 7, 9, 3, 6, 1, 5, 0]
PINNED_NORMAL = [-0.6642495393753052, -0.2622249722480774]


def plain_word(seed: int, stream: str, *parts: int) -> int:
    """The hash with Python's own integers, from SplitMix64's definition."""
    import zlib

    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def scramble(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = seed & mask
    for part in (zlib.crc32(stream.encode()), *parts):
        state = scramble((state + golden + (part & mask) * golden) & mask)
    return state


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("parts", [(), (0,), (3, 5), (-1, 2**40)])
def test_a_word_is_the_hash_of_its_place(seed, parts):
    assert int(seeding.words(seed, "flip", *parts)[0]) == plain_word(seed, "flip", *parts)
    assert seeding.number(seed, "flip", *parts) == plain_word(seed, "flip", *parts) >> 1


def test_draws_are_pinned_so_that_no_release_changes_what_a_seed_means():
    assert seeding.number(0, "weights") == PINNED_NUMBER
    assert seeding.uniform(0, "flip", 0, np.arange(3)).tolist() == PINNED_UNIFORM
    assert seeding.permutation(0, 0, 10).tolist() == PINNED_ORDER
    assert torch.randn(2, generator=seeding.generator(0, "centres")).tolist() == pytest.approx(PINNED_NORMAL)


def test_a_draw_depends_on_nothing_but_its_place():
    whole = seeding.uniform(7, "flip", 3, ROWS[:1000])
    np.random.seed(1)
    torch.manual_seed(1)
    order = np.random.default_rng(0).permutation(1000)
    assert (seeding.uniform(7, "flip", 3, ROWS[:1000][order]) == whole[order]).all(), "in any order"
    assert all(seeding.uniform(7, "flip", 3, np.array([i]))[0] == whole[i] for i in (0, 17, 999)), "alone"
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    seeding.permutation(7, 3, 100), seeding.number(7, "x"), seeding.generator(7, "x")
    assert torch.equal(torch.get_rng_state(), state[0]) and (np.random.get_state()[1] == state[1]).all()


@pytest.mark.parametrize("place", [(0, "flip", 0), (1, "flip", 0), (0, "crop", 0), (0, "flip", 99)], ids=str)
def test_draws_are_uniform(place):
    """Chi-square over 100 cells: mean 99, deviation 14; beyond 99 + 6 * 14 chance does not go."""
    draws = seeding.uniform(*place, ROWS)
    assert draws.dtype == np.float64 and draws.min() >= 0 and draws.max() < 1
    expected = len(ROWS) / 100
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert 99 - 6 * 14 < ((counts - expected) ** 2 / expected).sum() < 99 + 6 * 14
    lowest = (draws * 2**20 % 1 < 0.5).mean()  # the low bits are as good as the high ones
    assert abs(lowest - 0.5) < 5 * 0.5 / len(ROWS) ** 0.5


@pytest.mark.parametrize(
    "other",
    [(1, "flip", 0), (0, "crop", 0), (0, "flip", 1), (2**32, "flip", 0)],
    ids=["seed", "stream", "epoch", "high"],
)
def test_draws_of_different_seeds_streams_and_epochs_are_unrelated(other):
    a, b = seeding.uniform(0, "flip", 0, ROWS), seeding.uniform(*other, ROWS)
    for shift in (0, 1, 2):
        assert abs(np.corrcoef(a, np.roll(b, shift))[0, 1]) < 5 / len(ROWS) ** 0.5


def test_neighbouring_samples_are_unrelated():
    draws = seeding.uniform(0, "flip", 0, ROWS)
    for shift in (1, 2, 64):
        assert abs(np.corrcoef(draws[:-shift], draws[shift:])[0, 1]) < 5 / len(ROWS) ** 0.5


def test_the_place_of_a_part_counts():
    assert seeding.number(0, "a", 1, 2) != seeding.number(0, "a", 2, 1)
    assert seeding.number(0, "a", 0) != seeding.number(0, "a") != seeding.number(0, "b")
    assert len({int(w) for w in seeding.words(0, "a", np.arange(1000)[:, None], np.arange(100)).ravel()}) == 100_000


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_an_order_holds_every_row_once_and_differs_from_epoch_to_epoch(size):
    places = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders = [seeding.permutation(*place, size) for place in places]
    assert all(sorted(order.tolist()) == list(range(size)) for order in orders)
    assert all((a == seeding.permutation(*place, size)).all() for a, place in zip(orders, places, strict=True))
    assert size < 1000 or len({tuple(order) for order in orders}) == 4


def test_every_place_of_an_order_is_as_likely():
    """Where row 0 comes in 1,800 epochs of 6 rows: binomial, 300 each, deviation 16."""
    places = [int(np.flatnonzero(seeding.permutation(0, epoch, 6) == 0)[0]) for epoch in range(1800)]
    assert all(abs(count - 300) < 6 * 16 for count in np.bincount(places, minlength=6))


def test_layers_draw_by_step_micro_batch_and_rank():
    def drawn(*place: int) -> list[float]:
        seeding.reseed(torch.device("cpu"), *place)
        return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()

    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    first = [drawn(*place) for place in places]
    assert len({tuple(draw) for draw in first}) == 5
    assert [drawn(*place) for place in reversed(places)] == first[::-1], "whatever was drawn before"
