"""The loader of recipes: one test for each kind of mistake with its exact words, and the way back to YAML."""

import importlib
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from pydantic import BeforeValidator, Field
from runs import ROOT

from trainkit.config import schema as blocks
from trainkit.config.loader import RECIPES, ConfigError, Named, Problem, brief, digest, dump, flat, load, parse
from trainkit.config.schema import Recipe
from trainkit.errors import UserError


def _read_even(value: object) -> object:
    if isinstance(value, int) and value % 2:
        raise ValueError(f"{value} is odd; an even number is needed")
    return value


@dataclass(kw_only=True)
class Margin:
    size: float = 0.5
    kind: Literal["arc", "cos", "adaptive"] = "arc"


@dataclass(kw_only=True)
class Small:
    name: Literal["small"]
    width: int = 64


@dataclass(kw_only=True)
class Large:
    name: Literal["large", "huge"]
    depth: int = 50


@dataclass(kw_only=True)
class Faces:
    """A class of a named block."""

    classes: int
    margin: Margin = field(default_factory=Margin)
    net: Annotated[Small | Large, Field(discriminator="name")] | None = None
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")


@dataclass(kw_only=True)
class Organs:
    name: str
    organs: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Group:
    match: str
    scale: float = 1.0


@dataclass(kw_only=True)
class Optim:
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    groups: list[Group] = field(default_factory=list)
    even: Annotated[int, BeforeValidator(_read_even)] = 2
    rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    workers: int | Literal["auto"] = "auto"
    nesterov: bool = False
    clip: float | None = None


@dataclass(kw_only=True)
class Experiment:
    name: str
    task: Annotated[Any, Named("task")]
    optim: Optim
    sets: dict[str, Margin] = field(default_factory=dict)
    pairs: dict[str, list[int] | Margin] = field(default_factory=dict)
    note: str = field(default="", metadata={"hash": False})


TABLES = {"task": {"faces": f"{__name__}:Faces", "organs": f"{__name__}:Organs", "bare": "absent_package.organs:Task"}}
GOOD = """\
name: first
task:
  name: faces
  classes: 3
optim:
  lr: 0.1
"""


def made(text: str = GOOD, *overrides: str) -> Experiment:
    return parse(Experiment, text, "x.yaml", overrides, TABLES)


def mistakes(text: str | bytes = GOOD, *overrides: str) -> list[str]:
    """Lines of the message, without the head line, which is checked here."""
    with pytest.raises(ConfigError) as caught:
        parse(Experiment, text, "x.yaml", overrides, TABLES)
    head, *lines = str(caught.value).split("\n")
    count = len(caught.value.problems)
    assert head == f"x.yaml: {count} problem{'s' if count > 1 else ''}"
    assert len(lines) == count
    assert [f"  {p}" for p in caught.value.problems] == lines
    return [line.removeprefix("  ") for line in lines]


def with_line(block: str, line: str) -> str:
    """GOOD with one more line at the end of a block."""
    after = {"task": "  classes: 3\n", "optim": "  lr: 0.1\n", "": "  lr: 0.1\n"}[block]
    return GOOD.replace(after, f"{after}{'  ' if block else ''}{line}\n")


# ---- What is right ---------------------------------------------------------------------------------------------------


def test_a_recipe_becomes_its_dataclasses_with_defaults_filled_in():
    got = made()
    assert got == Experiment(name="first", task=Faces(classes=3), optim=Optim(lr=0.1))


