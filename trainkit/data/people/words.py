"""Cut a caption into words, whatever its language: the rules of the tokenizer `words`, and CLIP's."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Literal

_LETTERS = re.compile(r"[^\W_]+")
_SINGLE = (
    *((0x3005, 0x3007), (0x3021, 0x3029), (0x3041, 0x312F), (0x31A0, 0x31BF), (0x31F0, 0x31FF), (0x3400, 0x4DBF)),
    *((0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x16FE0, 0x18D8F), (0x1AFF0, 0x1B2FF), (0x20000, 0x3FFFD)),
)
"""Ideographs and signs of Chinese, Japanese (kana) and Tangut, which are words by themselves. Hangul has spaces."""
_UNSPACED = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19DF), (0x1A20, 0x1AAF), (0x1B00, 0x1B7F)),
    *((0xA980, 0xA9FF), (0xAA00, 0xAADF), (0x11700, 0x1174F)),
)
"""Blocks of Thai, Lao, Burmese, Khmer, Tai, Balinese, Javanese, Cham and Ahom, which are written without spaces."""
_STACKING = "\u1039\u17d2\u1a60\u1b44\ua9c0"
"""Signs of Burmese, Khmer, Tai Tham, Balinese and Javanese that put the next letter below the one before."""
_AM = {"\u0e4d\u0e32": "\u0e33", "\u0ecd\u0eb2": "\u0eb3"}
"""AM of Thai and Lao, which NFKC divides, to the sign that it is."""
_SPACE = "\u200b"
"""Zero width space: ends a word."""
_ASSIGNED = (range(0x20000), range(0xE0000, 0xE0200))
"""Codes among which there are marks, numbers and signs that cannot be seen: all but ideographs and private use."""
_VARIANTS = ((0xFE00, 0xFE0F), (0xE0100, 0xE01EF), (0x180B, 0x180F))
"""Marks that choose a form of the character before."""


def words(text: str, rule: Literal[1, 2] = 2) -> list[str]:
    """Return the words of a text: full-width and other compatible forms as plain ones (NFKC), in lower case.

    Rule 2: a word is a run of letters and digits with the marks on them, such as vowel signs. Ideographs and kana are a
    word each, as in BERT's basic tokenizer. What else is written without spaces is divided into grapheme clusters: a
    letter with all signs on it. Characters that cannot be seen (joiners, directions, variants) are left out, so that
    they make no other words. Rule 1: a run of letters and digits, cut by marks; a clause without spaces is one word.
    """
    text = unicodedata.normalize("NFKC", text).lower()
    if rule == 1 or text.isascii():
        return _LETTERS.findall(text)
    unseen, word = _patterns()
    text = unseen.sub("", text)
    for parted, whole in _AM.items():
        text = text.replace(parted, whole)
    return word.findall(text)


def pieces(text: str) -> list[str]:
    """Cut a text in lower case as CLIP does before it joins pairs: words, single digits, and the rest between them."""
    return _clip_pattern(text.isascii()).findall(text)


@functools.cache
def _clip_pattern(ascii_only: bool) -> re.Pattern[str]:
    number = "0-9" if ascii_only else _class(_of(lambda category: category[0] == "N"))
    letter = f"(?:(?![{number}])[^\\W_])"
    return re.compile(f"'s|'t|'re|'ve|'m|'ll|'d|{letter}+|[{number}]|(?:(?![{number}])[\\W_](?<!\\s))+")


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Compile a pattern of what is left out, and one of a word."""
    variants = [(code, code) for first, last in _VARIANTS for code in range(first, last + 1)]
    unseen = sorted({*_of(lambda category: category == "Cf"), *variants} - {(ord(_SPACE),) * 2})
    marks = [code for code in _of(lambda category: category[0] == "M") if code not in {*unseen}]
    mark, single, unspaced, letter = _class(marks), _class(_SINGLE), _class(_UNSPACED), r"(?=[^\W_])"
    signs = f"(?:[{_STACKING}]{letter}[{unspaced}]|[{mark}{''.join(_AM.values())}])*"
    several = f"(?:(?![{single}{unspaced}])[^\\W_][{mark}]*)+"
    word = f"{letter}[{single}][{mark}]*|{letter}[{unspaced}]{signs}|{several}"
    return re.compile(f"[{_class(unseen)}]"), re.compile(word)


def _of(chosen: Callable[[str], bool]) -> list[tuple[int, int]]:
    """List the codes of characters whose category is chosen, as ranges of one."""
    return [(code, code) for codes in _ASSIGNED for code in codes if chosen(unicodedata.category(chr(code)))]


def _class(ranges: Iterable[tuple[int, int]]) -> str:
    """Write ranges of codes, ascending, for a character class; those that touch as one."""
    joined: list[list[int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first - 1:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in joined)
