"""reference/cli.md: every command with its options, from click."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from docs.generators.markdown import code, prose, slug, table
from trainkit.cli.main import main

NAME = "trainkit"
EXAMPLES = {
    "demo": "trainkit demo",
    "run": "trainkit run convnext optim.lr=0.05",
    "repeat": "trainkit repeat convnext --seeds 5",
    "sweep": "trainkit sweep convnext optim.lr=0.1,0.05 train.ema=null,0.99",
    "compare": "trainkit compare convnext eye_state",
    "ls": "trainkit ls",
    "show": "trainkit show last",
    "check": "trainkit check convnext optim.lr=0.05",
    "cp": "trainkit cp convnext flowers.yaml --data flowers",
    "download": "trainkit download timm:tf_efficientnet_lite0.in1k",
    "preflight": "trainkit preflight convnext",
    "syncs": "trainkit syncs convnext --steps 20",
    "bench": "trainkit bench convnext device.threads=1,2",
    "evaluate": "trainkit evaluate last",
    "predict": "trainkit predict last photos predictions.parquet",
    "export": "trainkit export last exported",
    "promote": "trainkit promote last --as champion",
    "ui": "trainkit ui --port 5001",
    "sync": "trainkit sync",
    "relocate": "trainkit relocate --from /old/mlruns",
    "data import": "trainkit data import faces.parquet packed_faces --image-size 112",
    "data verify": "trainkit data verify packed_faces --against packed_test",
    "data check": "trainkit data check convnext --json report.json",
}
"""One line for each command whose --help has no example; tests/docs/test_reference.py holds that none is without."""
CODES = {
    "promote": "1: the model was not promoted.",
    "predict": "2: some files could not be read and were left out.",
    "sync": "2: something could not be sent.",
    "data verify": "2: something is damaged.",
    "data check": "2: training and evaluation sets overlap, or a set is damaged.",
    "preflight": "2: an error was found.",
}
"""What an exit code of a command means beside what it means everywhere."""
ABOVE = """\
# Commands

Every `trainkit` command with its arguments, options and defaults. The page is generated from the code by `make docs`.
`trainkit COMMAND --help` prints the same in the terminal.

A **RECIPE** is the path of a YAML file, or the name of a recipe that comes with trainkit ([recipes](recipes.md)). An
**override** `KEY=VALUE` changes one key of it ([keys](keys.md)). A **RUN** is the name of a run, a short one
(`convnext`: its last finished run), an MLflow id, `last` or `best`.

**Exit codes** of all commands: 0 done, 1 an unexpected error, with a traceback, 2 an error that you can correct, 130
interrupted with Ctrl+C. A training that was stopped has [other codes](exit-codes.md).

Several processes: `accelerate launch trainkit/run.py RECIPE [OVERRIDES]` does what `trainkit run` does, on every
process that the launcher starts ([launch configurations](launch-configs.md)).

"""


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its name after `trainkit`, in the order of `--help` of the program."""
    for name, command in main.commands.items():
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", below) for inner, below in command.commands.items() if not below.hidden)
        elif not command.hidden:
            yield name, command


def page() -> str:
    """The text of the page."""
    found = list(commands())
    index = [(f"[`{NAME} {name}`](#{slug(f'{NAME} {name}')})", prose(_short(command))) for name, command in found]
    return ABOVE + table(("command", "does"), index) + "".join(section(name, command) for name, command in found)


def _short(command: click.Command) -> str:
    return re.split(r"\n\s*\n", (command.help or "").strip())[0]


def section(name: str, command: click.Command) -> str:
    """The heading of a command, and what there is to say of it."""
    title = f"{NAME} {name}"
    context = click.Context(command, info_name=title)
    usage = " ".join([title, *command.collect_usage_pieces(context)])
    texts = _paragraphs(command)
    shown = [line for text in texts if text.startswith("Example") for line in _example(text)]
    parts = [f"## {title}\n\n", *(f"{_paragraph(text)}\n\n" for text in texts if not text.startswith("Example"))]
    parts.append(f"```text\n{usage}\n```\n\n")
    rows = [row for option in command.params if (row := _row(option, context))]
    parts.append(table(("option", "default", "meaning"), rows) if rows else "")
    lines = "\n".join(shown or [EXAMPLES[name]])
    parts.append(f"Example:\n\n```\n{lines}\n```\n\n")
    if name in CODES:
        parts.append(f"Exit code {CODES[name]}\n\n")
    return "".join(parts)


def _paragraphs(command: click.Command) -> list[str]:
    return [text.strip() for text in re.split(r"\n\s*\n", (command.help or "").replace("\b", "")) if text.strip()]


def _example(text: str) -> list[str]:
    """The commands of a paragraph `Example: trainkit ...`."""
    return [line.strip() for line in re.sub(r"^Examples?:", "", text).split("\n") if line.strip()]


def _paragraph(text: str) -> str:
    line = " ".join(text.split())
    return code(line) if re.match(r"(accelerate|trainkit) \S", line) else prose(line)


def _row(option: click.Parameter, context: click.Context) -> tuple[str, str, str] | None:
    if not isinstance(option, click.Option) or option.hidden:
        return None
    record = option.get_help_record(context)
    if record is None:
        return None
    names, text = record
    text = re.sub(r"\s*\[(?:default: [^\]]*|x[<>]=?[^\]]*|[\d<>=x]+)\]$", "", text)
    stated = re.search(r"\[default: (.*)\]", record[1])
    default = stated[1].split(";")[0] if stated else "off" if option.is_flag and not option.secondary_opts else ""
    said = re.sub(r"\s*\[default: .*\]$", "", text)
    return code(names), code(default) if default and default != "off" else default, prose(said)