def test_every_type_of_field_is_read():
    got = made("""
name: "quoted: #name"
task: {name: faces, classes: 7, margin: {size: 1e-3, kind: cos}, net: {name: huge, depth: 3}}
optim:
  lr: 1
  betas: [0.5, 1]
  groups: [{match: "head.*", scale: 10}, {match: neck}]
  workers: 3
  nesterov: true
  clip: 3e4
sets:
  on: {kind: adaptive}
  10: {}
note: |
  two
  lines
""")
    assert got.task == Faces(classes=7, margin=Margin(size=0.001, kind="cos"), net=Large(name="huge", depth=3))
    assert got.optim.betas == (0.5, 1.0) and isinstance(got.optim.betas, tuple)
    assert got.optim.lr == 1.0 and isinstance(got.optim.lr, float)
    assert got.optim.groups == [Group(match="head.*", scale=10.0), Group(match="neck")]
    assert (got.optim.workers, got.optim.nesterov, got.optim.clip) == (3, True, 30000.0)
    assert got.sets == {"on": Margin(kind="adaptive"), "10": Margin()}
    assert (got.name, got.note) == ("quoted: #name", "two\nlines\n")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("1e-3", 0.001), ("3e4", 30000.0), ("+.5", 0.5), ("-0.0", -0.0), ("12", 12), ("-7", -7), ("0", 0), ("5.", 5.0),
     ("no", "no"), ("yes", "yes"), ("on", "on"), ("off", "off"), ("1:30", "1:30"), ("1_000", "1_000"), ("0x1F", "0x1F"),
     ("2024-01-01", "2024-01-01"), ("true", True), ("False", False), ("null", None), ("~", None), ("''", ""),
     ("'1'", "1"), ("=", "="), ("<<", "<<"), ("e5", "e5"), ("1e", "1e"), (".", "."), ("-", [None])],
)  # fmt: skip
def test_words_and_numbers_mean_what_yaml_1_2_says(written, meant):
    from trainkit.config.yaml_reader import read

    source = read(f"key: {written}" if written != "-" else "key:\n- ")
    assert source.problems == []
    assert source.tree == {"key": meant} and type(source.tree["key"]) is type(meant)


def test_a_named_block_keeps_its_name_only_for_a_class_that_has_the_field():
    assert made(GOOD.replace("faces", "organs").replace("classes: 3", "organs: [liver]")).task == Organs(
        name="organs", organs=["liver"]
    )


def test_a_byte_order_mark_and_windows_line_ends_are_no_mistake():
    text = ("\ufeff" + GOOD.replace("\n", "\r\n")).encode()
    assert parse(Experiment, text, "x.yaml", tables=TABLES) == made()


# ---- What is wrong in the values -------------------------------------------------------------------------------------


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file():
    text = """\
name: 5
task: {name: faces, clases: 3}
optim:
  lr: fast
  betas: [1]
sets: [1]
extra: 1
"""
    assert mistakes(text, "optim.clip=high") == [
        "name (line 1): found 5, expected text",
        "task.classes (line 2): this key is required",
        "task.clases (line 2): unknown key, did you mean 'classes'?",
        "optim.lr (line 4): found 'fast', expected a number",
        "optim.betas.1 (line 5): this key is required",
        "sets (line 6): found a list, expected a block",
        "extra (line 7): unknown key; the keys here are name, task, optim, sets, pairs, note",
        "optim.clip (override 'optim.clip=high'): found 'high', expected a number",
    ]


def test_a_problem_says_its_parts_separately():
    with pytest.raises(ConfigError) as caught:
        made(with_line("task", "margin: {kind: cosine}"))
    wanted = Problem("task.margin.kind", 5, "'cosine'", "one of arc, cos, adaptive", nearest="cos")
    assert caught.value.problems == [wanted]
    assert isinstance(caught.value, UserError) and caught.value.where == "x.yaml"


