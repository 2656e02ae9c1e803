"""reference/messages.md: the errors and warnings of trainkit, grouped by what they are about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from docs.generators.markdown import prose, table
from docs.generators.message_sites import GAP, Message, messages

GROUPS = {
    "trainkit.cli": "The command line",
    "trainkit.config": "Recipes and overrides",
    "trainkit.autoconfig": "Recipes for your own data",
    "trainkit.paths": "Files and folders",
    "trainkit.files": "Files and folders",
    "trainkit.errors": "Files and folders",
    "trainkit.data.images": "Data: images",
    "trainkit.data.faces": "Data: faces",
    "trainkit.data.people": "Data: person re-identification",
    "trainkit.data.scenes": "Data: images with masks",
    "trainkit.data.volumes": "Data: volumes",
    "trainkit.data.formats": "Data: file formats",
    "trainkit.data.storage": "Data: packed sets and the cache",
    "trainkit.data.loader": "Data: the loader",
    "trainkit.data": "Data: all kinds",
    "trainkit.models": "Networks and pretrained weights",
    "trainkit.losses": "Losses",
    "trainkit.tasks": "Tasks",
    "trainkit.metrics": "Metrics",
    "trainkit.training": "Training",
    "trainkit.checkpoint": "Checkpoints",
    "trainkit.distributed": "Several processes and GPUs",
    "trainkit.environment": "The environment",
    "trainkit.speed": "Speed",
    "trainkit.diagnostics": "Benchmarks and preflight",
    "trainkit.experiments": "Launching runs, sweeps, folds and seeds",
    "trainkit.tracking": "Tracking and MLflow",
    "trainkit.analysis": "Comparing and promoting runs",
    "trainkit.inference": "Evaluation and prediction",
    "trainkit.export": "Export",
    "trainkit.plots": "Figures",
    "trainkit.api": "The Python interface",
    "trainkit": "Other",
}
"""Headings by the package that a message comes from; the longest name that fits counts."""
HEAD = ("message", "expected", "what to do")
ABOVE = f"""\
# Messages

Every error and warning of trainkit, by what it is about. The page is generated from the code by `make docs`. Search it
for words of the message you have: `{GAP}` stands for what differs, such as a file, a key or a number.

An error has the form `place: what was found; expected ...; what to do`, and ends the command with
[exit code](exit-codes.md) 2. [Troubleshooting](../how-to/troubleshoot.md) explains messages that need more than a line.

"""


def page() -> str:
    """The text of the page."""
    groups: dict[str, list[Message]] = {title: [] for title in GROUPS.values()}
    for message in messages():
        groups[_group(message.module)].append(message)
    return ABOVE + "".join(_section(title, found) for title, found in groups.items() if found).rstrip("\n") + "\n"


def _group(module: str) -> str:
    parts = module.split(".")
    ends = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(GROUPS[end] for end in ends if end in GROUPS)


def _section(title: str, found: Iterable[Message]) -> str:
    errors = [m for m in found if m.kind == "error"]
    warnings = [m for m in found if m.kind == "warning"]
    text = f"## {title}\n\n" + (table(HEAD, _rows(errors)) if errors else "")
    if warnings:
        lines = sorted({_plain(m.found) for m in warnings if _plain(m.found)}, key=_order)
        text += "Warnings:\n\n" + "".join(f"- {prose(line)}\n" for line in lines) + "\n"
    return text


def _rows(found: Iterable[Message]) -> Iterator[tuple[str, str, str]]:
    """One row for each text; places in which the same is said are told together."""
    places: dict[tuple[str, str, str], set[str]] = {}
    for message in found:
        said = (_plain(message.found), message.expected, message.remedy)
        places.setdefault(said, set()).add(message.where)
    rows = []
    for said in sorted(places):
        named = sorted(place for place in places[said] if re.search(r"[^\W\d_]{2,}", place) and len(place) < 60)
        where = f"{named[0]}: " if len(named) == 1 and len(places[said]) == 1 else ""
        rows.append((where + said[0] or GAP, _plain(said[1]), _plain(said[2])))
    for row in sorted(rows, key=lambda one: (_order("".join(one)), one)):
        yield prose(row[0]), prose(row[1]), prose(row[2])


def _plain(text: str) -> str:
    return "" if text.strip() == GAP else text.strip()


def _order(text: str) -> str:
    return re.sub(r"^[\W_]+", "", text).lower()
