"""What a run says of new data, by its best weights: label maps, classes, embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import loader
from trainkit.errors import UserError
from trainkit.experiments.launch import META
from trainkit.interfaces import Meta
from trainkit.tracking.store import RunFolder, Store, write_aside
from trainkit.training.dependencies import best_weights

if TYPE_CHECKING:
    from torch import nn

    from trainkit.config.schema import Recipe
    from trainkit.distributed.runtime import Machine

BEGUN = ".predicting"
"""File in a folder of label maps that says which of them an unfinished prediction has written."""


@dataclass(frozen=True)
class Predicted:
    """What was written, and what was not."""

    written: tuple[Path, ...]
    """Label maps, or a table."""
    damaged: tuple[str, ...]
    """Sentences about what could not be read: it has no label map, and no row."""
    notes: tuple[str, ...]
    """Sentences about what is odd."""
    names: tuple[str, ...]
    """What the labels 0, 1, ... stand for, where classes are predicted."""
    weights: Path
    rows: int = 0
    """Of a table."""
    columns: tuple[str, ...] = ()
    """Of a table; empty where label maps were written."""


@dataclass(frozen=True)
class Rebuilt:
    """A run's network with its best weights, in evaluation mode, on the device that a run would take."""

    folder: RunFolder
    recipe: Recipe
    meta: Meta
    net: nn.Module
    machine: Machine
    weights: Path


OnProgress = Callable[[int, int], None]


def predict(
    run: str,
    source: Path | str,
    out: Path,
    *,
    mirror: bool = False,
    plugins: tuple[str, ...] = (),
    on_progress: OnProgress | None = None,
) -> Predicted:
    """Write what a run says of the volumes, pictures or people at `source`, by its best weights.

    Of runs that segment, `out` is a folder of label maps; of others a table with a row for each picture or record:
    see `predicting_volumes`, `predicting_scenes`, `predicting_pictures` and `predicting_people`. `mirror`: mean over
    mirror images, of volumes along all axes, of pictures left to right. What cannot be read is named, and the rest
    goes on; what was interrupted goes on where it stopped. On the GPU if there is one.

    Raises UserError before any work when the run predicts nothing of the kind, there is nothing to read, or a file to
    be written is there already.
    """
    folder = Store.locate().find(run)
    meta = read_meta(folder)
    recipe = loader.load(folder.recipe, (), plugins)
    kind = getattr(recipe.data, "name", "")
    if hasattr(recipe.task, "label_map") and meta.axes:
        from trainkit.inference import volumes as of_kind
    elif hasattr(recipe.task, "probabilities") and kind == "scenes":
        from trainkit.inference import scenes as of_kind
    elif kind in ("images", "faces"):
        from trainkit.inference import images as of_kind
    elif kind == "people":
        from trainkit.inference import people as of_kind
    else:
        raise UserError(
            f"run {folder.name}",
            "writes no label maps of volumes or pictures, and no table of classes or embeddings",
            "a run of segment3d, segment2d, classify, embed, adadistill or reid",
        )
    return of_kind.predict(folder, recipe, meta, source, out, mirror, on_progress)


@contextmanager
def rebuilt(folder: RunFolder, recipe: Recipe, meta: Meta) -> Iterator[Rebuilt]:
    """The network of a run, all of whose weights are those of its best checkpoint.

    Weights that it started from need not be there. Raises UserError where there is no checkpoint, or it does not fit.
    """
    from trainkit.checkpoint import safe_load
    from trainkit.distributed.runtime import Machine

    file = best_weights(folder.path)
    machine = Machine(recipe)
    try:
        net = recipe.task.build(meta, {}, recipe.seed).learns
        safe_load.load_into(net, safe_load.read_tensors(file), str(file))
        yield Rebuilt(folder, recipe, meta, machine.layout(net).eval(), machine, file)
    finally:
        machine.close()