@pytest.mark.parametrize(
    ("block", "line", "message"),
    [
        ("optim", "clip: true", "optim.clip (line 7): found true, expected a number"),
        ("optim", "clip: '1'", "optim.clip (line 7): found '1', expected a number"),
        ("optim", "nesterov: yes", "optim.nesterov (line 7): found 'yes', expected true or false"),
        ("optim", "nesterov: null", "optim.nesterov (line 7): found null, expected true or false"),
        ("optim", "workers: 1.0", "optim.workers (line 7): found 1.0, expected a whole number or auto"),
        ("optim", "betas: [1, 2, 3]", "optim.betas (line 7): found a list, expected at most 2 items"),
        ("optim", "groups: {}", "optim.groups (line 7): found a block that is empty, expected a list"),
        ("optim", "groups: [{}]", "optim.groups.0.match (line 7): this key is required"),
        ("optim", "rate: 0", "optim.rate (line 7): found 0, expected a value above 0"),
        ("optim", "rate: 2.5", "optim.rate (line 7): found 2.5, expected a value at most 1"),
        ("optim", "even: 3", "optim.even (line 7): 3 is odd; an even number is needed"),
        ("optim", "leraning: 3",
         "optim.leraning (line 7): unknown key; the keys here are lr, betas, groups, even, rate, workers, nesterov, "
         "clip"),
        ("optim", "LR: 3", "optim.LR (line 7): unknown key, did you mean 'lr'?"),
        ("optim", "classes: 3", "optim.classes (line 7): unknown key; it belongs in task"),
        ("optim", "note: x", "optim.note (line 7): unknown key; it belongs at the top level"),
        ("task", "match: x", "task.match (line 5): unknown key; it belongs in optim.groups.*"),
        ("task", "depth: x",
         "task.depth (line 5): unknown key; the keys here are name, classes, margin, net, low, high"),
        ("task", "low: 2", "task (line 2): low 2.0 is above high 1.0"),
        ("task", "margin: {kind: arcc}",
         "task.margin.kind (line 5): found 'arcc', expected one of arc, cos, adaptive; did you mean 'arc'?"),
        ("task", "margin: 3", "task.margin (line 5): found 3, expected a block"),
        ("task", "net: {name: lrge}",
         "task.net.name (line 5): found 'lrge', expected one of small, large, huge; did you mean 'large'?"),
        ("task", "net: {}", "task.net.name (line 5): this key is required"),
        ("task", "net: {name: small, depth: 3}", "task.net.depth (line 5): unknown key; the keys here are name, width"),
        ("task", "net: {name: small, width: x}", "task.net.width (line 5): found 'x', expected a whole number"),
        ("task", "net: small", "task.net (line 5): found 'small', expected a block"),
        ("", "sets: {a: {sise: 1}}", "sets.a.sise (line 7): unknown key, did you mean 'size'?"),
        ("", "pairs: {a: [x]}", "pairs.a.0 (line 7): found 'x', expected a whole number"),
        ("", "pairs: {a: {size: x}}", "pairs.a.size (line 7): found 'x', expected a number"),
        ("", "pairs: {a: 3}", "pairs.a (line 7): found 3, expected a list or a block"),
        ("", "task.classes: 3", "line 7: key 'task.classes'; a key is a word without dots; nest blocks instead"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_its_key_line_and_what_is_expected(block, line, message):
    assert mistakes(with_line(block, line)) == [message]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("", "task (line 1): this key is required"),
        ("task: {classes: 3}", "task.name (line 2): this key is required; one of faces, organs, bare"),
        ("task: {name: face}", "task.name (line 2): found 'face', expected one of faces, organs, bare; "
                               "did you mean 'faces'?"),
        ("task: {name: [faces]}", "task.name (line 2): found a list, expected one of faces, organs, bare"),
        ("task: {name: 'os:system'}", "task.name (line 2): found 'os:system', expected one of faces, organs, bare"),
        ("task: faces", "task (line 2): found 'faces', expected a block whose name is one of faces, organs, bare; "
                        "write {name: faces}"),
    ],
)  # fmt: skip
def test_a_named_block_that_is_missing_unnamed_misnamed_or_no_block_lists_the_names(block, message):
    assert mistakes(f"name: x\n{block}\noptim: {{lr: 1}}\n") == [message]


def test_a_task_whose_package_is_not_installed_says_which():
    with pytest.raises(UserError, match=r"^task 'bare': needs the module 'absent_package'; install it$"):
        made(GOOD.replace("faces", "bare"))


def test_a_message_stays_short_whatever_the_file_holds():
    text = GOOD + "".join(f"k{i}: 1\n" for i in range(3000)) + f"note: [{'x' * 5000}]\n"
    with pytest.raises(ConfigError) as caught:
        made(text)
    lines = str(caught.value).split("\n")
    assert len(lines) == 52 and lines[-1].startswith("  and ") and max(map(len, lines)) < 200


# ---- What is wrong in the text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "name: x", "name (line 7): given twice; keep one of them"),
        (GOOD + "note: &a x", "note (line 7): found anchor '&a'; write the value itself, or quote the text"),
        (GOOD + "note: *a", "note (line 7): found alias '*a'; write the value itself, or quote the text"),
        (GOOD + "note: !!str x",
         "note (line 7): found tag 'tag:yaml.org,2002:str'; leave it out; the type follows from the key"),
        (GOOD.replace("0.1", ".nan"), "optim.lr (line 6): .nan is not a finite number"),
        (GOOD.replace("0.1", "1e999"), "optim.lr (line 6): 1e999 is too large for a number"),
        (GOOD.replace("3", "9223372036854775808"), "task.classes (line 4): 9223372036854775808 does not fit 64 bits"),
        (GOOD.replace("3", "012"),
         "task.classes (line 4): 012 starts with 0, which some readers take for octal; remove the 0, or quote the "
         "text"),
        (GOOD + "? [a]\n: 1", "line 7: found a key that is not a word; keys are plain text"),
        (GOOD + "'': 1", "line 7: key ''; a key is a word without dots; nest blocks instead"),
        (GOOD + "---\n" + GOOD, "line 7: found a second document; write one recipe per file"),
        ("%YAML 1.1\n---\n" + GOOD, "line 1: found a % directive; leave it out"),
        (GOOD.replace("  lr", "\tlr"), "line 6: found a tab; use spaces"),
        (GOOD + "# \x07", "line 7: found character U+0007, which is not allowed in a text file; remove it"),
        (GOOD + "\x00", "line 7: found character U+0000, which is not allowed in a text file; remove it"),
        (GOOD.encode() + b"note: \xff", "line 7: byte 0xFF, which is not UTF-8; save the file as UTF-8"),
        ("- " * 20_000, "line 1: found blocks nested more than 50 deep; a recipe needs a few levels"),
        ("[" * 20_000, "line 1: found blocks nested more than 50 deep; a recipe needs a few levels"),
        (GOOD + f"note: [{'1,' * 30_000}]", "line 7: found more than 20000 values; a recipe needs a few dozen"),
        (b"#" * 1_000_001, "found more than 1000000 bytes, expected a recipe"),
        ("", "found nothing, expected a block of keys"),
        ("- a\n- b\n", "line 1: found a list, expected a block of keys"),
        ("\n\nword", "line 3: found 'word', expected a block of keys"),
    ],
    ids=lambda text: repr(text)[-40:],
)  # fmt: skip
def test_a_text_that_is_no_recipe_is_told_with_its_line(text, message):
    assert mistakes(text) == [message]


