"""Randomness as a pure function: pinned, uniform, independent from stream to stream, and free of hidden state."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from trainkit import rng as seeding

ROWS = np.arange(100_000)
PINNED_NUMBER = 5192706445441871157
PINNED_UNIFORM = [0.008059903778410815, 0.43053148472412883, 0.8635503910049872]
PINNED_ORDER = [2, 8, 4, 7, 9, 3, 6, 1, 5, 0]
PINNED_PERMUTED = [16, 12, 10, 4, 9, 14, 13, 2, 7, 15, 17, 18, 8, 6, 0, 19, 11, 1, 3, 5]
PINNED_NORMAL = [-0.6642495393753052, -0.2622249722480774]


def plain_word(seed: int, stream: str, *parts: int) -> int:
    """The hash with Python's own integers, from SplitMix64's definition."""
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


def plain_permuted(seed: int, stream: str, key: int, size: int, position: int) -> int:
    """`seeding.permuted` with Python's own integers, cell by cell on its grid."""
    base = plain_word(seed, stream, key)
    width = 2 ** (size.bit_length() // 2)
    keys, mask = (base % 2**32, base // 2**32), 2**32 - 1
    row, column = divmod((position + int((base >> 11) / 2**53 * size)) % size, width)
    for number, odd in enumerate(map(int, seeding._ROUNDS)):
        x = ((column if number % 2 else row) + keys[number % 2]) * odd & mask
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D & mask) >> 16
        if number % 2:
            cells = len(range(column, size, width))
            row = (row + (x * cells >> 16)) % cells
        else:
            cells = min(width, size - row * width)
            column = (column + (x * cells >> 16)) % cells
    return row * width + column


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 257])
def test_permuted_is_its_definition_and_a_permutation(size):
    for key in (0, 1, 12345678901):
        places = seeding.permuted(7, "x", key, size, np.arange(size))
        assert places.dtype == np.int64 and sorted(places.tolist()) == list(range(size))
        assert places.tolist() == [plain_permuted(7, "x", key, size, i) for i in range(size)]


@pytest.mark.parametrize(
    ("size", "pinned"),
    [
        (2, 1418014740),
        (9, 2644767712),
        (257, 927567966),
        (65_536, 2345175021),
        (65_537, 3193954008),
        (99_999, 3840897512),
        (5_822_653, 2105281990),
        (10**9, 1583362494),
        (2**30, 2139775735),
        (2**31 - 1, 467600081),
        (2**31, 1392855899),
    ],
)
def test_permuted_is_pinned_and_its_definition_at_both_ends_of_large_sets(size, pinned):
    ends = np.r_[0 : min(size, 40_000), size - min(size, 40_000) : size]
    places = seeding.permuted(11, "pin", 3, size, ends)
    assert zlib.crc32(places.astype("<i8").tobytes()) == pinned
    for i in range(0, len(ends), 1 + len(ends) // 200):
        assert places[i] == plain_permuted(11, "pin", 3, size, int(ends[i])), ends[i]


def test_permuted_of_many_keys_and_sizes_is_pinned():
    key = np.arange(3000)[:, None]
    size = np.arange(1, 4) * (key + 1) * 97
    places = seeding.permuted(11, "pin", key, size, (key * size // 5) % size)
    assert zlib.crc32(places.astype("<i8").tobytes()) == 841357442
    for i in range(0, 3000, 59):
        assert places[i, 1] == plain_permuted(11, "pin", i, int(size[i, 1]), int(i * size[i, 1] // 5 % size[i, 1]))


def test_permuted_takes_numbers_and_arrays_in_any_mixture():
    rng = np.random.default_rng(0)
    keys, sizes = rng.integers(0, 2**40, (50, 1)), rng.integers(1, 200, (50, 8))
    positions = rng.integers(0, sizes)
    places = seeding.permuted(3, "x", keys, sizes, positions)
    assert places.shape == (50, 8)
    for i, j in ((0, 0), (17, 3), (49, 7)):
        one = seeding.permuted(3, "x", int(keys[i, 0]), int(sizes[i, j]), int(positions[i, j]))
        assert one.shape == () and places[i, j] == one
    assert (
        seeding.permuted(3, "x", 5, 60, np.arange(60)) == seeding.permuted(3, "x", 5, np.full(60, 60), np.arange(60))
    ).all()
    assert seeding.permuted(3, "x", 5, 60, np.zeros((0, 4), int)).shape == (0, 4)
    assert seeding.permuted(3, "x", 5, np.ones((0, 4), int), 0).shape == (0, 4)


def test_permuted_reaches_the_largest_sizes():
    for size in (2**31, 2**31 - 1, 10**9):
        ends = np.r_[0:1000, size - 1000 : size]
        places = seeding.permuted(0, "x", 1, size, ends)
        assert places.min() >= 0 and places.max() < size and len(set(places.tolist())) == 2000
        assert abs(places.mean() / size - 0.5) < 5 / (12 * 2000) ** 0.5
    for size in (0, 2**31 + 1, np.array([3, 0])):
        with pytest.raises(ValueError, match="1 to 2"):
            seeding.permuted(0, "x", 1, size, 0)


@pytest.mark.parametrize(("size", "uneven"), [(2, 0), (3, 0.02), (5, 0.05), (10, 0.06), (31, 0.02), (100, 0.02)])
def test_permuted_sends_positions_everywhere_alike_often(size, uneven):
    """Single positions by chance alone; pairs of them within `uneven` of even, root mean square, and chance."""
    keys = np.arange(100_000)
    one, other = seeding.permuted(0, "x", keys[:, None], size, np.array([0, size - 1])).T
    expected = len(keys) / size
    assert abs(np.bincount(one, minlength=size) - expected).max() < 5 * expected**0.5
    met = np.bincount(one * size + other, minlength=size * size).reshape(size, size)
    assert not met.diagonal().any()
    expected = len(keys) / (size * (size - 1))
    spread = ((met[~np.eye(size, dtype=bool)] / expected - 1) ** 2).mean()
    assert spread < uneven**2 + (1 + 6 * (2 / (size * (size - 1))) ** 0.5) / expected


def test_permutations_of_different_keys_and_streams_are_unrelated():
    whole = [
        seeding.permuted(*place, 10_000, np.arange(10_000))
        for place in ((0, "x", 0), (0, "x", 1), (1, "x", 0), (0, "y", 0))
    ]
    for place, other in enumerate(whole[1:]):
        assert (whole[0] == other).sum() < 10, place  # as many as positions come to the same place by chance: 1
        assert abs(np.corrcoef(whole[0], other)[0, 1]) < 0.05
    assert seeding.permuted(0, "flip", 3, 20, np.arange(20)).tolist() == PINNED_PERMUTED


def test_an_epoch_has_the_first_rows_of_its_permutation_in_batches():
    table = seeding.order(3, 2, 1003, 10)
    assert table.dtype == np.int64 and table.shape == (100, 10)
    assert (table.ravel() == seeding.permutation(3, 2, 1003)[:1000]).all()
