"""Captions as ids: words by a hash, CLIP's byte pairs, and leaving ids out."""

import functools
import gzip
import itertools
import tempfile
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.config.validation import validate
from trainkit.data.people import tokenizer, words
from trainkit.data.people.tokenizer import Captions, Clip, Words
from trainkit.errors import UserError

PAIRS = ["t h", "th e</w>", "r e", "re d</w>", "a n", "e n", "h a", "ha t</w>"]


@pytest.fixture
def clip(tmp_path) -> Clip:
    path = tmp_path / "pairs.txt.gz"
    with gzip.open(path, "wb") as file:
        file.write("\n".join(["#version: 0.2", *PAIRS, ""]).encode())
    return Clip(path, length=12)


# ---- Words -----------------------------------------------------------------------------------------------------------


def test_a_word_has_the_id_of_its_hash_whatever_is_around_it():
    tokens = Words(1000, 8)
    ids = tokens.encode("A RED hat, a red-hat!")
    by_hand = [1 + zlib.crc32(word) % 998 for word in (b"a", b"red", b"hat")]
    assert ids == [*by_hand, *by_hand, 999]
    assert tokens.encode("ＲＥＤ") == tokens.encode("red") and tokens.encode(" _, ") == [999]


def test_rows_are_padded_with_0_and_cut_before_the_end():
    tokens = Words(1000, 5)
    rows = tokenizer.table(tokens, ["red", "one two three four five six", ""])
    assert rows.dtype == np.uint16 and rows.shape == (3, 5)
    assert rows[0].tolist() == [*tokens.encode("red"), 0, 0, 0]
    assert rows[1, 4] == 999 and (rows[1] > 0).all() and rows[2].tolist() == [999, 0, 0, 0, 0]
    assert tokenizer.table(Words(1 << 17, 5), ["red"]).dtype == np.int32
    assert tokenizer.table(tokens, []).shape == (0, 5)


CUT = {
    "red coat": "red coat",
    "ＲＥＤ　ｃｏａｔ１２": "red coat12",
    "红色外套的女人": "红 色 外 套 的 女 人",
    "赤いコートの女性、T恤": "赤 い コ ー ト の 女 性 t 恤",
    "ｸﾞﾚｰの傘": "グ レ ー の 傘",
    "葛\U000e0100城": "葛 城",
    "빨간 코트를 입은 여자": "빨간 코트를 입은 여자",
    "เสื้อสีแดง น้ำ กำ": "เ สื้ อ สี แ ด ง น้ำ กำ",
    "ນ້ຳສີແດງ": "ນ້ຳ ສີ ແ ດ ງ",
    "ស្ត្រីពាក់អាវក្រហម": "ស្ត្រី ពា ក់ អា វ ក្រ ហ ម",
    "အင်္ကျီအနီ": "အ င်္ကျီ အ နီ",
    "लाल कोट में महिला": "लाल कोट में महिला",
    "क्\u200dष": "क्ष",
    "தமிழ் மொழி": "தமிழ் மொழி",
    "مُعْطَف أحمر": "مُعْطَف أحمر",
    "می\u200cخواهم": "میخواهم",
    "ẹ\u0301 re\xadd": "ẹ\u0301 red",
    "e\u0301te\u0301": "été",
    "a woman's coat_x, 3½": "a woman s coat x 31 2",
}


@pytest.mark.parametrize("text", CUT)
def test_words_are_those_of_the_language(text):
    assert words.words(text) == CUT[text].split()
    assert words.words(" ".join(words.words(text))) == CUT[text].split()


@given(st.text(max_size=60))
def test_no_letter_is_lost_and_marks_stay_behind_it(text):
    found = words.words(text)
    plain, joined = (
        "".join(c for c in some.replace("ำ", "า").replace("ຳ", "າ") if c.isalnum())
        for some in (unicodedata.normalize("NFKC", text).lower(), "".join(found))
    )
    assert plain == joined
    assert all(word[0].isalnum() for word in found)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["wearsaredcoat", "wearsabluecoat", "a hat"], ["2 of 3 captions have one token or none"]),
        (["a b c d e f g", "a b"], ["1 of 2 captions have 4 tokens or more, of which the first 4 are read"]),
        (["...", "a b"], ["1 of 2 captions have one token or none"]),
        (["a b", "c d"], []),
    ],
)
def test_captions_that_lose_their_words_are_counted(texts, said):
    tokens = Words(1000, 5)
    assert tokenizer.losses(tokens, tokenizer.table(tokens, texts)) == said


# ---- CLIP ------------------------------------------------------------------------------------------------------------


def test_ids_are_numbered_as_clip_numbers_them(clip):
    """Bytes that can be seen come first, then those that cannot; the same with the end of a word; pairs; two more."""
    assert clip.vocabulary == 512 + len(PAIRS) + 2 and clip.begin == clip.vocabulary - 2
    end = clip.vocabulary - 1
    # '!' is byte 33 and has id 0; as a whole word it ends one.
    assert clip.encode("!") == [clip.begin, 256, end]
    assert clip.encode("~") == [clip.begin, 256 + 93, end]
    # U+00E9 is bytes C3 A9: '¡' (A1) is the 95th that can be seen, and AD cannot.
    assert clip.encode("é") == [clip.begin, 94 + 0xC3 - 0xA1 - 1, 256 + 94 + 0xA9 - 0xA1, end]
    # An emoji has bytes F0 9F 98 80; 80 cannot be seen: 33 lower ones and 7F come before it.
    seen = 94 + 12 + 82
    assert clip.encode("😀")[-2] == 256 + seen + 34


