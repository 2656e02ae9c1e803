"""Text of figures in any script, drawn without a warning, also where no font has it; and long titles."""

from __future__ import annotations

import io
import warnings

from trainkit.plots import style


def test_letters_of_any_script_give_no_warning():
    figure, axes = style.blank(2.0)
    axes.bar([0, 1, 2], [1, 2, 3], label="犬")
    axes.set_xticks([0, 1, 2], ["日本", "café", "кот"])
    axes.set_title("ไทย: $ 5")
    style.legend(axes, "best")
    style.titled(figure, "Best class: 猫", "한국어")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")


def test_letters_that_no_font_has_are_escaped_and_that_is_told_once(caplog):
    style._tell_absent.cache_clear()
    figure, axes = style.blank(2.0)
    axes.set_xticks([0, 1], ["\U000f1234 a", "café"])
    style.titled(figure, "кот \U000f1235")
    for _ in range(2):
        figure.savefig(io.BytesIO(), format="png")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["\\U000f1234 a", "café"]
    assert figure.texts[0].get_text() == "кот \\U000f1235"
    assert caplog.text.count("no font has") == 1


def test_long_titles_are_wrapped_inside_the_figure():
    figure, _ = style.blank(2.0)
    style.titled(figure, "Overlays on validation, step 100: " + "some more words " * 9, "about " * 60)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.texts]
    assert len(boxes) == 2 and all(0 <= box.x0 < box.x1 <= 900 for box in boxes)
