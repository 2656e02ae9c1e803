"""Figures are read back: what was drawn, on which axes, under which names."""

import io
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from runs import ROOT

from trainkit.metrics import embedding_inspection
from trainkit.plots import curves as figures
from trainkit.plots import embeddings


def drawn(axes):
    """Label to (x, y) of every line that has a name."""
    return {
        line.get_label(): (np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float))
        for line in axes.get_lines()
    }


def picture(figure):
    file = io.BytesIO()
    figure.savefig(file, dpi=120, bbox_inches="tight", format="png")
    file.seek(0)
    return Image.open(file).convert("RGB")


def words(axes):
    return [title(axes.figure), axes.get_xlabel(), axes.get_ylabel()]


def title(figure):
    return figure.texts[0].get_text().replace("\n", " ")


def about(figure):
    return figure.texts[1].get_text()


def test_roc_draws_each_curve_over_a_logarithmic_rate():
    curves = {
        "teacher": ([0, 0.004, 0.2, 1], [0.3, 0.6, 0.9, 1.0]),
        "student": (np.array([0.002, 0.5, 1]), np.array([0.1, 0.8, 1.0])),
    }
    (axes,) = figures.roc(curves).axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlim() == pytest.approx((0.001, 1))
    x, y = drawn(axes)["teacher"]
    assert x.tolist() == pytest.approx([0.001, 0.004, 0.2, 1])  # what has no false accept begins at the edge
    assert y.tolist() == [0.3, 0.6, 0.9, 1.0]
    assert all(line.get_drawstyle() == "steps-post" for line in axes.get_lines()[:2])
    x, y = drawn(axes)["chance level"]
    assert x.tolist() == y.tolist()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["teacher", "student", "chance level"]
    assert all(words(axes))
    assert title(axes.figure) == "ROC curve"


def test_roc_of_high_curves_shows_the_top_and_hides_no_point():
    (axes,) = figures.roc({"a": ([0, 1e-5, 1], [0.91, 0.95, 1.0]), "b": ([1e-6, 1], [0.87, 1.0])}).axes
    low, high = axes.get_ylim()
    assert 0.8 <= low < 0.87
    assert high > 1
    assert axes.get_xlim()[0] == pytest.approx(1e-6)


def test_roc_of_a_perfect_and_of_a_useless_score_can_be_drawn():
    for tar in ([1.0, 1.0], [0.0, 1.0]):
        (axes,) = figures.roc({"net": ([0.0, 1.0], tar)}).axes
        assert axes.get_xlim() == pytest.approx((0.1, 1))
        assert picture(axes.figure).size[0] > 800
    with pytest.raises(ValueError, match="no curve"):
        figures.roc({})


def test_many_curves_differ_in_colour_or_dash():
    curves = {f"net {k}": ([0.001, 1], [0.1 + k / 50, 1.0]) for k in range(20)}
    lines = figures.roc(curves).axes[0].get_lines()[:20]
    looks = {(line.get_color(), str(line.get_linestyle()), line._dash_pattern[1] and tuple(line._dash_pattern[1]))
             for line in lines}  # fmt: skip
    assert len(looks) == 20