def test_pairs_are_joined_in_their_order_and_each_wherever_it_stands(clip):
    def ids(*names):
        units = {name: 512 + i for i, name in enumerate(pair.replace(" ", "") for pair in PAIRS)}
        return [units[n] if n in units else ord(n[0]) - 33 + 256 * n.endswith("</w>") for n in names]

    assert clip.encode("The red hat")[1:-1] == ids("the</w>", "red</w>", "hat</w>")
    assert clip.encode("thethe")[1:-1] == ids("th", "e", "the</w>")  # an `e` that ends no word is another
    assert clip.encode("rere")[1:-1] == ids("re", "r", "e</w>")
    assert clip.encode("hahat")[1:-1] == ids("ha", "hat</w>")
    # `a n` comes before `e n`, and before `h a`: hand -> h an d
    assert clip.encode("hand")[1:-1] == ids("h", "an", "d</w>")
    assert clip.encode("12")[1:-1] == ids("1</w>", "2</w>")
    assert clip.encode("he's")[1:-1] == ids("h", "e</w>", "'", "s</w>")


@given(st.text(alphabet="thered an2", max_size=12))
def test_joining_is_what_a_search_for_the_lowest_pair_gives(text):
    """Independent: the rank of each pair in turn, joined until none is left."""
    order = [tuple(p.split()) for p in PAIRS]
    expected = []
    for piece in words.pieces(text.strip()):
        units = [*piece[:-1], piece[-1] + "</w>"]
        while True:
            found = [(order.index(p), i) for i, p in enumerate(itertools.pairwise(units)) if p in order]
            if not found:
                break
            at = min(found)[1]
            units[at : at + 2] = ["".join(units[at : at + 2])]
        expected += units
    clip = _made()
    names = {number: name for name, number in clip._ids.items()}
    assert [names[i] for i in clip.encode(text)[1:-1]] == expected


@functools.cache
def _made() -> Clip:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "merges.txt"
        path.write_text("\n".join(["#version: 0.2", *PAIRS]))
        return Clip(path, length=60)


def test_text_is_cleaned_as_clips_is(clip):
    assert clip.encode("  The\n&amp;amp; RED ") == clip.encode("the & red")
    assert clip.encode("he’s “red”") == clip.encode('he\'s "red"')
    assert list(words.pieces("½ⅷ12")) == ["½", "ⅷ", "1", "2"]


def test_a_long_caption_is_cut_and_still_ends(clip):
    ids = clip.encode("the red hat " * 1000)
    assert len(ids) == 12 and ids[0] == clip.begin and ids[-1] == clip.vocabulary - 1
    assert len(clip.encode("x" * 1_000_000)) == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#version\nt h\nth", r"line 3: 'th'; expected two texts"),
        ("#version\nt h\nth e\nzzz e", r"line 4: 'zzz e'; expected two texts that earlier pairs make"),
        ("#version\n", "0 pairs"),
    ],
)
def test_a_file_that_is_not_of_pairs_is_refused(tmp_path, text, message):
    (tmp_path / "merges.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        Clip(tmp_path / "merges.txt")


def test_a_file_that_is_not_there_or_damaged_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        Clip(tmp_path / "no.txt.gz")
    (tmp_path / "bad.txt.gz").write_bytes(b"no gzip at all")
    with pytest.raises(UserError, match="cannot be read"):
        Clip(tmp_path / "bad.txt.gz")
    whole = gzip.compress("\n".join(["#", *PAIRS * 100]).encode())
    (tmp_path / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        Clip(tmp_path / "cut.txt.gz")


# ---- The block -------------------------------------------------------------------------------------------------------


def test_the_block_makes_what_it_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    (tmp_path / "merges.txt").write_text("\n".join(["#", *PAIRS]))
    assert vars(Captions().make()) == vars(Words(4096, 77))
    block = validate(Captions, {"tokenizer": "clip", "file": "merges.txt", "length": 20}, {})
    assert block.missing() is None and block.make().length == 20 and block.make().vocabulary == 514 + len(PAIRS)
    assert "no.txt does not exist" in Captions(tokenizer="clip", file="no.txt").missing()
    for wrong in ({"tokenizer": "clip"}, {"file": "a"}, {"length": 2}, {"vocabulary": 2}):
        with pytest.raises(ValueError):
            validate(Captions, wrong, {})


# ---- Leaving out -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_ids_below_the_share_are_left_out_and_the_others_move_up(seed, share):
    rng = np.random.default_rng(seed)
    for coder in (Words(50, 8), _made()):
        texts = [" ".join(rng.choice(["red", "hat", "the", "coat"], rng.integers(0, 9))) for _ in range(6)]
        ids = tokenizer.table(coder, texts)
        draws = rng.random(ids.shape)
        before = ids.copy()
        out = tokenizer.leave_out(ids, draws, share, coder.begin, coder.end)
        assert (ids == before).all() and out.dtype == ids.dtype
        for row, draw, left in zip(ids.tolist(), draws, out.tolist(), strict=True):
            end = row.index(coder.vocabulary - 1)
            first = 0 if coder.begin is None else 1
            kept = [i for i in range(first, end) if draw[i] >= share]
            if not kept and end > first:
                kept = [first + int(draw[first:end].argmax())]
            expected = [*row[:first], *(row[i] for i in kept), row[end]]
            assert left == expected + [0] * (len(row) - len(expected))