@pytest.mark.parametrize(
    "line", ["note: [1", "a: b: c", " x: 1", "note: '", "@: 1", 'note: "\\ud800"', 'note: "\\UFFFFFFFF"']
)
def test_broken_yaml_is_told_with_its_line(line):
    (message,) = mistakes(GOOD + line)
    assert message.startswith(("line 7: not YAML: ", "line 8: not YAML: "))
    assert message.endswith("; check indentation, colons and quotes")


def test_mistakes_of_the_text_and_of_the_values_are_told_together():
    assert mistakes(GOOD.replace("0.1", ".inf") + "note: 3\nnote: x\n") == [
        "optim.lr (line 6): .inf is not a finite number",
        "note (line 7): found 3, expected text",
        "note (line 8): given twice; keep one of them",
    ]


def test_an_alias_bomb_is_refused_at_once():
    letters = "abcdefghijklmnopqrstuvwxyz"
    bomb = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in pairwise(letters))
    start = time.process_time()
    with pytest.raises(ConfigError, match="found anchor '&a'"):
        made(GOOD + bomb)
    assert time.process_time() - start < 2


# ---- Overrides -------------------------------------------------------------------------------------------------------


def test_overrides_replace_values_and_make_the_blocks_around_them():
    got = made(
        GOOD, "optim.lr=1e-2", "name=two words", "sets.val.kind=cos", "task.net={name: small, width: 8}",
        "optim.clip=2", "note='a=b'", "optim.groups=[{match: x}]", "optim.groups.0.scale=3", "optim.betas=[0.1, 0.2]",
    )  # fmt: skip
    assert (got.optim.lr, got.name, got.sets, got.note) == (0.01, "two words", {"val": Margin(kind="cos")}, "a=b")
    assert got.task.net == Small(name="small", width=8)
    assert (got.optim.clip, got.optim.groups, got.optim.betas) == (2.0, [Group(match="x", scale=3.0)], (0.1, 0.2))


