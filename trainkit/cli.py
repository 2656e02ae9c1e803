"""The `trainkit` command, and the command behind `accelerate launch trainkit/run.py`. Heavy imports wait for a verb."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from trainkit import __version__
from trainkit.errors import EXIT_CODE, UserError

NEWEST = ""


class Plain(click.Command):
    """A command whose user's mistakes are one message and exit code 2, without a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the words of a command line."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = EXIT_CODE
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else self.name
            code = _say(f"{error.format_message().rstrip('.')}; see {path} --help")
        except click.ClickException as error:
            code = _say(error.format_message())
        except UserError as error:
            code = EXIT_CODE if error.told else _say(str(error))
        except click.Abort:
            code = 130
        # A verb returns nothing, or its exit code.
        sys.exit(code if isinstance(code, int) else 0)


class Commands(Plain, click.Group):
    """A group of such commands."""


def _say(message: str) -> int:
    rank = os.environ.get("RANK", "0")
    click.echo(f"{'' if rank == '0' else f'[process {rank}] '}error: {message}", err=True)
    return EXIT_CODE


_plugins = click.option(
    "--plugin", "plugins", multiple=True, metavar="PACKAGE", help="Import a package that adds words."
)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Training for computer vision in which every run proves what it did."""


@click.command(cls=Plain, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@click.option("--check", is_flag=True, help="Validate, print the resolved recipe, name what is missing, and end.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value=NEWEST,
    default=None,
    metavar="[RUN]",
    help="Continue a run; without a name the newest unfinished one of this recipe.",
)
@click.option("--elastic", is_flag=True, help="With --resume: the number of processes may have changed.")
@click.option("--folds", is_flag=True, help="Cross-validation: train once for each fold of the data, it held out.")
@click.option("--score", metavar="RUN", help="Score the best weights of RUN on the recipe's evaluations, and end.")
@_plugins
def run(
    recipe: str,
    overrides: tuple[str, ...],
    check: bool,
    resume: str | None,
    elastic: bool,
    folds: bool,
    score: str | None,
    plugins: tuple[str, ...],
) -> int:
    """Train RECIPE, with KEY=VALUE words changing it.

    accelerate launch trainkit/run.py recipes/adadistill.yaml optim.lr=0.05
    """
    from trainkit import launcher

    note = launcher.die_with_parent()
    stopping = launcher.stop_flag()
    if note:
        click.echo(note, err=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

    from trainkit import order as orders

    order = orders.Order(_recipe(recipe), overrides, plugins, resume, elastic, folds)
    if folds and score is not None:
        raise click.UsageError("--score is of one run, not with --folds")
    if check:
        click.echo(orders.check(order), nl=False)
        return 0
    from trainkit import launch

    if score is not None:
        launch.score(order, score)
        return 0
    return launch.launch(order, stopping)


def _recipe(word: str) -> Path:
    """The recipe's file: as given, else one that comes with trainkit: `adadistill` or `recipes/adadistill.yaml`."""
    path = Path(word)
    if path.is_file() or path.parent not in (Path("."), Path("recipes")):
        return path
    shipped = shipped_recipes() / (path.name if path.suffix in (".yaml", ".yml") else f"{path.name}.yaml")
    return shipped if shipped.is_file() else path


def shipped_recipes() -> Path:
    """The folder of the recipes that come with trainkit."""
    return Path(__file__).resolve().parent.parent / "recipes"


@main.command()
def ls() -> None:
    """List the recipes that come with trainkit."""
    from trainkit import copying

    found = sorted(shipped_recipes().glob("*.yaml"))
    if not found:
        raise UserError(str(shipped_recipes()), "holds no recipes", remedy="they are part of the repository")
    for path in found:
        click.echo(f"{path.stem:24} {copying.headline(path)}")


@main.command()
@click.argument("what")
@_plugins
def show(what: str, plugins: tuple[str, ...]) -> None:
    """Show a recipe with its defaults, a run (name, beginning of it, or MLflow id), or a checkpoint folder."""
    path = _recipe(what)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        from trainkit import config, copying

        resolved = config.dump(config.load(path, (), plugins))
        click.echo(copying.header(path) + resolved, nl=False)
        return
    from trainkit import checkpoint

    if path.is_dir() and (path / checkpoint.MANIFEST).exists():
        click.echo(checkpoint.describe(path))
        return
    from trainkit.store import Store

    folder = Store.locate().find(what)
    for key, value in vars(folder.info()).items():
        click.echo(f"{key:14} {value}")
    for step in sorted(folder.checkpoints.glob("step-*")):
        click.echo()
        click.echo(checkpoint.describe(step))


