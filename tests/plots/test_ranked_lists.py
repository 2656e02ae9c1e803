"""Ranked lists as images: which queries are shown, what is drawn of them, and that it is drawn for every number."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from PIL import Image

from trainkit.evaluation_protocols import Search
from trainkit.interfaces import MODALITIES
from trainkit.metrics import reid
from trainkit.metrics.reid import score_search
from trainkit.plots import run_figures
from trainkit.plots.ranked_lists import RIGHT, WRONG, ranked

PERSONS, EACH = 8, 3
CAPTION, COLOUR = 4, 0


def people():
    """Of each person three colour images, and as many infrared ones and captions that ask."""
    kinds = np.repeat([0, 1, 4], PERSONS * EACH)
    person = np.tile(np.repeat(np.arange(PERSONS), EACH), 3)
    rows = {m: np.flatnonzero(kinds == m) for m in (0, 1, 4)}
    both = np.full((PERSONS * EACH, 5), -1)
    both[:, 1], both[:, 4] = rows[1], rows[4]
    nir, text = (np.where(np.arange(5) == m, both, -1) for m in (1, 4))
    lists = {"nir": nir, "text": text, "nir_text": both}
    return Search(person, np.full(len(person), -1), rows[0], lists, tuple(map(str, person)), kind="ranked"), kinds


class Split:
    """Images 40 x 20 whose red channel is the row; captions as long as there are."""

    def __init__(self, kinds, broken=()):
        self.kinds, self.broken, self.asked = kinds, broken, []

    def picture(self, row):
        self.asked.append(row)
        picture = np.full((40, 20, 3), 7, np.uint8)
        picture[..., 0] = row
        return None if self.kinds[row] == CAPTION or row in self.broken else picture

    def caption(self, row):
        assert self.kinds[row] == CAPTION
        return f"caption {row}"


def mean(features, present):
    return features.sum(1) / present.sum(1, keepdim=True)


def drawn(seed=0, **changes):
    protocol, kinds = people()
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(len(kinds), 6)) + rng.normal(size=(PERSONS, 6))[protocol.person]
    split = Split(kinds, **changes)
    return score_search(features, protocol, mean, "val", split), protocol, split


def test_pictures_are_those_of_the_queries_and_of_what_came_first():
    scores, protocol, split = drawn()
    arrays = scores.pictures["ranked"]
    shown = len(arrays["list"])
    assert shown == reid.WORST + reid.EVEN and arrays["worst"] == reid.WORST
    assert arrays["total"] == 3 * PERSONS * EACH
    for k in range(shown):
        query = arrays["queries"][k]
        assert [name for name in ("nir", "text") if name in query] == arrays["list"][k].split("_")
        assert (arrays["text"][k] != "") == ("text" in query)
        if "nir" in query:
            row = int(query["nir"][0, 0, 0])
            assert query["nir"].shape == (40, 20, 3) and query["nir"].dtype == np.uint8
            assert split.kinds[row] == 1 and protocol.person[row] == arrays["person"][k]
        first = np.array([image[0, 0, 0] for image in arrays["found"][k]])
        assert (split.kinds[first] == COLOUR).all() and len(set(first.tolist())) == 10
        assert (protocol.person[first] == arrays["person"][k]).tolist() == arrays["right"][k].tolist()
        if arrays["rank"][k] <= 10:
            assert arrays["right"][k].tolist().index(True) == arrays["rank"][k] - 1
        else:
            assert not arrays["right"][k].any()
    assert len(split.asked) == len(set(split.asked))  # each image is read once


def test_the_worst_are_of_different_persons_and_the_others_the_same_at_every_step():
    first, protocol, _ = drawn(0)
    other, _, _ = drawn(1)
    ours, theirs = (scores.pictures["ranked"] for scores in (first, other))
    assert len(set(ours["person"][: reid.WORST])) == reid.WORST
    assert ours["ap"][0] == min(ours["ap"]) == min(first.rows["ap"])
    some = slice(reid.WORST, None)
    assert ours["list"][some] == theirs["list"][some] and ours["person"][some] == theirs["person"][some]
    for one, other in zip(ours["queries"][some], theirs["queries"][some], strict=True):
        assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    assert ours["ap"][some] != theirs["ap"][some]
    assert set(ours["list"][some]) == set(protocol.queries)


def test_a_picture_that_cannot_be_read_is_white():
    broken = set(range(PERSONS * EACH)) - {3}
    arrays = drawn(broken=broken)[0].pictures["ranked"]
    assert {int(image[0, 0, 0]) for images in arrays["found"] for image in images} == {3, 255}


def test_scores_alone_read_no_picture():
    protocol, kinds = people()
    split, features = Split(kinds), np.random.default_rng(0).normal(size=(len(kinds), 4))
    for kind in ("scores", "reranked"):
        assert score_search(features, replace(protocol, kind=kind), mean, "val", split).pictures == {}
    assert split.asked == []
    assert score_search(features, protocol, mean, "val").pictures == {}


def test_frames_say_what_is_right_and_words_what_was_asked():
    arrays = drawn()[0].pictures["ranked"]
    figure = run_figures.picture("ranked", arrays, "val.ranked, step 100")
    (sheet,) = figure.axes
    frames = [to_hex(p.get_edgecolor()) for p in sheet.patches if isinstance(p, Rectangle)]
    right = sum(int(hits.sum()) for hits in arrays["right"])
    assert frames.count(RIGHT) == 1 + right and frames.count(WRONG) == 1 + 10 * len(arrays["list"]) - right
    assert len(sheet.images) == 10 * len(arrays["list"]) + sum("nir" in name for name in arrays["list"])
    words = [text.get_text() for text in figure.texts]
    assert words[:2] == ["val.ranked, step 100", "the 4 worst and 6 other queries of 72"]
    assert {"same identity", "other identity"} <= set(words)
    assert sum(word.startswith("worst: ") for word in words) == 4
    assert sum("nir + text: identity" in word for word in words) == arrays["list"].count("nir_text")
    for text in arrays["text"]:
        assert not text or f"“{text}”" in words
    assert words.count("text\nonly") == arrays["list"].count("text")
    assert words.count("10") == len(arrays["list"]) and words.count("nir") == sum(
        "nir" in query for query in arrays["queries"]
    )


def test_nothing_overlaps_or_leaves_the_figure():
    arrays = drawn()[0].pictures["ranked"]
    arrays["text"] = [("a woman in a long red coat with a small bag " * k).strip() for k in range(len(arrays["list"]))]
    figure = run_figures.picture("ranked", arrays, "val.ranked, step 100")
    figure.draw_without_rendering()
    (sheet,) = figure.axes
    words = [text.get_window_extent() for text in figure.texts]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 for box in words)
    tops = sorted((box.y0, box.y1) for text, box in zip(figure.texts, words, strict=True) if len(text.get_text()) > 20)
    assert all(low[1] <= high[0] + 3 for low, high in pairwise(tops))
    for image in sheet.images:
        box = image.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= figure.bbox.width + 1
        assert box.width == pytest.approx(box.height / 2, abs=1.5)
        assert not any(box.x0 < w.x1 and w.x0 < box.x1 and box.y0 + 2 < w.y1 and w.y0 < box.y1 - 2 for w in words)


@pytest.mark.parametrize(("size", "shape"), [(1, (64, 32)), (2, (20, 60)), (2, (90, 10))])
def test_a_picture_is_drawn_of_any_number_and_shape(size, shape):
    image = np.zeros((*shape, 3), np.uint8)
    queries = [dict.fromkeys(MODALITIES, image), {}][:size]
    results, right = [[image] * 10] * size, [[True, False] * 5] * size
    figure = ranked(queries, ["a word"] * size, results, right, ["above"] * size, "val")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    wide, tall = Image.open(out).size
    assert wide == 1200 and tall < 400 + 300 * size
    assert len(figure.axes[0].images) == 10 * size + 4


def test_long_captions_are_cut():
    figure = ranked([{}], ["word " * 300], [[]], [[]], ["above"], "val")
    words = [text.get_text() for text in figure.texts if "word word" in text.get_text()]
    assert len(words) == 3 and words[-1].endswith("…") and max(map(len, words)) <= 135


def test_arrays_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="2 captions"):
        ranked([{}], [""], [[]], [[]], ["a", "b"], "val")