def test_an_override_replaces_a_whole_block():
    assert made(GOOD, "task={name: organs}").task == Organs(name="organs")
    assert made(GOOD, "optim.clip=3", "optim={lr: 2}").optim == Optim(lr=2.0)


def test_an_override_mends_a_mistake_of_the_file():
    assert made(GOOD.replace("0.1", "fast"), "optim.lr=0.5").optim.lr == 0.5


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lr", "override 'optim.lr': not of the form KEY=VALUE; write it like optim.lr=0.05"),
        ("optim..lr=3", "override 'optim..lr=3': not of the form KEY=VALUE; write it like optim.lr=0.05"),
        ("optim.\udcff=3", "override 'optim.\\udcff=3': not of the form KEY=VALUE; write it like optim.lr=0.05"),
        ("note=", "override 'note=': no value; write note=null for none, note='\"\"' for empty text"),
        ("optim.lr=fast", "optim.lr (override 'optim.lr=fast'): found 'fast', expected a number"),
        ("optim.lrr=1", "optim.lrr (override 'optim.lrr=1'): unknown key, did you mean 'lr'?"),
        ("name.first=1", "override 'name.first=1': name is 'first', not a block; give the whole block: name={...}"),
        ("task={name: faces}", "task.classes (override 'task={name: faces}'): this key is required"),
        ("note=[", "note (override 'note=['): not YAML: did not find expected node content; "
                   "check indentation, colons and quotes"),
        ("note={a: 1, a: 2}", "note.a (override 'note={a: 1, a: 2}'): given twice; keep one of them"),
        ("note=&a x", "note (override 'note=&a x'): found anchor '&a'; write the value itself, or quote the text"),
        ("note=\tx", "note (override 'note=\\tx'): found a tab; use spaces"),
        ("optim.lr=.inf", "optim.lr (override 'optim.lr=.inf'): .inf is not a finite number"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_named(word, message):
    assert message in mistakes(GOOD, word)


def test_an_override_given_twice_or_into_a_list_that_is_too_short_is_refused():
    assert mistakes(GOOD, "name=a", "name=b") == ["override 'name=b': name is given twice; keep one of them"]
    assert mistakes(GOOD, "optim.groups=[]", "optim.groups.0.scale=3") == [
        "override 'optim.groups.0.scale=3': optim.groups is a list of 0 without an entry '0'; give the whole list"
    ]
    deep = ".".join("a" * 60) + "=1"
    assert "nested more than 50 deep" in mistakes(GOOD, deep)[0]


# ---- Files and plug-ins ----------------------------------------------------------------------------------------------


def file_mistake(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: 1 problem\n  ")
    return str(caught.value).split("\n  ")[1]


def test_a_path_that_is_no_recipe_file_is_told(tmp_path, monkeypatch):
    assert file_mistake("adadistil.yaml") == "no such file; did you mean recipes/adadistill.yaml?"
    assert (
        file_mistake("zzz.yaml") == "no such file; give the path of a .yaml file; trainkit ls lists the shipped recipes"
    )
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "x.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert file_mistake(tmp_path / "folder.yaml").startswith("a folder, not a recipe file")
    assert file_mistake(tmp_path / "x.json").startswith("not the name of a YAML file")
    assert file_mistake(tmp_path / "pipe.yaml").startswith("not a regular file")
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load(tmp_path / ("x" * 300 + ".yaml"))
    with pytest.raises(ConfigError, match=r"no such file|cannot be read"):
        load(str(tmp_path / "nul\x00.yaml"))


RECIPE = """\
name: planned
task: {name: planned_task, classes: 3}
data: {name: planned_data, organs: [liver]}
optim: {lr: 0.1}
train: {length: 2 epochs, batch_size: 8}
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A package outside this one that adds a task and a data set."""
    (tmp_path / "planned_plugin.py").write_text(f"""
from dataclasses import dataclass
TABLES = {{"task": {{"planned_task": "planned_plugin:Task"}}, "data": {{"planned_data": "planned_plugin:Data"}}}}
@dataclass(kw_only=True)
class Task:
    classes: int
    margin: float = 0.5
@dataclass(kw_only=True)
class Data:
    organs: list[str]
{"#"}
""")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "recipe.yaml"
    sys.modules.pop("planned_plugin", None)


def test_a_plug_in_adds_words_for_one_load_and_its_recipe_comes_back(plugin, tmp_path):
    plugin.write_text(RECIPE)
    got = load(plugin, plugins=["planned_plugin"])
    assert isinstance(got, Recipe) and got.task.classes == 3 and got.data.organs == ["liver"]
    plugin.write_text(dump(got))
    assert load(plugin, plugins=["planned_plugin"]) == got
    with pytest.raises(ConfigError, match=r"task\.name .*found 'planned_task', expected one of"):
        load(plugin)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "it has no TABLES; expected TABLES = "),
        ("TABLES = {'tsk': {}}", "it adds names to unknown blocks 'tsk'; expected one of task, data"),
        ("TABLES = {'task': {'adadistill': 'a:B'}}", "the task 'adadistill' already exists; choose another name"),
        ("TABLES = {'task': {'mine': 'a.B'}}", "task 'mine' is 'a.B'; expected package.module:Class"),
    ],
)
def test_a_plug_in_that_does_not_fit_is_refused(source, message, tmp_path, monkeypatch):
    (tmp_path / "odd_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(UserError) as caught:
            load("x.yaml", plugins=["odd_plugin"])
    finally:
        sys.modules.pop("odd_plugin", None)
    assert str(caught.value).startswith(f"--plugin odd_plugin: {message}")


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent_plugin", "no module 'absent_plugin'; install it"), ("os; x", "not the name of a package")],
)
def test_a_plug_in_that_is_not_there_is_refused(name, message):
    with pytest.raises(UserError, match=f"--plugin {name}: {message}"):
        load("x.yaml", plugins=[name])


