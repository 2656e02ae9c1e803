"""Import, verify and check data sets."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import click

from trainkit.cli.options import (
    columns_option,
    echo,
    next_step,
    plugins_option,
    read_columns,
    recipe_command,
    recipe_file,
    run_words,
)
from trainkit.errors import EXIT_CODE, UserError
from trainkit.terminal import bar


@click.group()
def data() -> None:
    """Import, verify and check data sets.

    Help for one command: trainkit data COMMAND --help
    """


@data.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--image-size", type=int, help="Faces: width and height of the images in pixels.  [default: 112]")
@click.option(
    "--resize",
    type=click.Choice(["no", "down", "any"]),
    help="Faces: `down` shrinks larger images, `any` resizes all.  [default: no]",
)
@click.option(
    "--evaluation", is_flag=True, help="Faces: import an evaluation set: pairs.csv, .bin, templates or TinyFace."
)
@click.option(
    "--size", metavar="HxW", help="Images of any kind: height x width, such as 32x64, or `own` to keep the sizes."
)
@click.option(
    "--fit", type=click.Choice(["crop", "stretch"]), help="With --size: crop or stretch to that size.  [default: crop]"
)
@click.option(
    "--group", metavar="REGEX", help="With --size: its (...) matches the group (person, video) in an image's path."
)
@columns_option("Tables: name of a column: image, label, split, name or group.")
@click.option("--damaged", type=click.Choice(["fail", "skip"]), default="fail", show_default=True,
              help="Damaged files: stop, or leave them out.")  # fmt: skip
@click.option("--damaged-most", metavar="SHARE", help="With --damaged skip: largest share to leave out, such as 1%.")
def import_(source: Path, out: Path, damaged: Literal["fail", "skip"], damaged_most: str | None, **given: Any) -> None:
    """Convert the data at SOURCE to the packed format at OUT.

    Faces by default; images of any kind with --size. SOURCE may name a split: set.parquet#val, hf://owner/name#test.
    For a data set of the hub also configuration and revision:
    hf://owner/name/CONFIGURATION@REVISION#test

    Example: trainkit data import photos photos-packed --size 224x224
    """
    most = _share(damaged, damaged_most)
    _refuse_flags(given, "faces" if given["size"] is None else "images")
    from trainkit.data import import_images, kinds

    size, image_size, resize = _size(given["size"]), given["image_size"], given["resize"] or "no"
    if kinds.at(source).name == "volumes":
        remedy = "name it in a recipe, which prepares it: trainkit cp hippocampus mine.yaml --data FOLDER"
        raise UserError(str(source), "holds volumes (NIfTI)", "images", remedy)
    image_size = 112 if image_size is None else image_size
    with bar("importing") as on_progress:
        how = {"damaged": damaged, "damaged_most": most, "on_progress": on_progress}
        how["columns"] = read_columns(given["columns"], ("image", "label", "split", "name", "group"))
        if given["size"] is not None:
            how |= {"fit": given["fit"] or "crop", "group": given["group"]}
            report = import_images.import_pictures(source, out, size=size, **how)
        elif given["evaluation"]:
            report = import_images.import_evaluation(source, out, image_size=image_size, resize=resize, **how)
        else:
            how |= {"resize": resize}
            report = import_images.import_faces(source, out, image_size=image_size, **how)
    what = "classes" if given["size"] is not None else "people"
    groups = f" and {report.groups} groups" if report.groups and what == "classes" else ""
    echo(f"{report.out}: {report.rows} images of {report.classes} {what}{groups}, {report.store}, from {report.kind}")
    for note in report.notes:
        echo(f"  {note}")
    next_step("data", "verify", out, why="find damage")


_FLAGS = {"faces": ("image_size", "resize", "evaluation"), "images": ("fit", "group")}
"""Kind of set to the options that it alone takes."""


def _refuse_flags(given: Mapping[str, Any], kind: str) -> None:
    """Raise UsageError for options of another kind of set."""
    for other, names in _FLAGS.items():
        for name in names if other != kind else ():
            if given[name] not in (None, False):
                only = "is for faces, not with --size" if other == "faces" else "is given with --size"
                raise click.UsageError(f"--{name.replace('_', '-')} {only}")


def _share(damaged: str, most: str | None) -> float:
    from pydantic import TypeAdapter, ValidationError

    from trainkit.config.units import Share

    if most is None:
        return 1.0
    if damaged != "skip":
        raise click.UsageError("--damaged-most is given with --damaged skip")
    try:
        return TypeAdapter(Share).validate_python(most)
    except ValidationError:
        raise click.UsageError(f"--damaged-most {most}: a share such as 1% is needed") from None


def _label_names(text: str | None) -> list[str] | dict[str, int] | None:
    """Read `kidney,tumour`, or with the values of label maps `kidney=205,tumour=420`."""
    words = None if text is None else text.split(",")
    if words is None or not any("=" in word for word in words):
        return words
    if not all(re.fullmatch("[^=]+=(?:0|[1-9][0-9]{0,8})", word) for word in words):
        raise click.UsageError(f"--names {text}: names, as kidney,tumour, or each with its value, as kidney=1,tumour=2")
    return {name: int(value) for name, _, value in (word.partition("=") for word in words)}


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None or text == "own":
        return None
    from trainkit.config import units

    sides = [int(side) for side in units.sides(text, 2) if side.is_integer()]
    if len(sides) != 2 or not all(1 <= side <= 4096 for side in sides):
        raise click.UsageError(f"--size {text!r} is not HEIGHTxWIDTH, as 32x64, each 1 to 4096, nor `own`")
    return sides[0], sides[1]


@data.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--against",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Another split to compare with, for shared images; may be repeated.",
)
@click.option("--names", metavar="A,B,...", help="NIfTI: names of the labels 1, 2, ...; masks: of the values 0, 1, ...")
@plugins_option
def verify(path: Path, against: tuple[Path, ...], names: str | None, plugins: tuple[str, ...]) -> int:
    """Read all data at PATH and report damaged or unusual files.

    PATH is a packed data set, NIfTI files, a set of people, or images with masks. Splits in a folder, such as train and
    val, are also compared with each other. Damage is exit code 2.

    Example: trainkit data verify photos-packed --against test-packed
    """
    from trainkit.config import loader, schema
    from trainkit.data import kinds

    loader.with_plugins(schema.TABLES, plugins)
    kind = kinds.at(path)
    if (read := kinds.function(kind, "verify")) is None:
        able = ", ".join(row.name for row in kinds.KINDS.values() if row.verify)
        raise UserError(f"data {kind.name}", "has no `verify`", f"one of {able}")
    given: dict[str, Any] = {"names": _label_names(names), "plugins": plugins}
    takes = inspect.signature(read).parameters
    if names is not None and "names" not in takes:
        raise click.UsageError("--names is for NIfTI files and for masks")
    with contextlib.ExitStack() as shown:
        if "on_progress" in takes:  # what packs a set has a bar of its own
            given["on_progress"] = shown.enter_context(bar("verifying", kind.sample))
        found = read(path, against=against, **{name: value for name, value in given.items() if name in takes})
    for line in found:
        echo(line)
    problems = sum(not line.startswith("warning: ") for line in found)
    echo(f"{path}: {problems} problem{'' if problems == 1 else 's'}, {len(found) - problems} to look at")
    if problems:
        return EXIT_CODE
    next_step("cp", "RECIPE", "mine.yaml", "--data", path, why="a recipe for this data")
    return 0


@recipe_command(
    click.option("--all", "whole", is_flag=True, help="Check all images, however many there are."),
    click.option(
        "--json", "out", metavar="FILE", type=click.Path(path_type=Path), help="Also write the whole report to FILE."
    ),
    click.option(
        "--images",
        "drawn",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Write a PNG of images that look the same, side by side.",
    ),
)
def check(
    recipe: str, overrides: tuple[str, ...], whole: bool, out: Path | None, drawn: Path | None, plugins: tuple[str, ...]
) -> int:
    """Check the data of RECIPE for train/test leakage.

    Also reports unusual content. Exit code 2: leakage that would make scores too good, or a damaged data set. Every
    training runs the same check when it starts.

    Example: trainkit data check mine.yaml --images duplicates.png
    """
    from trainkit.analysis import data_integrity
    from trainkit.config import run_request

    request = run_request.RunRequest(recipe_file(recipe), overrides, plugins)
    report, opened = data_integrity.check(request, whole)
    figure = data_integrity.pictures(report, opened) if drawn is not None else None
    try:
        if out is not None:
            out.write_text(report.json(), encoding="utf-8")
        if figure is not None and drawn is not None:
            figure.savefig(drawn, format="png")
    except OSError as error:
        raise UserError(str(error.filename), f"cannot be written ({error.strerror or error})") from None
    for line in data_integrity.lines(report):
        echo(line)
    if drawn is not None:
        echo(f"{drawn}: images that look the same" if figure is not None else f"{drawn}: not written, there are none")
    echo(f"{recipe}: {report.summary}")
    if report.bad:
        return EXIT_CODE
    next_step(*run_words(request), why="train it")
    return 0


data.add_command(check)