def origin(folder: RunFolder, weights: Path, meta: Meta) -> dict[str, Any]:
    """Where a prediction comes from, in words that stand beside it."""
    return {"run": folder.name, "weights": f"{weights.parent.name}/{weights.name}", "trained_on": meta.digest}


def read_meta(folder: RunFolder) -> Meta:
    """What a run was trained on, as its `meta.json` says. Raises UserError when that is missing or damaged."""
    file = folder.path / META
    try:
        return meta_of(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        remedy = "name a run that trained; of a cross-validation one of its folds"
        raise UserError(str(file), "is missing", remedy=remedy) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read: {error}", remedy="repeat the run") from None


def meta_of(said: Mapping[str, Any]) -> Meta:
    """A `Meta` that was written as JSON; what a newer version has beside it is left out."""
    known = {field.name for field in fields(Meta)}
    return Meta(**{k: tuple(v) if isinstance(v, list) else v for k, v in said.items() if k in known})


def check_free(out: Path, targets: Sequence[Path]) -> None:
    """Refuse to write over anything: a folder of images may be named by mistake."""
    if out.exists() and not out.is_dir():
        raise UserError(str(out), "is a file", "a folder to write to")
    there = [target for target in targets if target.exists()]
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise UserError(str(there[0]), f"is there already{more}", remedy="name another folder, or move them away")


class Begun:
    """Which files of a folder a prediction has written that is not finished: the same one, begun again, keeps them.

    The hidden file `OUT/.predicting` has a line that says what is predicted, and one for each file, put there before
    the file is. It goes with `end`.
    """

    def __init__(self, folder: RunFolder, source: Path | str, out: Path, mirror: bool):
        """Raises UserError where another prediction has begun in `out`."""
        weights = best_weights(folder.path)
        step = f"{weights.parent.name}/{weights.name}"
        self._out, self._file = out, out / BEGUN
        self._head = json.dumps({"run": folder.name, "weights": step, "source": str(source), "mirror": mirror})
        try:
            text = self._file.read_text(encoding="utf-8") if self._file.is_file() else ""
        except (OSError, ValueError) as error:
            raise UserError(str(self._file), f"cannot be read ({error})", remedy="name another folder") from None
        head, *lines = text.splitlines() or [self._head]
        if head != self._head:
            remedy = f"name another folder; or, to begin anew, remove {BEGUN} and the label maps there"
            raise UserError(
                str(out), "holds a part of another prediction, of another run, source or --mirror", remedy=remedy
            )
        # Each stands on a line of its own, the last of which may have been cut short.
        self._names = {name for line in lines if (name := _name(line)) and (out / name).is_file()}
        self._ended = text.endswith("\n")

    def has(self, target: Path) -> bool:
        """Whether it was written before."""
        return target.relative_to(self._out).as_posix() in self._names

    def missing(self, targets: Iterable[Path]) -> list[Path]:
        """Those that are yet to be written."""
        return [target for target in targets if not self.has(target)]

    def note(self, target: Path) -> None:
        """A file is about to be written. Raises UserError where one has come there meanwhile, or nothing can be."""
        if target.exists():
            raise UserError(str(target), "is there, and was not when the work began", remedy="name another folder")
        try:
            if not self._file.exists():
                self._out.mkdir(parents=True, exist_ok=True)
                write_aside(self._file, self._head + "\n")
                self._ended = True
            with self._file.open("a", encoding="utf-8") as file:
                file.write("" if self._ended else "\n")
                file.write(json.dumps(target.relative_to(self._out).as_posix()) + "\n")
            self._ended = True
        except OSError as error:
            raise UserError(str(self._file), f"cannot be written ({error.strerror or error})") from None

    def end(self) -> None:
        """All has been written."""
        self._file.unlink(missing_ok=True)


def _name(line: str) -> str:
    try:
        name = json.loads(line)
    except ValueError:
        return ""
    return name if isinstance(name, str) else ""
