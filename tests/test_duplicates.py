"""What two sets share: small grey pictures and their hashes in plain loops, which pairs are found, and at what cost."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainkit.data import duplicates
from trainkit.data.duplicates import BITS, CELLS, Held, across, cells, chosen, copies, hashes, leaks, look, twins
from trainkit.data.packed import Packed, Writer

SIDE = 48


def field(seed: int, side: tuple[int, int] = (SIDE, SIDE)) -> np.ndarray:
    """A picture of soft coloured blobs, uint8 (height, width, 3); every seed gives another."""
    coarse = np.random.default_rng([7, seed]).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize(side[::-1], Image.Resampling.BICUBIC))


def again(pixels: np.ndarray, quality: int = 60, scale: float = 1.0, gain: float = 1.0) -> np.ndarray:
    """The same picture made smaller and large again, darker, and compressed anew."""
    picture = Image.fromarray((pixels * gain).astype(np.uint8))
    width, height = picture.size
    picture = picture.resize((round(width * scale), round(height * scale))).resize((width, height))
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=quality)
    return np.asarray(Image.open(io.BytesIO(stream.getvalue())))


def small(*pictures: np.ndarray) -> np.ndarray:
    return np.concatenate([cells(pixels.transpose(2, 0, 1)[None]) for pixels in pictures])


def packed(out, pictures, store="decoded", own_sizes=False, **more) -> Packed:
    size = None if own_sizes else pictures[0].shape[:2]
    with Writer(out, size=size, store=store) as writer:
        for pixels in pictures:
            writer.add(pixels.transpose(2, 0, 1))
        labels = more.pop("labels", np.zeros(len(pictures), np.int64))
        names = [f"c{k}" for k in range(int(labels.max()) + 1)]
        return writer.finish(labels=labels, class_names=names, ids=[f"{k}.png" for k in range(len(pictures))], **more)


def held(prints, subjects=(), kind="people", letter="s") -> Held:
    return Held(
        prints=np.asarray(prints, np.uint64),
        names=lambda places: [f"{letter}{place}" for place in places],
        subjects=frozenset(subjects),
        kind=kind,
    )


# ---- The same content, the same name ---------------------------------------------------------------------------------


def test_what_is_shared_is_counted_and_named_by_the_first_of_its_kind():
    train = held([5, 9, 9, 7], ["anna", "ben"], letter="t")
    subjects, same = leaks(train, held([9, 1, 5, 9], ["ben", "zoe", "kim"]))
    assert (subjects.what, subjects.count, subjects.examples) == ("subjects", 1, ["ben"])
    assert subjects.said == "1 of its 3 people are in data.train: ben"
    assert (same.what, same.count) == ("copies", 3)
    assert same.said == "3 of its 4 pictures are in data.train: s0 = t1, s2 = t0, s3 = t1"
    assert leaks(train, held([1, 2], ["zoe"])) == [] and leaks(held([]), held([])) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=20), st.lists(st.integers(0, 6), max_size=9))
def test_copies_are_those_that_loops_find(samples, others):
    prints = np.asarray([content for content, _ in samples], np.uint64)
    label = np.asarray([kind for _, kind in samples], np.int64)
    there = np.asarray(others, np.uint64)
    by_hand = [[k, others.index(content)] for k, (content, _) in enumerate(samples) if content in others]
    assert copies(prints, there).tolist() == by_hand
    found = across(prints, label)
    assert all(prints[a] == prints[b] and label[a] != label[b] for a, b in found)
    several = {c for c, _ in samples if len({kind for content, kind in samples if content == c}) > 1}
    assert {int(prints[a]) for a, _ in found} == several


# ---- Small grey pictures and their hashes ----------------------------------------------------------------------------


@pytest.mark.parametrize("side", [(16, 18), (37, 53), (112, 112), (5, 70), (1, 1)], ids=str)
def test_cells_are_the_means_of_their_pixels(side):
    pixels = np.random.default_rng(1).integers(0, 256, (2, 3, *side), dtype=np.uint8)
    found = cells(pixels)
    assert found.shape == (2, *CELLS) and found.dtype == np.uint8
    for n in range(2):
        for i in range(16):
            for j in range(18):
                top, left = i * side[0] // 16, j * side[1] // 18
                bottom, right = max(top + 1, (i + 1) * side[0] // 16), max(left + 1, (j + 1) * side[1] // 18)
                values = [
                    int(pixels[n, c, y, x]) for c in range(3) for y in range(top, bottom) for x in range(left, right)
                ]
                assert found[n, i, j] == sum(values) // len(values)


def test_a_hash_says_where_brightness_grows_to_the_right():
    some = np.random.default_rng(2).integers(0, 256, (5, *CELLS), dtype=np.uint8)
    for one, code in zip(some.tolist(), hashes(some), strict=True):
        bits = []
        for y in range(8):
            row = [sum(one[2 * y + a][2 * x + b] for a in (0, 1) for b in (0, 1)) for x in range(9)]
            bits += [row[x + 1] > row[x] for x in range(8)]
        assert np.unpackbits(np.asarray([code]).view(np.uint8)).tolist() == bits
    assert len(hashes(some[:0])) == 0


# ---- Which pairs are found -------------------------------------------------------------------------------------------


def all_near(here, there):
    orders = [duplicates._ordered(there & mask) for mask in duplicates._MASKS]
    return {(int(a), int(b)) for some in duplicates._near(here, there, orders) for a, b in zip(*some, strict=True)}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64 - 1), st.sets(st.integers(0, 63), max_size=BITS + 2))
def test_hashes_that_differ_in_few_bits_always_meet(code, flipped):
    other = code
    for bit in flipped:
        other ^= 1 << bit
    found = all_near(np.asarray([code], np.uint64), np.asarray([other], np.uint64))
    assert bool(found) == (len(flipped) <= BITS)


def test_bands_find_what_comparing_all_pairs_finds(monkeypatch):
    draw = np.random.default_rng(3)
    centres = draw.integers(0, 2**64, 12, dtype=np.uint64)
    noise = [sum(1 << int(bit) for bit in draw.choice(64, draw.integers(0, 6), replace=False)) for _ in range(300)]
    codes = centres[draw.integers(0, 12, 300)] ^ np.asarray(noise, np.uint64)
    here, there = codes[:140], codes[140:]
    by_hand = {(a, b) for a in range(140) for b in range(160) if (int(here[a]) ^ int(there[b])).bit_count() <= BITS}
    assert len(by_hand) > 500 and all_near(here, there) == by_hand
    monkeypatch.setattr(duplicates, "_AT_ONCE", 7)  # the portions have no say
    assert all_near(here, there) == by_hand


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 12))
def test_portions_cover_all_once_and_are_no_larger_than_they_must_be(many, most):
    parts = list(duplicates._portions(np.asarray(many, np.int64), most))
    assert [k for part in parts for k in range(part.start, part.stop)] == list(range(len(many)))
    assert all(sum(many[part]) <= most or part.stop - part.start == 1 for part in parts)


def test_the_bands_part_the_64_bits():
    masks = [int(mask) for mask in duplicates._MASKS]
    assert sum(masks) == 2**64 - 1 and len(masks) == BITS + 1 and all(mask.bit_count() in (9, 10) for mask in masks)


def test_the_most_alike_is_found_and_its_correlation_is_that_of_numpy():
    train = small(*(field(seed) for seed in range(30)))
    scored = small(field(100), again(field(4)), again(field(17), 30), field(9))
    found = twins(scored, train)
    assert sorted(zip(found.here.tolist(), found.there.tolist(), strict=True)) == [(1, 4), (2, 17), (3, 9)]
    assert (found.compared, found.plain) == (4, 0) and (np.diff(found.alike) <= 0).all()
    for here, there, bits, alike in zip(found.here, found.there, found.bits, found.alike, strict=True):
        by_numpy = np.corrcoef(scored[here].ravel(), train[there].ravel())[0, 1]
        assert alike == pytest.approx(by_numpy, abs=1e-5)
        assert bits == (int(hashes(scored[[here]])[0]) ^ int(hashes(train[[there]])[0])).bit_count()


@pytest.mark.parametrize(
    "change",
    [{"quality": 40}, {"scale": 0.5}, {"gain": 0.7}, {"quality": 50, "scale": 0.4, "gain": 0.8}],
    ids=lambda change: "-".join(change),
)
def test_a_picture_is_known_again_compressed_smaller_or_darker(change):
    train = small(*(field(seed) for seed in range(40)))
    found = twins(small(*(again(field(seed), **change) for seed in range(40))), train)
    assert len(found.here) >= 39 and (found.here == found.there).all()


def test_other_pictures_and_mirrored_ones_are_not_taken_for_copies():
    train = small(*(field(seed) for seed in range(150)))
    assert len(twins(small(*(field(seed) for seed in range(200, 350))), train).here) == 0
    assert len(twins(small(*(field(seed)[:, ::-1] for seed in range(50))), train).here) == 0


def test_one_hash_is_not_enough():
    """Ramps of other shapes grow to the right everywhere: all bits are equal, the pictures are not."""
    x = np.linspace(0, 1, CELLS[1])
    ramp, step = (np.tile(curve, (CELLS[0], 1)) for curve in (200 * x, 200 / (1 + np.exp(-40 * (x - 0.8))) + 9 * x))
    here, there = (some.astype(np.uint8)[None] for some in (ramp, step))
    assert (int(hashes(here)[0]) ^ int(hashes(there)[0])).bit_count() <= BITS
    assert np.corrcoef(here.ravel(), there.ravel())[0, 1] < duplicates.ALIKE
    assert len(twins(here, there).here) == 0 and len(twins(here, here).here) == 1


def test_what_is_too_plain_is_counted_and_not_compared():
    plain = np.full((2, *CELLS), 200, np.uint8)
    plain[1, :8] += 3
    found = twins(np.concatenate([plain, small(field(1))]), np.concatenate([plain, small(field(1))]))
    assert (found.plain, found.compared, found.here.tolist(), found.there.tolist()) == (2, 3, [2], [2])
    assert len(twins(plain[:0], plain[:0]).here) == 0


def test_one_look_under_two_classes():
    some = small(field(1), field(2), again(field(1)), field(3), again(field(2)))
    label = np.asarray([0, 1, 1, 0, 1])
    found = twins(some, some, (label, label))
    assert sorted(zip(found.here.tolist(), found.there.tolist(), strict=True)) == [(0, 2), (2, 0)]


# ---- The cost --------------------------------------------------------------------------------------------------------


def test_of_a_large_set_a_fixed_part_is_looked_at(tmp_path, monkeypatch):
    data = packed(tmp_path / "set", [field(seed, (16, 16)) for seed in range(40)])
    assert chosen(data).tolist() == list(range(40))
    monkeypatch.setattr(duplicates, "PICTURES", 12)
    part = chosen(data)
    assert len(part) == 12 and (np.diff(part) > 0).all() and (chosen(data) == part).all()
    assert part.tolist() != list(range(12)) and len(chosen(data, whole=True)) == 40
    monkeypatch.setattr(duplicates, "BYTES", {"decoded": 6 * 16 * 16 * 3, "encoded": 0})  # the file has a header
    assert set(chosen(data).tolist()) <= set(part.tolist()) and len(chosen(data)) == 5
    assert len(look(data).rows) == 5


def test_pairs_beyond_the_bound_are_not_compared_and_that_is_told(monkeypatch):
    # Three hundred pictures whose hashes meet in every band.
    some = np.repeat(small(field(1)), 300, 0)
    monkeypatch.setattr(duplicates, "_COMPARED", 7 * 8 * 100)
    found = twins(some, some[:20])
    assert found.compared == 100 and len(found.here) == 100  # 8 of 20 alike, in 7 bands: a third of them
    monkeypatch.setattr(duplicates, "_COMPARED", 1 << 28)
    assert twins(some, some[:20]).compared == 300


@pytest.mark.parametrize("form", ["decoded", "encoded", "own sizes"])
def test_looks_are_kept_and_read_again_without_a_picture(tmp_path, monkeypatch, form):
    sides = [(20 + seed % 3 * (form == "own sizes"), 24) for seed in range(9)]
    pictures = [field(seed, side) for seed, side in enumerate(sides)]
    data = packed(tmp_path / "set", pictures, "decoded" if form == "decoded" else "encoded", form == "own sizes")
    first = look(data, tmp_path / "cache")
    assert (first.cells == small(*pictures)).all() and first.rows.tolist() == list(range(9))

    def never(*_):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(Packed, "fetch", never)
        patch.setattr(Packed, "pictures", never)
        assert (look(data, tmp_path / "cache").cells == first.cells).all()
    (file,) = (tmp_path / "cache").iterdir()
    for damage in (b"", b"PK\x03\x04 no archive", file.read_bytes()[:-100]):
        file.write_bytes(damage)
        assert (look(data, tmp_path / "cache").cells == first.cells).all()
    (tmp_path / "no folder").write_text("")
    assert (look(data, tmp_path / "no folder").cells == first.cells).all()


def test_a_damaged_row_is_named_and_the_others_are_looked_at(tmp_path):
    pictures = [field(seed, (16, 16)) for seed in range(6)]
    packed(tmp_path / "set", pictures)
    with open(tmp_path / "set" / "images.npy", "r+b") as file:
        size = 3 * 16 * 16
        file.seek(-3 * size, 2)
        file.write(bytes(size))
    data = _unchecked(tmp_path / "set")
    found = look(data, tmp_path / "cache")
    assert found.rows.tolist() == [0, 1, 2, 4, 5]
    assert len(found.damaged) == 1 and "row 3 (3.png)" in found.damaged[0]
    assert not (tmp_path / "cache").exists()  # once mended, it is looked at again
    places, some = found.of(np.asarray([5, 3, 0]))
    assert places.tolist() == [0, 2] and (some == found.cells[[4, 0]]).all()


def _unchecked(folder) -> Packed:
    """A packed set opened as one that is too large for its hash to be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainkit.data.hashed.HASHED_AT_OPEN", 0)
        return Packed(folder)


def test_looks_take_the_bytes_that_are_told():
    assert math.prod(CELLS) == 288 and small(field(0)).nbytes == 288
