"""Thousands of damaged recipes: each ends in a ConfigError that names its places, or in a recipe that comes back whole.

The mutator is our own and seeded, because ten thousand cases have to fit into seconds; hypothesis looks at raw bytes.
"""

import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.config import MAX_SHOWN, ConfigError, dump, parse
from trainkit.recipe import TABLES, Recipe

RECIPES = sorted(Path(__file__).parents[1].glob("recipes/*.yaml"))
KEY = re.compile(r"(?<![A-Za-z_0-9])[A-Za-z_][A-Za-z_0-9]*(?=:)")
VALUE = re.compile(r"(?<=: )[^\s{},\[\]#][^{},\[\]#\n]*")
WRONG = [
    "fast", "true", "no", "null", "~", "-1", "0", "1", "2.5", "1e-3", "1e400", "-1e308", "1e-320", "012", "9" * 19,
    "9" * 400, ".inf", "-.nan", "''", '""', "[]", "{}", "[1, 2, 3]", "[[1]]", "[null]", "{a: 1}", "{name: adadistill}",
    "{name: []}", "{name: faces, name: faces}", "1 epoch", "0 steps", "1e3 steps", "999999999999M samples",
    "0.000001 epochs", "3 min", "5%", "33.333333%", "0%", "100%", "0.5", "*", "&a", "*a", "&a 1",
    "!!python/object:os.system x", "!x 1", "|", ">", "'", '"', "@", "`", "%", "\u00e9\u4e2d", "\U0001f600", "\u202e",
    "\ufeff", "\x85", "\u2028", "\x7f", '"\\ud800"', '"\\x00"', "'1:30'", "1:30", "a: b", "- a", "? x", "<<", "=",
    "../../etc/passwd", "/", "\\", "os:system", "x" * 5000,
]  # fmt: skip


def drop_line(lines: list[str], rng: random.Random) -> None:
    del lines[rng.randrange(len(lines))]


def repeat_line(lines: list[str], rng: random.Random) -> None:
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))


def swap_lines(lines: list[str], rng: random.Random) -> None:
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]


def swap_blocks(lines: list[str], rng: random.Random) -> None:
    """Exchange what follows two keys."""
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    (key_a, _, rest_a), (key_b, _, rest_b) = lines[a].partition(":"), lines[b].partition(":")
    lines[a], lines[b] = f"{key_a}:{rest_b}", f"{key_b}:{rest_a}"


