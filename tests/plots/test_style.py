"""Text of figures in any script: drawn where a font has it, else written as numbers, without a warning."""

from __future__ import annotations

import io
import warnings

import pytest

from trainkit.plots import style


@pytest.mark.parametrize("family", [[], ["DejaVu Sans Mono"]])
def test_letters_of_any_script_give_no_warning(family, monkeypatch):
    monkeypatch.setattr(style, "_CJK_FONTS", family)
    style._letters.cache_clear()
    figure, (axes,) = style.blank(2.0)
    axes.bar([0, 1, 2], [1, 2, 3], label="犬")
    axes.set_xticks([0, 1, 2], ["日本", "café", "кот"])
    axes.set_title("ไทย: $ 5")
    style.legend(axes, "best")
    style.titled(figure, "Best class: 猫", "한국어")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO(), format="png")
    assert [label.get_text() for label in axes.get_xticklabels()] == [r"\u65e5\u672c", "café", "кот"]
    assert axes.get_title() == r"\u0e44\u0e17\u0e22: $ 5"
    style._letters.cache_clear()