def test_drawing_leaves_no_global_state_of_pyplot():
    code = (
        "import sys; from trainkit.plots import curves as figures; assert 'matplotlib' not in sys.modules;"
        "figures.roc({'a': ([0.1, 1], [0.5, 1])});"
        "assert 'matplotlib' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def marks(axes):
    """Label to points of every group of markers that has a name."""
    return {group.get_label(): np.asarray(group.get_offsets()) for group in axes.collections}


def test_roc_of_two_classes_has_even_axes_and_names_the_class_that_is_looked_for():
    (axes,) = figures.roc({"net": ([0, 0.5, 1], [0.9, 1.0, 1.0])}, positive="open").axes
    assert axes.get_xscale() == "linear" and axes.get_xlim() == (0, 1) and axes.get_ylim()[0] == 0
    x, y = drawn(axes)["net"]
    assert x.tolist() == [0, 0.5, 1] and y.tolist() == [0.9, 1, 1]
    assert "open" in axes.get_xlabel() and "open found" in axes.get_ylabel()


def test_confusion_has_true_rows_predicted_columns_and_shares_of_rows():
    figure = figures.confusion(np.array([[8, 2], [0, 30]]), ["closed", "open"], "Confusion matrix on val")
    axes = figure.axes[0]
    cells = {(text.get_position()[1], text.get_position()[0]): text.get_text() for text in axes.texts}
    assert cells == {(0, 0): "8\n80.0 %", (0, 1): "2\n20.0 %", (1, 1): "30\n100.0 %"}
    (image,) = axes.images
    assert image.get_array().tolist() == [[0.8, 0.2], [0, 1]]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["closed  (10)", "open  (30)"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["closed", "open"]
    assert axes.get_xlabel() == "predicted class" and axes.get_ylabel().startswith("true class")
    assert title(figure) == "Confusion matrix on val" and about(figure) == "38 of 40 correct (95.0 %)"


def test_confusion_of_many_classes_has_few_names_and_no_numbers():
    figure = figures.confusion(np.diag(np.full(100, 50)), [f"class {k}" for k in range(100)])
    assert not figure.axes[0].texts
    assert len(figure.axes[0].get_yticks()) == 34
    assert "1 in 3 named" in figure.axes[0].get_ylabel()
    few = figures.confusion(np.diag(np.arange(25)), [f"class {k}" for k in range(25)])
    assert [text.get_text() for text in few.axes[0].texts] == ["100"] * 24


def test_a_matrix_that_does_not_fit_its_names_is_a_programming_error():
    for counts, names in ((np.zeros((2, 3)), "ab"), (np.zeros((2, 2)), "abc"), (np.zeros((0, 0)), "")):
        with pytest.raises(ValueError, match="counts"):
            figures.confusion(counts, names)


def test_a_map_shows_classes_wrong_predictions_and_what_has_no_label():
    points = np.arange(10.0).reshape(5, 2)
    figure = embeddings.scatter(
        points, np.array([0, 1, 1, 2, -1]), np.array([0, 0, 1, 0, 0]), ["a", "b", "c", "d"], "t", ("x", "y")
    )
    (axes,) = figure.axes
    found = marks(axes)
    assert set(found) == {"no label (1)", "a (1)", "b (2)", "c (1)", "misclassified (1)"}
    assert found["b (2)"].tolist() == points[1:3].tolist()
    assert found["misclassified (1)"].tolist() == [points[2].tolist()]
    assert words(axes) == ["t", "x", "y"] and about(figure) == "1 of 4 samples shown are misclassified"
    with pytest.raises(ValueError, match="points"):
        embeddings.scatter(points[:4], np.zeros(5, int), np.zeros(5, bool), ["a"], "t")


@pytest.mark.parametrize("classes, listed", [(34, True), (66, False)])
def test_classes_of_a_map_look_different_and_few_are_listed(classes, listed):
    label, zero = np.arange(classes), np.zeros(classes, bool)
    (axes,) = embeddings.scatter(np.zeros((classes, 2)), label, zero, [str(k) for k in label], "t").axes
    looks = {(group.get_facecolor().tobytes(), group.get_paths()[0].vertices.tobytes()) for group in axes.collections}
    assert len(looks) == classes and (axes.get_legend() is not None) == listed


def test_a_sheet_shows_each_picture_above_its_caption():
    images = np.zeros((5, 4, 4, 3), np.uint8)
    images[..., 1] = 40 * np.arange(5)[:, None, None]
    figure = embeddings.sheet(images, [f"{'long/' * 9}{k}.png\na → b" for k in range(5)], "Hard")
    shown = figure.axes[0].images
    assert [image.get_array()[0, 0].tolist() for image in shown] == [[0, 40 * k, 0] for k in range(5)]
    captions = [text.get_text().split("\n") for text in figure.texts[1:]]
    assert [lines[1] for lines in captions] == ["a → b"] * 5
    assert all(lines[0].startswith("…") and lines[0].endswith(f"{k}.png") for k, lines in enumerate(captions))
    boxes = [image.get_window_extent() for image in shown]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    with pytest.raises(ValueError, match="5 images, 1 captions"):
        embeddings.sheet(images, ["a"], "t")


def test_pictures_are_shown_as_they_are_or_stretched():
    plain = np.linspace(0, 1, 48, dtype=np.float32).reshape(1, 3, 4, 4)
    wide = np.concatenate([plain * 4 - 2, plain * 100], 0)
    shown = embedding_inspection.to_uint8(wide)
    assert shown.shape == (2, 4, 4, 3) and (shown[0] == shown[1]).all() and shown.max() == 255
    grey = embedding_inspection.to_uint8(np.full((1, 1, 2, 2), 7, np.uint8))
    assert grey.shape == (1, 2, 2, 3) and (grey == 7).all()
    assert embedding_inspection.to_uint8(np.array([[[[0, 65535]]]], np.uint16))[0, 0, :, 0].tolist() == [0, 255]
    with pytest.raises(ValueError, match="shape"):
        embedding_inspection.to_uint8(np.zeros((1, 2, 4, 4)))


@pytest.mark.parametrize(
    "figure",
    [
        lambda: figures.roc({"net": ([0.01, 1.0], [0.4, 1.0])}),
        lambda: figures.roc({"net": ([0.0, 1.0], [1.0, 1.0])}, positive="a class of a very long name indeed"),
        lambda: figures.confusion(np.zeros((1, 1), int), ["a"]),
        lambda: figures.confusion(np.eye(2, dtype=int) * 10**6, ["a name of more than twenty letters", "b"]),
        lambda: figures.confusion(np.ones((12, 12), int) * 1234, [f"sea anemone {k}" for k in range(12)]),
        lambda: figures.confusion(np.eye(30, dtype=int), [f"a long name of a class {k}" for k in range(30)]),
        lambda: figures.confusion(np.ones((1000, 1000), int), [f"a long name of a class {k}" for k in range(1000)]),
        lambda: embeddings.scatter(np.zeros((1, 2)), np.zeros(1, int), np.ones(1, bool), ["a"], "PCA of embeddings"),
        lambda: embeddings.scatter(
            np.eye(2).repeat(17, 0), np.arange(34), np.ones(34, bool), ["long name" * 3] * 34, "PCA of embeddings"
        ),
        lambda: embeddings.sheet([], [], "Hard\n0 of 10"),
        lambda: embeddings.sheet(np.zeros((24, 32, 64, 3), np.uint8), ["a\nb\nc"] * 24, "Hard\n24 of 10"),
    ],
)
def test_pictures_of_classes_and_samples_are_900_pixels_wide_and_cut_nothing(figure):
    file = io.BytesIO()
    figure().savefig(file, dpi=120, format="png")  # as images of a step are kept
    image = Image.open(file).convert("RGB")
    assert image.width == 900
    assert 100 <= image.height <= 1000
    pixels = np.asarray(image)
    assert (pixels.min(axis=2) < 100).mean() > 0.001
    assert all((edge > 250).all() for edge in (pixels[:, 0], pixels[:, -1], pixels[-1], pixels[0]))


def test_names_are_drawn_letter_by_letter_and_never_read_as_a_formula():
    # A set brings its own names. Between two `$` matplotlib reads a formula, and raises for one that is none.
    bad = r"a$\bad{$"
    made = [
        figures.confusion(np.eye(2) * 5, [bad, "$b_1$"], about=bad),
        figures.roc({bad: ([0.001, 1], [0.5, 1.0])}, f"ROC on {bad}", bad),
        embeddings.scatter(np.eye(2), np.array([0, 1]), np.array([False, True]), [bad, "c"], bad),
        embeddings.sheet(np.zeros((1, 8, 8, 3), np.uint8), [bad], bad),
    ]
    for figure in made:
        figure.savefig(io.BytesIO(), format="png")
    with pytest.raises(ValueError, match="bad"):
        Figure.savefig(figures.confusion(np.eye(2) * 5, [bad, "$b_1$"]), io.BytesIO())
    made = figures.roc({bad: ([0.001, 1], [0.5, 1.0])})
    made.savefig(io.BytesIO(), format="png")
    (axes,) = made.axes  # of a logarithmic axis the powers of ten are formulas, and stay
    assert [label.get_parse_math() for label in axes.get_xticklabels()] == [True] * len(axes.get_xticklabels())


def test_every_figure_is_of_that_class():
    own = [path for path in (ROOT / "trainkit").rglob("*.py") if re.search(r"Figure\(", path.read_text())]
    assert own == [ROOT / "trainkit" / "plots" / "style.py"]