def indent(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    lines[at] = (
        rng.choice(["  ", " ", "\t", "    "]) + lines[at] if rng.random() < 0.5 else lines[at].removeprefix("  ")
    )


def _substitute(lines: list[str], rng: random.Random, pattern: re.Pattern, new: Callable[[str], str]) -> None:
    places = [(i, match) for i, line in enumerate(lines) for match in pattern.finditer(line) if line[:1] != "#"]
    if places:
        i, match = rng.choice(places)
        lines[i] = lines[i][: match.start()] + new(match[0]) + lines[i][match.end() :]


def misspell_key(lines: list[str], rng: random.Random) -> None:
    def wrong(key: str) -> str:
        at = rng.randrange(len(key))
        return rng.choice(
            [key[:at] + key[at + 1 :], key[:at] + rng.choice("xyz_-. é") + key[at:], key.upper(), key[::-1]]
        )

    _substitute(lines, rng, KEY, wrong)


def exchange_key(lines: list[str], rng: random.Random) -> None:
    keys = KEY.findall("\n".join(lines)) or ["x"]
    _substitute(lines, rng, KEY, lambda key: rng.choice(keys))


def wrong_value(lines: list[str], rng: random.Random) -> None:
    _substitute(lines, rng, VALUE, lambda value: rng.choice(WRONG))


def exchange_value(lines: list[str], rng: random.Random) -> None:
    values = VALUE.findall("\n".join(lines)) or ["x"]
    _substitute(lines, rng, VALUE, lambda value: rng.choice(values))


def other_number(lines: list[str], rng: random.Random) -> None:
    def number(_: str) -> str:
        size = 10.0 ** rng.uniform(-12, 20)
        return rng.choice([str(rng.randrange(-3, 1000)), f"{size}", f"{-size}", f"{size:.0f}", f"{size:.3g}"])

    _substitute(lines, rng, re.compile(r"(?<![A-Za-z_])-?[0-9][0-9.e+-]*"), number)


def deep_nesting(lines: list[str], rng: random.Random) -> None:
    depth, (start, end) = rng.choice([5, 45, 60, 2000]), rng.choice([("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", "")])
    text = start * depth + "1" + end * depth
    _substitute(lines, rng, VALUE, lambda value: text)


def alias_bomb(lines: list[str], rng: random.Random) -> None:
    lines += [
        "z0: &z0 [x, x]",
        *(f"z{i}: &z{i} [{', '.join([f'*z{i - 1}'] * 9)}]" for i in range(1, rng.randrange(2, 9))),
    ]


def insert_bytes(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    cut = rng.randrange(len(lines[at]) + 1)
    noise = rng.randbytes(rng.randrange(1, 5)).decode("utf-8", "surrogateescape")
    lines[at] = lines[at][:cut] + noise + lines[at][cut:]


def insert_mark(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    cut = rng.randrange(len(lines[at]) + 1)
    lines[at] = lines[at][:cut] + rng.choice([*"{}[]:,&*!|>'\"%@`#-?\\ \t\r\x00", "---", "...", ": "]) + lines[at][cut:]


def cut_short(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    del lines[at + 1 :]
    lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]


MUTATIONS = [
    drop_line, repeat_line, swap_lines, swap_blocks, indent, misspell_key, exchange_key, wrong_value, wrong_value,
    exchange_value, exchange_value, other_number, other_number, deep_nesting, alias_bomb, insert_bytes, insert_mark,
    cut_short,
]  # fmt: skip


def mutant(text: str, rng: random.Random) -> bytes:
    lines = [line for line in text.split("\n") if not line.startswith("#")] or [""]
    for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
        rng.choice(MUTATIONS)(lines, rng)
        lines = lines or [""]
    return "\n".join(lines).encode("utf-8", "surrogateescape")


def outcome(text: bytes) -> str:
    """`refused` or `valid`; anything else is a failure of the test."""
    try:
        recipe = parse(Recipe, text, "fuzz.yaml", tables=TABLES)
    except ConfigError as error:
        lines = str(error).split("\n")
        assert len(lines) == 1 + min(len(error.problems), MAX_SHOWN) + (len(error.problems) > MAX_SHOWN) >= 2
        assert max(map(len, lines)) < 1000, "a message that floods the terminal"
        assert all(p.found and (p.path or p.line or p.found == "nothing") for p in error.problems)
        return "refused"
    written = dump(recipe)
    again = parse(Recipe, written, "dump.yaml", tables=TABLES)
    assert again == recipe, written
    assert dump(again) == written
    return "valid"


def fuzz(count: int, seed: int) -> Counter:
    """Outcomes of `count` mutants, spread evenly over the shipped recipes."""
    texts = [path.read_text() for path in RECIPES]
    outcomes: Counter = Counter()
    for i in range(count):
        text = mutant(texts[i % len(texts)], random.Random(f"{seed} {i}"))
        try:
            outcomes[outcome(text)] += 1
            outcomes[RECIPES[i % len(texts)].name] += 1
        except Exception as error:
            raise AssertionError(f"mutant {i} of seed {seed}, of {RECIPES[i % len(texts)].name}: {text!r}") from error
    return outcomes


def check(count: int, seed: int) -> None:
    assert len(RECIPES) >= 2, "the shipped recipes were not found"
    seen = fuzz(count, seed)
    assert seen["refused"] + seen["valid"] == count
    assert all(seen[path.name] >= count // len(RECIPES) for path in RECIPES)
    assert seen["refused"] > count // 10 and seen["valid"] > count // 100, seen


def test_2000_damaged_recipes_end_in_a_config_error_or_a_recipe():
    check(2_000, seed=0)


@pytest.mark.slow
def test_10000_damaged_recipes_end_in_a_config_error_or_a_recipe():
    check(10_000, seed=int(os.environ.get("TRAINKIT_FUZZ_SEED", "1")))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_end_in_a_config_error(data):
    assert outcome(data) == "refused"


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=30), st.text(max_size=30))
def test_any_override_ends_in_a_config_error_or_a_recipe(key, value):
    text = RECIPES[0].read_bytes()
    for word in (f"{key}={value}", f"optim.{key}={value}", f"name={value}", f"evaluations.{key}.every={value}", key):
        try:
            recipe = parse(Recipe, text, "x.yaml", [word], TABLES)
        except ConfigError as error:
            assert error.problems
        else:
            assert parse(Recipe, dump(recipe), "dump.yaml", tables=TABLES) == recipe