@main.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@_plugins
def check(recipe: str, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Validate RECIPE, print it resolved, and say which data or weights are not there yet."""
    from trainkit import order

    click.echo(order.check(order.Order(_recipe(recipe), overrides, plugins)), nl=False)


@main.command()
@click.argument("recipe")
@click.argument("new", type=click.Path(path_type=Path))
@_plugins
def cp(recipe: str, new: Path, plugins: tuple[str, ...]) -> None:
    """Copy RECIPE to NEW for another data set; the lines to change are marked."""
    from trainkit import copying

    marked = copying.copy(_recipe(recipe), new, plugins)
    click.echo(f"{new}: change the {marked} lines marked with {copying.MARK!r}, then: trainkit check {new}")


@main.command()
@click.option("--port", default=5000, show_default=True)
def ui(port: int) -> None:
    """Serve the MLflow page of this store on this machine alone."""
    from trainkit.store import Store
    from trainkit.ui import serve

    serve(Store.locate(), port)


@main.command()
@click.argument("recipe")
@_plugins
def fetch(recipe: str, plugins: tuple[str, ...]) -> None:
    """Download what RECIPE names, each file checked by its SHA-256. Training itself never uses the network."""
    from trainkit import fetching

    for line in fetching.fetch(_recipe(recipe), plugins):
        click.echo(line)


@main.command()
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path), required=False)
def projector(run: str, out: Path | None) -> None:
    """Write the inspected embeddings of RUN to the folder OUT (projector/RUN) for TensorBoard's projector."""
    from trainkit.report import projector
    from trainkit.store import Store

    store = Store.locate()
    out = out or Path("projector") / store.find(run).name
    for done in projector.export(store, run, out):
        click.echo(f"{done.folder}: {done.samples} embeddings of {done.dimensions} dimensions")
    click.echo(f"open it: tensorboard --logdir {out}")


@main.command()
@click.argument("run")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--mirror", is_flag=True, help="Average over mirror images: of pictures 2, of volumes 8 times the time.")
@_plugins
def predict(run: str, source: Path, out: Path, mirror: bool, plugins: tuple[str, ...]) -> int:
    """Write label maps of the pictures or volumes at SOURCE to the folder OUT, by the best weights of RUN.

    Of pictures they are OUT/NAME.png, with a palette of the classes' colours and OUT/classes.json; SOURCE is a folder
    of pictures, one picture, or a set with masks whose split it names: cityscapes#val. Of volumes they are
    OUT/NAME.nii.gz; SOURCE is a folder of NIfTI files, one file, or a data set: tom500#val. A file that cannot be read
    is named and left out; the exit code is then 2.
    """
    from trainkit import predicting
    from trainkit.errors import few

    with _bar("predicting", "file") as on_progress:
        done = predicting.predict(run, source, out, mirror=mirror, plugins=plugins, on_progress=on_progress)
    for line in done.notes:
        click.echo(f"note: {line}")
    for line in done.damaged:
        click.echo(f"left out: {line}", err=True)
    labels = few((f"{label} {name}" for label, name in enumerate(done.names)), 20)
    click.echo(f"{out}: {len(done.written)} label maps of {labels}, by {done.weights}")
    return EXIT_CODE if done.damaged else 0


@main.command("export")
@click.argument("run")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "formats",
    multiple=True,
    type=click.Choice(["safetensors", "onnx"]),
    help="Which files; may be repeated.  [default: both]",
)
@click.option("--pictures", default=8, show_default=True, help="How many real pictures the files are compared on.")
@click.option("--latency", is_flag=True, help="Time one picture: float32 and bfloat16, eager, compiled, ONNX Runtime.")
@click.option("--seconds", default=30.0, show_default=True, help="With --latency: how long, without compilation.")
@_plugins
def export_(
    run: str,
    out: Path,
    formats: tuple[str, ...],
    pictures: int,
    latency: bool,
    seconds: float,
    plugins: tuple[str, ...],
) -> None:
    """Write the network of the best weights of RUN, of the task segment2d, to the folder OUT for use elsewhere.

    OUT/model.safetensors and OUT/model.onnx take RGB pixels and give logits; OUT/model.json says all about them. Files
    that find something else on real pictures than the trained network are not kept.
    """
    from trainkit import export

    def say(line: str) -> None:
        click.echo(f"{line} ...", err=True)

    how = {"pictures": pictures, "latency": latency, "seconds": seconds, "plugins": plugins}
    done = export.export(run, out, formats or export.FORMATS, say=say, **how)
    for line in done.notes:
        click.echo(f"note: {line}")
    for file in done.written:
        agreed = done.agreements.get(file.name)
        click.echo(f"{file}: {agreed or 'what the files are, and how they were checked'}")
    for line in done.latency.lines() if done.latency else ():
        click.echo(line)