# ---- Back to YAML ----------------------------------------------------------------------------------------------------

FULL = """\
name: "no"
task: {name: faces, classes: 3, net: {name: small}, margin: {size: 1e-8}}
optim: {lr: 1, groups: [{match: "head.*"}, {match: "1e-3", scale: 2}]}
sets: {"a b": {}, null: {size: 3}, ä: {kind: cos}}
note: "012 \\"x\\"\\n\\t\\x85\\u2028\\U0001f600 é"
"""


def test_dump_writes_every_default_in_the_order_of_the_fields():
    assert (
        dump(made())
        == """\
name: first
task:
  name: faces
  classes: 3
  margin:
    size: 0.5
    kind: arc
  net: null
  low: 0.0
  high: 1.0
optim:
  lr: 0.1
  betas: [0.9, 0.999]
  groups: []
  even: 2
  rate: 0.5
  workers: auto
  nesterov: false
  clip: null
sets: {}
pairs: {}
note: ""
"""
    )


@pytest.mark.parametrize("text", [GOOD, FULL])
def test_dump_loads_back_to_an_equal_recipe(text):
    got = made(text)
    short = brief(got)
    assert made(dump(got)) == got == made(short)
    assert dump(made(dump(got))) == dump(got)
    assert len(short) < len(dump(got)) and "low:" not in short and "nesterov" not in short


