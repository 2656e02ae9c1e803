"""A trained network for use elsewhere: safetensors, ONNX, a folder that timm loads; each proved against its run.

Nothing is kept that does not find on real pictures of the run's evaluation what the trained network finds there. Beside
it are `model.json`, which says to programs what they must know, and `README.md`, which says it to people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import loader
from trainkit.config.schema import TABLES, Recipe
from trainkit.errors import UserError
from trainkit.export import files
from trainkit.export.files import ABOUT, CARD, FORMATS, TENSORS, Format
from trainkit.inference.output_folder import check_free
from trainkit.inference.trained_model import meta_of, read_meta
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from torch import nn

    from trainkit.export.latency import Latency


@dataclass(frozen=True)
class Exported:
    """What was written."""

    written: tuple[Path, ...]
    agreements: dict[str, Any]
    """By file name; each says in words how near it comes."""
    notes: tuple[str, ...]
    latency: Latency | None = None


def export(
    run: str,
    out: Path,
    formats: Sequence[Format] = FORMATS,
    *,
    pictures: int = 8,
    latency: bool = False,
    seconds: float = 30.0,
    plugins: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Exported:
    """Write the network of the best weights of a run to the folder `out`: model.safetensors, model.onnx, model.json.

    Each is compared with the network as it was trained on so many pictures of the run's first evaluation, spread over
    it, in float32 on the CPU. `hub-folder` adds a config.json to the tensors, by which timm makes the network. With
    `latency` the ways of running it are timed for about `seconds`. `say` is told what comes next where that takes long.

    Raises UserError before any work where the run is of another kind, a file is there already, or a package is
    missing; and where a file cannot be made or disagrees, which is then not left.
    """
    folder = Store.locate().find(run)
    meta = read_meta(folder)
    # The run's precision may be one that this machine does not have.
    recipe = loader.load(folder.recipe, ("train.precision=no",), plugins)
    of_kind = _of_kind(recipe)
    if of_kind is None:
        found = "is not of pictures, people or volumes"
        expected = "a run of classify, embed, adadistill, reid, segment2d or segment3d"
        raise UserError(f"run {folder.name}", found, expected)
    if pictures < 1:
        raise UserError("--pictures", str(pictures), "1 or more")
    check_free(out, [out / name for name in (*files.names_of(formats), ABOUT, CARD)])
    if "onnx" in formats:
        files.require("onnx", "onnxscript", "onnxruntime")
    how = {"pictures": pictures, "latency": latency, "seconds": seconds, "say": say}
    return of_kind.export(folder, recipe, meta, out, formats, **how)


def load(folder: Path | str) -> nn.Module:
    """The network of an exported folder, from its model.safetensors and model.json, in eval mode.

    It takes pixels; of a class for every pixel it gives logits, else a tuple of the `outputs` that model.json names.
    Raises UserError where a file is missing, damaged, or not what model.json says.
    """
    folder = Path(folder)
    where = str(folder / ABOUT)
    try:
        said = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        text, held, digest = said["recipe"], said["meta"], said["sha256"][TENSORS]
    except FileNotFoundError:
        raise UserError(where, "is missing", "what `trainkit export` wrote") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(where, f"cannot be read: {error}", "what `trainkit export` wrote") from None
    file = folder / TENSORS
    if file.is_file() and files.sha256(file) != digest:
        raise UserError(str(file), "is not the file that model.json was written for", remedy="export it again")
    recipe = loader.parse(Recipe, text, where, ("train.precision=no",), TABLES)
    return _of_kind(recipe).rebuilt(recipe, meta_of(held), said, file)


def _of_kind(recipe: Recipe) -> Any:
    """The module that exports networks of a recipe's kind; None where there is none."""
    from trainkit.data.images import preprocess

    if hasattr(recipe.task, "deployable"):
        from trainkit.export import scenes

        return scenes
    if hasattr(recipe.task, "label_map"):
        from trainkit.export import volumes

        return volumes
    if preprocess.of(recipe.data) is not None:
        from trainkit.export import images

        return images
    return None