_words = click.argument("overrides", nargs=-1)


@main.command()
@click.argument("recipe")
@_words
@_plugins
def ceilings(recipe: str, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Time the loader, the network and the evaluations of RECIPE, each alone, on this machine, and keep the figures."""
    from trainkit.order import Order
    from trainkit.speed import ceilings

    for line in ceilings.command(Order(_recipe(recipe), overrides, plugins)):
        click.echo(line)


@main.command()
@click.argument("recipe")
@_words
@click.option("--steps", default=10, show_default=True, help="How many updates are watched.")
@_plugins
def syncs(recipe: str, overrides: tuple[str, ...], steps: int, plugins: tuple[str, ...]) -> None:
    """Name the source lines of RECIPE's training that make the processor wait for the device, and what they cost."""
    from trainkit.order import Order
    from trainkit.speed import syncs

    for line in syncs.command(Order(_recipe(recipe), overrides, plugins), steps):
        click.echo(line)


@main.command()
@click.argument("recipe")
@_words
@click.option("--only", multiple=True, metavar="RUNG", help="Measure this rung; may be repeated.  [default: all]")
@click.option("--repeats", default=5, show_default=True, help="Interleaved repeats of each rung.")
@click.option("--steps", type=int, help="Updates of a repeat.  [default: about two seconds of them]")
@click.option(
    "--write", type=click.Path(path_type=Path), metavar="NEW", help="Write the recipe with what helps to NEW."
)
@click.option("--resume", is_flag=True, help="Go on with the newest unfinished ladder of RECIPE.")
@_plugins
def ladder(
    recipe: str,
    overrides: tuple[str, ...],
    only: tuple[str, ...],
    repeats: int,
    steps: int | None,
    write: Path | None,
    resume: bool,
    plugins: tuple[str, ...],
) -> int:
    """Measure the switches of RECIPE one by one and together on this machine: speed, memory and numeric drift."""
    from trainkit.order import Order
    from trainkit.speed import ladder

    order = Order(_recipe(recipe), overrides, plugins)
    return ladder.command(order, only=only, repeats=repeats, steps=steps, write=write, resume=resume, say=click.echo)


@main.command()
@click.argument("recipe")
@_words
@_plugins
def preflight(recipe: str, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> int:
    """Try RECIPE for a minute: updates, evaluation, checkpoint and restoring it, and forecast the whole training."""
    from trainkit.order import Order
    from trainkit.speed import preflight

    return preflight.command(Order(_recipe(recipe), overrides, plugins), say=click.echo)


@main.command()
@click.argument("claim", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="Say what is claimed, and measure nothing.")
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Write the table as markdown to FILE.")
@click.option("--quick", is_flag=True, help="Fewer repeats: to see that it works.")
def claims(claim: tuple[str, ...], listed: bool, write: Path | None, quick: bool) -> int:
    """Measure what guides to faster training claim, on the recipe it was said of and on this machine."""
    from trainkit.speed import claims

    return claims.command(claim, listed=listed, write=write, quick=quick, say=click.echo)


@main.group()
def data() -> None:
    """Import data sets once into the fast form, look at them, find damage."""


@data.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--image-size", type=int, help="Faces: side of the pictures in pixels.  [default: 112]")
@click.option("--align", is_flag=True, help="Faces: align by five points (landmarks5.json) to the ArcFace template.")
@click.option(
    "--resize",
    type=click.Choice(["no", "down", "any"]),
    help="Faces: make larger ones smaller, or all fit.  [default: no]",
)
@click.option("--evaluation", is_flag=True, help="Faces: an evaluation set: pairs.csv, .bin, templates or TinyFace.")
@click.option("--size", metavar="HxW", help="Pictures of any kind: height x width, as 32x64, or `own` to keep theirs.")
@click.option("--fit", type=click.Choice(["crop", "stretch"]), help="With --size: how it is reached.  [default: crop]")
@click.option("--group", metavar="REGEX", help="With --size: finds person, video ... in a picture's path, in (...).")
@click.option("--volumes", is_flag=True, help="Volumes (NIfTI) with label maps, prepared for segmentation.")
@click.option("--spacing", metavar="DxHxW", help="Volumes: mm to resample to, depth x height x width, as 3.85x0.5x0.5.")
@click.option("--names", metavar="A,B,...", help="Volumes: names of the labels 1, 2, ...")
@click.option("--patient", metavar="REGEX", help="Volumes: finds the patient in a file's name, in (...).")
@click.option("--clinical", metavar="FILE", type=click.Path(path_type=Path), help="Volumes: CSV table of the patients.")
@click.option("--axes", type=click.Choice(["zyx", "yzx", "xzy"]), help="Volumes: order of axes.  [default: by slices]")
@click.option("--damaged", type=click.Choice(["fail", "skip"]), default="fail", show_default=True)
def import_(
    source: Path,
    out: Path,
    image_size: int | None,
    align: bool,
    resize: str | None,
    evaluation: bool,
    size: str | None,
    fit: str | None,
    group: str | None,
    volumes: bool,
    spacing: str | None,
    names: str | None,
    patient: str | None,
    clinical: Path | None,
    axes: str | None,
    damaged: str,
) -> None:
    """Convert faces, with --size pictures of any kind, or with --volumes NIfTI at SOURCE to the packed form at OUT.

    SOURCE may name its split: set.parquet#val, hf://owner/name#test, tom500#train.
    """
    for_volumes = {
        "--spacing": spacing, "--names": names, "--patient": patient, "--clinical": clinical, "--axes": axes
    }  # fmt: skip
    if volumes:
        others = {"--image-size": image_size, "--align": align, "--resize": resize, "--evaluation": evaluation}
        for flag, value in (others | {"--size": size, "--fit": fit, "--group": group}).items():
            if value:
                raise click.UsageError(f"{flag} is not for volumes")
        mm, known = None if spacing is None else _spacing(spacing), _label_names(names)
        how = {"spacing": mm, "names": known, "patient": patient, "clinical": clinical, "axes": axes}
        _import_volumes(source, out, damaged=damaged, **how)
        return
    for flag, value in for_volumes.items():
        if value is not None:
            raise click.UsageError(f"{flag} is given with --volumes")
    for_faces = {"--image-size": image_size, "--align": align, "--resize": resize, "--evaluation": evaluation}
    for_pictures = {"--fit": fit, "--group": group}
    for flag, value in (for_faces if size is not None else for_pictures).items():
        if value:
            raise click.UsageError(f"{flag} is {'for faces, not with' if size is not None else 'given with'} --size")
    shape = None if size is None else _size(size)
    from trainkit.data import importing, volume_import

    if volume_import.holds_volumes(source):
        raise UserError(str(source), "holds volumes (NIfTI)", "pictures", "import them with --volumes")
    image_size, resize = 112 if image_size is None else image_size, resize or "no"
    with _bar("importing") as on_progress:
        if size is not None:
            report = importing.import_pictures(
                source, out, size=shape, fit=fit or "crop", group=group, damaged=damaged, on_progress=on_progress
            )
        elif evaluation:
            report = importing.import_evaluation(
                source, out, image_size=image_size, resize=resize, damaged=damaged, on_progress=on_progress
            )
        else:
            report = importing.import_faces(
                source, out, image_size=image_size, align=align, resize=resize, damaged=damaged, on_progress=on_progress
            )
    what = "people" if size is None else f"classes and {report.groups} groups" if report.groups else "classes"
    click.echo(f"{report.out}: {report.rows} pictures of {report.classes} {what}, {report.store}, from {report.kind}")
    for note in report.notes:
        click.echo(f"  {note}")


def _import_volumes(source: Path, out: Path, **how: Any) -> None:
    from trainkit.data import volume_import

    with _bar("importing", "case") as on_progress:
        report = volume_import.import_volumes(source, out, on_progress=on_progress, **how)
    for line in report.lines():
        click.echo(line)


def _label_names(text: str | None) -> list[str] | None:
    return None if text is None else text.split(",")


def _spacing(text: str) -> tuple[float, float, float]:
    try:
        depth, height, width = (float(side) for side in text.split("x"))
    except ValueError:
        depth = height = width = 0.0
    if not all(0.01 <= side <= 100 for side in (depth, height, width)):
        raise click.UsageError(f"--spacing {text!r} is not DEPTHxHEIGHTxWIDTH in mm, as 3.85x0.5x0.5, each 0.01 to 100")
    return depth, height, width


def _size(text: str) -> tuple[int, int] | None:
    if text == "own":
        return None
    height, _, width = text.partition("x")
    sides = [int(side) for side in (height, width) if side.isascii() and side.isdigit()]
    if len(sides) != 2 or not all(1 <= side <= 4096 for side in sides):
        raise click.UsageError(f"--size {text!r} is not HEIGHTxWIDTH, as 32x64, each 1 to 4096, nor `own`")
    return sides[0], sides[1]


@data.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--names", metavar="A,B,...", help="Masks: names of the values 0, 1, ... where the layout has none.")
@_plugins
def info(path: Path, names: str | None, plugins: tuple[str, ...]) -> None:
    """Say what the packed set at PATH holds; of volumes also a folder of NIfTI files, from their headers.

    PATH may be pictures with masks as well, a list or a folder of them, or a recipe that names such: their sizes, and
    the share of the pixels that each class has.
    """
    from trainkit.data import importing, scene_import, volume_import

    volumes = volume_import.holds_volumes(path)
    if not volumes and scene_import.holds_scenes(path):
        with _bar("reading") as on_progress:
            lines = scene_import.described(path, names=_label_names(names), plugins=plugins, on_progress=on_progress)
        for line in lines:
            click.echo(line)
        return
    if names is not None:
        raise click.UsageError("--names is for pictures with masks")
    for key, value in (volume_import if volumes else importing).info(path).items():
        click.echo(f"{key:14} {value}")
    for line in volume_import.table(path) if volumes else ():
        click.echo(line)


@data.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--against", multiple=True, type=click.Path(path_type=Path), help="Other splits to compare with.")
@click.option("--names", metavar="A,B,...", help="NIfTI: names of the labels 1, 2, ...; masks: of the values 0, 1, ...")
@click.option("--patient", metavar="REGEX", help="NIfTI files: finds the patient in a file's name, in (...).")
@_plugins
def verify(
    path: Path, against: tuple[Path, ...], names: str | None, patient: str | None, plugins: tuple[str, ...]
) -> int:
    """Read every byte of the packed set, of the NIfTI files, or of the pictures and masks at PATH and name what is
    damaged or odd.

    Damage is exit code 2. Of files it is all that keeps a set from being imported or trained on. Of a folder of splits,
    such as train and val, each is read and compared with the others. PATH may be a recipe of pictures with masks: each
    set that it names is read, and its crop and scales are held against the pictures.
    """
    from trainkit.data import importing, scene_import, volume_import

    volumes = volume_import.holds_volumes(path)
    scenes = not volumes and scene_import.holds_scenes(path)
    if names is not None and not (volumes or scenes):
        raise click.UsageError("--names is for NIfTI files and for masks")
    if patient is not None and not volumes:
        raise click.UsageError("--patient is for NIfTI files")
    with _bar("verifying", "case" if volumes else "picture") as on_progress:
        if volumes:
            found = volume_import.verify(
                path, against=against, names=_label_names(names), patient=patient, on_progress=on_progress
            )
        elif scenes:
            found = scene_import.verify(
                path, against=against, names=_label_names(names), plugins=plugins, on_progress=on_progress
            )
        else:
            found = importing.verify(path, against=against, on_progress=on_progress)
    for line in found:
        click.echo(line)
    problems = sum(not line.startswith("warning: ") for line in found)
    click.echo(f"{path}: {problems} problem{'' if problems == 1 else 's'}, {len(found) - problems} to look at")
    return EXIT_CODE if problems else 0


@contextlib.contextmanager
def _bar(what: str, unit: str = "picture") -> Iterator[Callable[[int, int], None]]:
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, disable=None) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield on_progress


main.add_command(run)


if __name__ == "__main__":
    main()
