"""Thousands of damaged recipes: each ends in a ConfigError that names its places, or in a recipe that comes back whole.

The mutator is our own and seeded, because ten thousand cases have to fit into seconds; hypothesis looks at raw bytes.
"""

import random
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.config.loader import MAX_SHOWN, ConfigError, dump, parse
from trainkit.config.schema import TABLES, Recipe

RECIPES = sorted(Path(__file__).parents[2].glob("recipes/*.yaml"))
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


TEXTS = [path.read_text() for path in RECIPES]
SECONDS, BYTES = 0.1, 100e6
"""What one recipe may take: seconds of processor time, and of memory beside what the first ones took."""


def taken(text: bytes) -> tuple[str, float]:
    """An outcome and the seconds that it took, of what took long the least of three times."""
    seconds = []
    while True:
        began = time.process_time()
        found = outcome(text)
        seconds.append(time.process_time() - began)
        if min(seconds) < SECONDS or len(seconds) == 3:
            return found, min(seconds)


def test_damaged_recipes_end_in_a_config_error_or_a_recipe(trials):
    assert len(RECIPES) >= 2, "the shipped recipes were not found"
    seen: Counter = Counter()
    for text in TEXTS:
        outcome(text.encode())  # what is imported is not what a recipe takes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in trials(600, 100000):
        text = mutant(TEXTS[seed % len(TEXTS)], random.Random(f"0 {seed}"))
        found, seconds = taken(text)
        assert seconds < SECONDS, f"{seconds:.2f} s for {text[:2000]!r}"
        seen[found] += 1
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < BYTES, f"{grown / 1e6:.0f} MB more than before"
    count = seen.total()
    assert count < 500 or (seen["refused"] > count // 10 and seen["valid"] > count // 100), seen


def tree(rng: random.Random, depth: int = 0):
    """Plain values as YAML may hold them, keys of recipes among others."""
    kind = rng.randrange(9 if depth < 5 else 7)
    if kind < 7:
        odd = "".join(rng.choices("aé\U0001f600 :#'\"{}[]\n\t\\", k=rng.randrange(9)))
        whole, number = rng.randrange(-(2**63), 2**63), rng.uniform(-1e9, 1e9)
        small = 10.0 ** rng.uniform(-300, 300)
        return rng.choice([None, True, whole, number, small, odd, rng.choice(VALUES), rng.choice(KEYS)])
    many = rng.randrange(6)
    if kind == 7:
        return [tree(rng, depth + 1) for _ in range(many)]
    return {rng.choice(KEYS): tree(rng, depth + 1) for _ in range(many)}


KEYS = sorted({key for text in TEXTS for key in KEY.findall(text)})
VALUES = sorted({value for text in TEXTS for value in VALUE.findall(text)})


def test_any_tree_of_values_ends_in_a_config_error_or_a_recipe(trials):
    """Whole recipes of nonsense, and shipped ones with nonsense in one place, written by a library and read by us."""
    for seed in trials(60, 20000):
        rng = random.Random(f"tree {seed}")
        made = tree(rng)
        if seed % 3:
            whole = yaml.safe_load(TEXTS[seed % len(TEXTS)])
            block = whole
            while isinstance(inner := block[rng.choice(list(block))], dict) and inner and rng.random() < 0.7:
                block = inner
            block[rng.choice(list(block))], made = made, whole
        found, seconds = taken(yaml.safe_dump(made, allow_unicode=True).encode())
        assert seconds < SECONDS
        assert found == "refused" or seed % 3


AUDIT = """
import sys
sys.path[:0] = sys.argv[2:]
import random
from tests.config import test_damaged_recipes as fuzz
for text in fuzz.TEXTS:
    fuzz.outcome(text.encode())
for text in fuzz.NAMES.values():
    fuzz.outcome(text)
done, watching = [], True
EVENTS = ("open", "import", "os", "subprocess", "socket", "shutil", "ctypes", "urllib")
def watch(event, arguments):
    if watching and event.split(".")[0] in EVENTS:
        done.append((event, str(arguments)[:200]))
sys.addaudithook(watch)
for seed in range(int(sys.argv[1])):
    fuzz.outcome(fuzz.mutant(fuzz.TEXTS[seed % len(fuzz.TEXTS)], random.Random(f"0 {seed}")))
for text in fuzz.NAMES.values():
    fuzz.outcome(text)
watching = False
print(*sorted(set(done)), sep="\\n")
"""
NAMES = {
    word: TEXTS[0].replace("task:", f"{key}: {word}\ntask:", 1).encode()
    for key in ("task", "plugin", "_target_", "data", "import")
    for word in ("os:system", "os.system", "antigravity", "this:x", "{name: 'antigravity:x'}", "{_target_: os.system}")
}
"""Recipes that name modules of Python: importing one of these would open a browser, or print."""


@pytest.mark.slow
def test_reading_a_recipe_opens_no_file_imports_nothing_and_starts_nothing():
    """As Python's own audit has it, once what shipped recipes need is imported."""
    here = Path(__file__).parents[2]
    words = [sys.executable, "-c", AUDIT, "3000", str(here), str(here / "tests" / "support")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_end_in_a_config_error(data):
    assert outcome(data) == "refused"


@settings(max_examples=30, deadline=None)
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