def test_a_reader_of_yaml_1_1_reads_the_same_from_a_dump():
    theirs = yaml.safe_load(dump(made(FULL)))
    assert theirs["name"] == "no" and theirs["note"] == '012 "x"\n\t\x85\u2028\U0001f600 é'
    assert theirs["task"]["margin"] == {"size": 1e-8, "kind": "arc"}
    assert [group["match"] for group in theirs["optim"]["groups"]] == ["head.*", "1e-3"]
    assert list(theirs["sets"]) == ["a b", "null", "ä"]


@pytest.mark.parametrize("word", ["y", "N", "off", "1_0", "0x1F", "1:30", "=", "<<", "2024-01-01", "~", "- a", "a: b",
                                  "a #b", " a", "a ", "", "null", "1 epoch", "5%", "*.bias", "'", "{", "\u00e9t\u00e9",
                                  "a  b", "0o7", "+1", "true", "True", "012", ".5", "e", "\x7f", "\ue000"])  # fmt: skip
def test_any_text_survives_the_way_through_yaml(word):
    got = made(GOOD)
    got.note = word
    assert made(dump(got)) == got
    assert yaml.safe_load(dump(got))["note"] == word


def test_flat_names_every_value_by_its_dotted_key():
    got = flat(made(GOOD, "optim.groups=[{match: x}]", "sets.val.kind=cos"))
    assert got["task.name"] == "faces" and got["task.margin.size"] == 0.5
    assert got["optim.betas"] == "[0.9, 0.999]" and got["optim.clip"] is None
    assert got["optim.groups.0.match"] == "x" and got["sets.val.kind"] == "cos"
    assert all(not isinstance(value, list | dict) for value in got.values())
    assert flat(made())["sets"] == "{}" and flat(made())["optim.groups"] == "[]"


def test_the_digest_depends_on_what_is_meant_and_not_on_how_it_is_written():
    assert digest(made()) == digest(made("optim: {lr: 1e-1}\n" + GOOD.split("optim")[0]))
    assert digest(made()) == digest(made(GOOD, "note=whatever")), "a field with hash: False does not count"
    assert digest(made()) != digest(made(GOOD, "optim.lr=0.2"))
    assert digest(made()) != digest(made(GOOD, "sets.val.kind=arc"))
    assert len(digest(made())) == 64


def test_a_recipe_made_in_python_with_a_class_of_no_table_cannot_be_written():
    with pytest.raises(ValueError, match="Margin has no word in the table of 'task' blocks"):
        dump(Experiment(name="x", task=Margin(), optim=Optim(lr=1.0)))


# ---- Cost ------------------------------------------------------------------------------------------------------------


def test_loading_takes_under_a_fifth_of_a_cpu_second(plugin):
    plugin.write_text(RECIPE)
    load(plugin, plugins=["planned_plugin"])
    start = time.process_time()
    load(plugin, plugins=["planned_plugin"])
    assert time.process_time() - start < 0.2


def test_importing_the_loader_and_the_schema_imports_nothing_heavy():
    code = "import sys, trainkit.config.loader, trainkit.config.schema; print(*{m.split('.')[0] for m in sys.modules})"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "numpy",
        "mlflow",
        "timm",
        "datasets",
        "accelerate",
        "matplotlib",
        "PIL",
        "torchvision",
        "pyarrow",
    }
    assert heavy & set(out.stdout.split()) == set() and "pydantic" in out.stdout.split()


# ---- Ranges of numbers -----------------------------------------------------------------------------------------------


