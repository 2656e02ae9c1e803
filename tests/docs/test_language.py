"""The words of the documentation, of --help and of messages: plain technical English, in the terms of the glossary.

`BUDGETS` has the files that may keep some forbidden turns, such as quotations and values of files.
`python tests/docs/test_language.py` prints all places.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FORBIDDEN = {
    "image": r"pictures?",
    "synthetic": r"drawn (?:faces?|people|heads?|streets?|eyes?|objects?|eye crops?|face)",
    "significantly better, inconclusive": r"(?:beyond|more than|not beyond) chance|not decided",
    "p10, p99": r"one in (?:ten|a hundred|a thousand)",
    "trains": r"network learned|learns|learned from",
    "throughput": r"pace",
    "switch, benchmark option": r"rungs?|ladder",
    "error": r"mistakes?",
    "out of memory": r"shortage|ran out of memory of",
    "EMA weights": r"averaged weights|average of the weights that",
    "not measured": r"untested",
    "reported": r"(?:is|was|are|were) (?:told|said)",
    "unavailable": r"cannot be had|(?:store|server|mlflow) (?:is|was|that is) away",
    "continue": r"goes on|go on with|went on with",
    "step": r"(?:an|one|each|every|per|of) updates?|updates (?:of|are|after|were|in|that)|\d updates",
    "evaluated": r"is scored|are scored|scored on|was scored|were scored",
    "run": r"is held(?! out)|holds an evaluation|held an evaluation|hold an evaluation",
    "alone": r"by itself",
    "expected": r"as it should be",
    "of": r"what of",
    "% of step time": r"shares? of the time",
    "other processes": r"neighbours? who|neighbours? that",
    "say who": r"nobody|whoever",
    "is not an X": r"is no (?!longer|more|such)\w+",
    "leave it out": r"that is all",
    "child of": r"beneath",
    "correct, repair": r"mends?",
    "name the thing": r"is what|(?:are|is) (?:that|those) of",
    "that": r"as far as",
    "equally, the same": r"(?<!look )(?<!are )alike",
    "running, continue": r"going on",
    "started by": r"begun by|was begun|were begun",
    "your own": r"of (?:theirs|yours|whom)",
    "an argument, an override": r"a word such|words after",
    "overwritten": r"written over",
}
"""What to say: a pattern of what not to."""
TURNS = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in FORBIDDEN.values()), re.IGNORECASE)
QUOTED = ("docs/reference/keys.md", "docs/reference/cli.md")
"""Generated: their words are those of the code, which is searched itself."""
BUDGETS: dict[str, int] = {
    "docs/project/results/segmentation.md": 1,  # the name of a run
    "trainkit/config/metric_definitions.py": 1,  # the name of a metric
    "trainkit/data/synthetic/derived_modalities.py": 1,  # a caption, part of the data
    "trainkit/analysis/compare.py": 1,  # a value of the JSON report, as in the next two
    "trainkit/analysis/compare_report.py": 3,
    "trainkit/metrics/significance.py": 2,
}


def without_code(text: str) -> str:
    """Markdown without code, commands, addresses of links and HTML."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<[^>]+>", " ", text)
    return re.sub(r"\s+", " ", text)


def helps() -> Iterator[tuple[str, str]]:
    """What --help prints of each command."""
    from docs.generators.commands import commands

    for name, command in commands():
        yield f"trainkit {name} --help", command.get_help(click.Context(command, info_name=name))


def strings(file: Path) -> str:
    """The text constants of a module that are sentences and no docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docs
            and " " in node.value
        ):
            found.append(re.sub(r"`[^`]*`", " ", node.value))
    return " \n ".join(found)


def attribute_docs(file: Path) -> str:
    """The docstrings of fields of dataclasses, which reference/keys.md shows."""
    tree, found = ast.parse(file.read_text(encoding="utf-8")), []
    for node in ast.walk(tree):
        for one, after in zip(node.body, node.body[1:], strict=False) if isinstance(node, ast.ClassDef) else ():
            if isinstance(one, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found.append(str(after.value.value))
    return without_code(" ".join(found))


def shown_files() -> list[Path]:
    """Modules whose classes are blocks of recipes: the descriptions of their keys are read on the site."""
    import inspect

    from docs.generators.keys import blocks

    return sorted({Path(str(inspect.getsourcefile(block.cls))) for block in blocks()})


def texts() -> Iterator[tuple[str, str]]:
    """All that is read by users, by the name of its place."""
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
    for page in (ROOT / "README.md", *pages):
        name = page.relative_to(ROOT).as_posix()
        if name not in QUOTED:
            yield name, without_code(page.read_text(encoding="utf-8"))
    yield from helps()
    for file in sorted((ROOT / "trainkit").rglob("*.py")):
        yield file.relative_to(ROOT).as_posix(), strings(file)
    for file in shown_files():
        yield f"{file.relative_to(ROOT).as_posix()}: descriptions of keys", attribute_docs(file)


def places() -> dict[str, list[str]]:
    """The forbidden turns of each place that has some."""
    found = {name: [m[0].lower() for m in TURNS.finditer(text)] for name, text in texts()}
    return {name: turns for name, turns in found.items() if turns}


def test_the_words_are_those_of_the_field():
    """As many forbidden turns as a budget allows, and no budget that is larger than what is used."""
    found = places()
    other = {name for name in found.keys() | BUDGETS if len(found.get(name, ())) != BUDGETS.get(name, 0)}
    assert not other, "\n".join(f"{name}: {', '.join(found.get(name, ['none']))}" for name in sorted(other))


def test_a_forbidden_turn_is_found_and_other_words_are_not():
    for text in ("The pace is low.", "5 pictures", "Better beyond chance", "it goes on", "is no recipe", "is held"):
        assert TURNS.search(text), text
    for text in ("The space is low.", "is no longer", "is held out", "it learned", "update it", "they look alike"):
        assert not TURNS.search(text), text


def test_code_is_not_searched():
    assert "pace" not in without_code("a `pace` b\n```\npace\n```\n[c](pace.md) <a id='pace'></a>")


if __name__ == "__main__":
    rows = sorted(places().items(), key=lambda item: -len(item[1]))
    for name, turns in rows:
        print(f"{len(turns):4}  {name}: {', '.join(sorted(set(turns)))}")
    print(sum(len(turns) for _, turns in rows), "places")
