"""Figures are read back: what was drawn, on which axes, under which names."""

import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from trainkit.report import figures


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
    return [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]


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
    x, y = drawn(axes)["guessing"]
    assert x.tolist() == y.tolist()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["teacher", "student", "guessing"]
    assert all(words(axes))


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


def test_loss_curve_has_a_panel_for_each_kind_of_number():
    step = np.arange(10, 110, 10)
    evals = {"lfw/accuracy": ([0, 50, 100], [0.5, 0.7, 0.8]), "cfp/accuracy": ([100], [0.6]), "none": ([], [])}
    loss, scores, lr = figures.loss_curve(step, 5 - step / 50, step / 1e5, evals).axes
    x, y = next(iter(drawn(loss).values()))
    assert (x == step).all()
    assert (y == 5 - step / 50).all()
    assert loss.get_yscale() == "linear"
    assert set(drawn(scores)) == {"lfw/accuracy", "cfp/accuracy"}
    assert drawn(scores)["lfw/accuracy"][1].tolist() == [0.5, 0.7, 0.8]
    assert (next(iter(drawn(lr).values()))[1] == step / 1e5).all()
    assert lr.get_ylim()[0] == 0
    assert lr.get_xlabel() == "optimizer step"
    assert [axes.get_ylabel() for axes in (loss, scores, lr)] == ["training loss", "evaluations", "learning rate"]
    assert loss.get_xlim() == scores.get_xlim() == lr.get_xlim()


def test_loss_curve_alone_is_one_panel():
    assert len(figures.loss_curve([1, 2], [3.0, 2.0]).axes) == 1
    assert len(figures.loss_curve([1, 2], [3.0, 2.0], [], {}).axes) == 1
    assert len(figures.loss_curve([1, 2], [3.0, 2.0], evals={"lfw/auc": ([2], [0.5])}).axes) == 2


def test_loss_over_a_wide_range_gets_a_logarithmic_axis():
    assert figures.loss_curve([1, 2], [38.0, 0.7]).axes[0].get_yscale() == "log"
    assert figures.loss_curve([1, 2], [38.0, 0.0]).axes[0].get_yscale() == "linear"
    assert figures.loss_curve([1, 2, 3], [38.0, np.nan, 30.0]).axes[0].get_yscale() == "linear"


def test_a_noisy_loss_is_drawn_with_its_running_mean():
    rng = np.random.default_rng(0)
    loss = rng.normal(3, 1, 400)
    loss[17] = np.nan
    lines = drawn(figures.loss_curve(np.arange(400), loss).axes[0])
    assert set(lines) == {"as logged", "mean of 9 points"}
    np.testing.assert_array_equal(lines["as logged"][1], loss)
    for i, got in enumerate(lines["mean of 9 points"][1]):
        near = [v for v in loss[max(0, i - 4) : i + 5] if not np.isnan(v)]
        assert got == pytest.approx(sum(near) / len(near))


def test_columns_of_unequal_length_are_a_programming_error():
    with pytest.raises(ValueError, match="2 steps, 3 losses"):
        figures.loss_curve([1, 2], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="1 learning rates"):
        figures.loss_curve([1, 2], [1.0, 2.0], [0.1])
    with pytest.raises(ValueError, match="2 steps, 1 speeds"):
        figures.speed_curve([1, 2], [1.0])


def test_speed_curve_starts_at_zero_and_marks_evaluations():
    (axes,) = figures.speed_curve([10, 20, 30], [1000.0, 1100.0, 1102.0], [15, 30]).axes
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 1102
    lines = drawn(axes)
    assert lines["median 1,100"][1].tolist() == [1100, 1100]
    assert lines["evaluation (its time is not in the rate)"][0].tolist() == [15, 30]
    assert words(axes) == ["Speed of training", "optimizer step", "samples per second"]


def test_time_shares_are_bars_from_the_largest_down():
    (axes,) = figures.time_shares({"data": 0.05, "compute": 0.9, "sync": 0.0, "log": 0.0004, "eval": 0.0496}).axes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([90, 5, 4.96, 0.04])
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["compute", "data", "eval", "log"]
    assert [text.get_text() for text in axes.texts] == ["90.0 %", "5.0 %", "5.0 %", "< 0.1 %"]
    assert axes.yaxis_inverted()
    assert "%" in axes.get_xlabel()


@pytest.mark.parametrize(
    "figure",
    [
        lambda: figures.roc({"net": ([0.01, 1.0], [0.4, 1.0])}),
        lambda: figures.loss_curve([1, 2], [np.nan, np.inf], [0.1, 0.1], {"a/b": ([1], [np.nan])}),
        lambda: figures.loss_curve([], []),
        lambda: figures.speed_curve([], [], []),
        lambda: figures.speed_curve([5], [0.0], [5]),
        lambda: figures.time_shares({}),
        lambda: figures.time_shares({"a_very_long_name_of_a_phase": 1.0}),
    ],
)
def test_figures_render_about_900_pixels_wide_with_something_on_them(figure):
    image = picture(figure())
    assert 860 <= image.width <= 940
    assert 200 <= image.height <= 1000
    pixels = np.asarray(image)
    assert (pixels.min(axis=2) < 100).mean() > 0.002  # ink
    assert (pixels[0] > 250).all()  # nothing is cut at the edge
    assert (pixels[-1] > 250).all()


def test_drawing_leaves_no_global_state_of_pyplot():
    code = (
        "import sys; from trainkit.report import figures; assert 'matplotlib' not in sys.modules;"
        "figures.roc({'a': ([0.1, 1], [0.5, 1])}); figures.time_shares({'a': 1.0});"
        "assert 'matplotlib' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