def numbers(kind: Any, place: str, known: set[type], marks: tuple = ()) -> Iterator[tuple[str, set[str]]]:
    """Place and bounds (`ge`, `gt`, `le`, `lt`) of every number that a value of this type may hold."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *own = get_args(kind)
        if not (is_dataclass(inner) and any(hasattr(mark, "func") for mark in own)):  # such as a span, read from a text
            yield from numbers(inner, place, known, (*marks, *own))
    elif origin in (Union, types.UnionType, list, tuple, dict):
        for member in get_args(kind):
            yield from numbers(member, place, known, marks if origin in (Union, types.UnionType) else ())
    elif is_dataclass(kind) and kind not in known:
        known.add(kind)
        hints = get_type_hints(kind, include_extras=True)
        for f in fields(kind):
            if f.init:
                yield from numbers(hints[f.name], f"{kind.__name__}.{f.name}", known)
    elif kind in (int, float):
        rules = [rule for mark in marks for rule in getattr(mark, "metadata", ())]
        yield place, {key for rule in rules for key in ("ge", "gt", "le", "lt") if hasattr(rule, key)}


UNBOUNDED = {"Network.args", "TimmSpec.args", "ReidSpec.args", "SmpSpec.args"}
"""Arguments that are handed on to networks of other libraries, which alone know what each may be."""


def test_no_number_of_a_recipe_is_without_a_lower_and_an_upper_bound():
    known: set[type] = set()
    found = list(numbers(Recipe, "", known))
    for words in blocks.TABLES.values():
        for place in words.values():
            module, _, name = place.partition(":")
            found += numbers(getattr(importlib.import_module(module), name), "", known)
    assert len(known) > 80 and len(found) > 280
    assert {place for place, has in found if not (has & {"ge", "gt"} and has & {"le", "lt"})} == UNBOUNDED


@pytest.mark.parametrize(
    ("recipe", "word", "message"),
    [
        ("face_teacher", "optim.betas=[0.9, 1.0]", r"optim.betas.1 .* found 1\.0, expected a value below 1"),
        ("face_teacher", "optim.momentum=-1", "found -1, expected a value at least 0"),
        ("face_teacher", "optim.groups=[{match: '*', lr_scale: -1}]", "expected a value at least 0"),
        ("face_teacher", "limits.hang=999999999 h", "longer than the maximum of 100000 h"),
        ("convnext", "data.image_size=1000000000", "found 1000000000, expected a value at most 8192"),
        ("eye_state", "task.net={name: eye_convnext, base_channels: 1024, num_blocks: 16}", "131072 channels"),
    ],
)
def test_a_number_out_of_its_range_is_refused_when_the_recipe_is_read(recipe, word, message):
    with pytest.raises(ConfigError, match=message):
        load(RECIPES / f"{recipe}.yaml", [word])


def test_nesterov_needs_momentum():
    words = ["optim.nesterov=true", "optim.momentum=0.0"]
    with pytest.raises(ConfigError, match="set a momentum above 0"):
        load(RECIPES / "face_teacher.yaml", words)
    assert load(RECIPES / "face_teacher.yaml", [*words, "optim.name=adamw"]).optim.nesterov


def test_a_key_that_is_added_changes_the_digest_only_where_it_is_set():
    """`data.columns` came after 0.1.0, whose digest this is; runs of before are found and resumed."""
    recipe = ROOT / "recipes" / "convnext.yaml"
    before = "d393f0bd9e1a1bc87d0affbfa04b092fc95de8e835379f19296efdb0d654140d"
    assert digest(load(recipe)) == digest(load(recipe, ["data.columns={}"])) == before
    assert digest(load(recipe, ["data.columns={label: fine}"])) != before


def test_a_resolved_recipe_that_is_older_than_a_key_means_what_it_meant(tmp_path):
    """`text.rule` came after runs whose captions were tokenized otherwise."""
    recipe, older = ROOT / "recipes" / "reid.yaml", tmp_path / "recipe.yaml"
    resolved = dump(load(recipe))
    keys = [line for line in resolved.splitlines(True) if line.lstrip().startswith("rule:")]
    assert len(keys) == 1
    older.write_text("".join(line for line in resolved.splitlines(True) if line not in keys))
    found, now = load(older), load(recipe)
    assert (found.data.text.rule, now.data.text.rule) == (1, 2)
    assert digest(found) == digest(now) == "dd9c546fcf32bf866c89ea19ddef8724014b44100eace24afdbd43ac1ee064a4"
    older.write_text(resolved)
    assert load(older) == now
