"""What two sets share: small grey images in plain loops, which pairs are found, and at what cost."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainkit.data import leakage
from trainkit.data.leakage import (
    ALIKE,
    CELLS,
    Held,
    cells,
    copies,
    edges,
    label_conflicts,
    leaks,
    look_alikes,
    sampled_rows,
    thumbnails,
)
from trainkit.data.record import UNKNOWN_CONTENT
from trainkit.data.storage.image_store import Packed, Writer

SIDE = 48


def field(seed: int, side: tuple[int, int] = (SIDE, SIDE)) -> np.ndarray:
    """An image of soft coloured blobs, uint8 (height, width, 3); every seed gives another."""
    coarse = np.random.default_rng([7, seed]).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize(side[::-1], Image.Resampling.BICUBIC))


def again(pixels: np.ndarray, quality: int = 60, scale: float = 1.0, gain: float = 1.0) -> np.ndarray:
    """The same image made smaller and large again, darker, and compressed anew."""
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
        for k, pixels in enumerate(pictures):
            writer.add_image(f"{k}.png", pixels.transpose(2, 0, 1))
        labels = more.pop("labels", np.zeros(len(pictures), np.int64))
        names = [f"c{k}" for k in range(int(labels.max()) + 1)]
        return writer.finish(labels=labels, class_names=names, **more)


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
    assert same.said == "3 of its 4 images are in data.train: s0 = t1, s2 = t0, s3 = t1"
    assert leaks(train, held([1, 2], ["zoe"])) == [] and leaks(held([]), held([])) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=20), st.lists(st.integers(0, 6), max_size=9))
def test_copies_are_those_that_loops_find(samples, others):
    prints = np.asarray([content for content, _ in samples], np.uint64)
    label = np.asarray([kind for _, kind in samples], np.int64)
    there = np.asarray(others, np.uint64)
    known = [content for content in others if content != UNKNOWN_CONTENT]
    by_hand = [[k, others.index(content)] for k, (content, _) in enumerate(samples) if content in known]
    assert copies(prints, there).tolist() == by_hand
    found = label_conflicts(prints, label)
    assert all(prints[a] == prints[b] and label[a] != label[b] for a, b in found)
    several = {
        c for c, _ in samples if c != UNKNOWN_CONTENT and len({kind for other, kind in samples if other == c}) > 1
    }
    assert {int(prints[a]) for a, _ in found} == several


def test_repeats_are_the_same_when_they_are_looked_for_part_by_part(monkeypatch):
    prints = np.random.default_rng(0).integers(0, 400, 1000).astype(np.uint64)
    first = {content: place for place, content in reversed(list(enumerate(prints.tolist())))}
    by_hand = [[first[c], k] for k, c in enumerate(prints.tolist()) if c != UNKNOWN_CONTENT and first[c] != k]
    monkeypatch.setattr(leakage, "_AT_ONCE", 150)
    assert leakage.repeats(prints).tolist() == by_hand
    parts = list(leakage.repeats_by_part([prints[:300], prints[300:301], prints[301:]]))
    assert len(parts) == 7 and sorted(np.concatenate(parts).tolist(), key=lambda pair: pair[1]) == by_hand


# ---- Small grey images ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [(16, 16), (37, 53), (112, 112), (5, 70), (1, 1), (20, 1100)], ids=str)
def test_cells_are_the_means_of_their_pixels(side):
    pixels = np.random.default_rng(1).integers(0, 256, (2, 3, *side), dtype=np.uint8)
    found = cells(pixels)
    assert found.shape == (2, CELLS, CELLS) and found.dtype == np.uint8
    pixels = pixels[:, :, :, :: 2 if side[1] > 1023 else 1]  # of many columns every second
    height, width = pixels.shape[2:]
    for n in range(2):
        for i in range(16):
            for j in range(16):
                top, left = i * height // 16, j * width // 16
                bottom, right = max(top + 1, (i + 1) * height // 16), max(left + 1, (j + 1) * width // 16)
                part = pixels[n, :, top:bottom, left:right]
                assert found[n, i, j] == int(part.sum(dtype=np.int64)) // part.size


def test_products_of_edges_are_correlations_of_the_differences_between_neighbours():
    some = np.random.default_rng(2).integers(0, 256, (3, CELLS, CELLS), dtype=np.uint8)
    by_hand = []
    for one in some.tolist():
        block = [[sum(one[2 * y + a][2 * x + b] for a in (0, 1) for b in (0, 1)) for x in range(8)] for y in range(8)]
        right = [block[y][x + 1] - block[y][x] for y in range(8) for x in range(7)]
        down = [block[y + 1][x] - block[y][x] for y in range(7) for x in range(8)]
        length = math.sqrt(sum(d * d for d in right + down))
        by_hand.append([d / length for d in right + down])
    assert np.sort(edges(some)) == pytest.approx(np.sort(by_hand), abs=1e-6)
    assert (edges(np.zeros((1, CELLS, CELLS), np.uint8)) == 0).all() and edges(some[:0]).shape == (0, 112)


# ---- Which pairs are found -------------------------------------------------------------------------------------------


def test_what_is_found_is_what_comparing_all_pairs_in_loops_finds(monkeypatch):
    """Correlations by numpy, pair by pair; how large the blocks are has no say."""
    pictures = [field(seed) for seed in range(20)] + [again(field(seed), 30, 0.5) for seed in range(0, 20, 3)]
    there = small(*pictures)
    here = small(*(again(field(seed)) for seed in range(0, 30, 2)))

    def alike(a, b):
        flat = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        return min(flat, float((edges(a[None]) * edges(b[None])).sum()))

    table = np.asarray([[alike(a, b) for b in there] for a in here])
    for blocks in ((256, 4096), (3, 5)):
        monkeypatch.setattr(leakage, "_BLOCK", blocks)
        found = look_alikes(here, there)
        assert sorted(found.here) == [k for k in range(len(here)) if table[k].max() >= ALIKE] == list(range(10))
        assert (found.compared, found.plain, found.mirrored.any()) == (15, 0, False)
        assert (np.diff(found.alike) <= 0).all()
        assert found.alike == pytest.approx(table[found.here, found.there], abs=1e-5)
        assert found.alike == pytest.approx(table[found.here].max(1), abs=1e-3)


@pytest.mark.parametrize(
    "change",
    [{"quality": 40}, {"scale": 0.5}, {"gain": 0.7}, {"quality": 50, "scale": 0.4, "gain": 0.8}],
    ids=lambda change: "-".join(change),
)
def test_a_picture_is_known_again_compressed_smaller_or_darker_and_mirrored(change):
    train = small(*(field(seed) for seed in range(20)))
    changed = [again(field(seed), **change) for seed in range(20)]
    found = look_alikes(small(*changed), train)
    assert sorted(found.here) == list(range(20)) and (found.here == found.there).all() and not found.mirrored.any()
    both = small(*changed[:10], *(pixels[:, ::-1] for pixels in changed[10:]))
    found = look_alikes(both, train, mirrored=True)
    assert sorted(found.here) == list(range(20)) and (found.here == found.there).all()
    assert (found.mirrored == (found.here >= 10)).all()


def test_both_the_cells_and_their_differences_have_to_be_alike():
    y, x = np.mgrid[:CELLS, :CELLS]
    board = 25 * (((x // 2) + (y // 2)) % 2)
    shaded = [(8 * y + some + 60).astype(np.uint8)[None] for some in (0.3 * board, 0 * board)]  # as sea below sky
    drawn = [(board + some + 60).astype(np.uint8)[None] for some in (2 * x, 2 * (15 - x))]  # strokes in other light
    for (a, b), unlike in ((shaded, "edges"), (drawn, "cells")):
        products = {"edges": float((edges(a) * edges(b)).sum()), "cells": np.corrcoef(a.ravel(), b.ravel())[0, 1]}
        assert products.pop(unlike) < ALIKE - 0.05 and min(products.values()) > ALIKE
        assert len(look_alikes(a, b).here) == 0 and len(look_alikes(a, a).here) == 1


def test_what_is_too_plain_is_counted_and_not_compared():
    plain = np.full((2, CELLS, CELLS), 200, np.uint8)
    plain[1, :8] += 3
    found = look_alikes(np.concatenate([plain, small(field(1))]), np.concatenate([plain, small(field(1))]))
    assert (found.plain, found.compared, found.here.tolist(), found.there.tolist()) == (2, 3, [2], [2])
    assert len(look_alikes(plain[:0], plain[:0]).here) == 0 == len(look_alikes(small(field(1)), plain).here)


# ---- The cost --------------------------------------------------------------------------------------------------------


def test_of_a_large_set_a_fixed_part_is_looked_at(tmp_path, monkeypatch):
    data = packed(tmp_path / "set", [field(seed, (16, 16)) for seed in range(40)])
    assert sampled_rows(data).tolist() == list(range(40))
    monkeypatch.setattr(leakage, "PICTURES", 12)
    part = sampled_rows(data)
    assert len(part) == 12 and (np.diff(part) > 0).all() and (sampled_rows(data) == part).all()
    assert part.tolist() != list(range(12)) and len(sampled_rows(data, whole=True)) == 40
    monkeypatch.setattr(leakage, "BYTES", {"decoded": 6 * 16 * 16 * 3, "encoded": 0})  # the file has a header
    assert set(sampled_rows(data).tolist()) <= set(part.tolist()) and len(sampled_rows(data)) == 5
    assert len(thumbnails(data).rows) == 5


def test_pairs_beyond_the_bound_are_not_compared_and_that_is_told(monkeypatch):
    some = np.repeat(small(field(1)), 300, 0)
    monkeypatch.setattr(leakage, "PAIRS", 20 * 100)
    found = look_alikes(some, some[:20])
    assert found.compared == 100 and sorted(found.here) == list(range(0, 300, 3))
    assert look_alikes(some, some[:20], whole=True).compared == 300 == look_alikes(some, some[:6]).compared


@pytest.mark.parametrize("form", ["decoded", "encoded", "own sizes"])
def test_looks_are_kept_and_read_again_without_a_picture(tmp_path, monkeypatch, form):
    sides = [(20 + seed % 3 * (form == "own sizes"), 24) for seed in range(9)]
    pictures = [field(seed, side) for seed, side in enumerate(sides)]
    data = packed(tmp_path / "set", pictures, "decoded" if form == "decoded" else "encoded", form == "own sizes")
    first = thumbnails(data, tmp_path / "cache")
    assert (first.cells == small(*pictures)).all() and first.rows.tolist() == list(range(9))

    def never(*_):
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(Packed, "fetch", never)
        patch.setattr(Packed, "pictures", never)
        assert (thumbnails(data, tmp_path / "cache").cells == first.cells).all()
    (file,) = (tmp_path / "cache").iterdir()
    for damage in (b"", b"PK\x03\x04 no archive", file.read_bytes()[:-100]):
        file.write_bytes(damage)
        assert (thumbnails(data, tmp_path / "cache").cells == first.cells).all()
    (tmp_path / "no folder").write_text("")
    assert (thumbnails(data, tmp_path / "no folder").cells == first.cells).all()


def test_a_damaged_row_is_named_and_the_others_are_looked_at(tmp_path):
    pictures = [field(seed, (16, 16)) for seed in range(6)]
    begin, end = packed(tmp_path / "set", pictures).span("image", 3)
    with open(tmp_path / "set" / "rows.arrow", "r+b") as file:
        file.seek(begin)
        file.write(bytes(end - begin))
    data = _unchecked(tmp_path / "set")
    found = thumbnails(data, tmp_path / "cache")
    assert found.rows.tolist() == [0, 1, 2, 4, 5]
    assert len(found.damaged) == 1 and "row 3 (3.png)" in found.damaged[0]
    assert not (tmp_path / "cache").exists()  # once mended, it is looked at again
    places, some = found.of(np.asarray([5, 3, 0]))
    assert places.tolist() == [0, 2] and (some == found.cells[[4, 0]]).all()


def _unchecked(folder) -> Packed:
    """A packed set opened as one that is too large for its hash to be compared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainkit.data.rows.reader.HASHED_AT_OPEN", 0)
        return Packed(folder)
