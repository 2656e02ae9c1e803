"""Export a trained network as safetensors or ONNX, and verify each file.

A file is kept only if its outputs on real samples of the run's evaluation equal those of the trained network. With the
files come `model.json`, which describes the network to programs, and `README.md`, the model card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit.config import loader
from trainkit.config.schema import TABLES, Recipe
from trainkit.data import kinds
from trainkit.data.folders import read_json
from trainkit.environment.version import __version__
from trainkit.errors import UserError
from trainkit.export import files, model_card
from trainkit.export.agreement import Agreement, Exportable, Exporter, by_name, write_onnx
from trainkit.export.files import ABOUT, CARD, FORMATS, ONNX, TENSORS, Format
from trainkit.export.images import headless
from trainkit.files import Json, sha256, write_aside
from trainkit.inference.output_folder import check_free
from trainkit.inference.trained_model import JSON_BYTES, Rebuilt, meta_of, placed, read_meta
from trainkit.interfaces import DatasetInfo
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Exported:
    """The files of an export."""

    written: tuple[Path, ...]
    agreements: Mapping[str, Agreement]
    """Differences from the trained network, by file name."""
    notes: tuple[str, ...]


def export(
    run: str,
    out: Path,
    formats: Sequence[Format] = FORMATS,
    *,
    pictures: int = 8,
    plugins: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Exported:
    """Write the network with the best weights of a run to the folder `out`: model.safetensors, model.onnx, model.json.

    Each file is compared with the trained network on `pictures` images, spread over the run's first evaluation, in
    float32 on the CPU. `say` receives progress messages.

    Raises UserError before any work if the task cannot be exported, a file exists already, or a package is missing; and
    if a file cannot be written or differs from the trained network; no file is kept then.
    """
    folder = Store.locate().find(run)
    meta = read_meta(folder)
    # The run's precision may not be available on this machine.
    recipe = loader.load(folder.recipe, ("train.precision=no",), plugins, stored=True)
    exporter = _exporter(recipe)
    if exporter is None:
        found = "its task cannot be exported"
        expected = "a run of classify, embed, adadistill, reid, segment2d or segment3d"
        raise UserError(f"run {folder.name}", found, expected, "name another run")
    if pictures < 1:
        raise UserError("--images", str(pictures), "1 or more", "change the option")
    names = files.names_of(formats)
    check_free(out, [out / name for name in (*names, ABOUT, CARD)])
    if ONNX in names:
        files.require("onnx", "onnxscript", "onnxruntime")
    weights = best_weights(folder.path)
    network = exporter.exportable(recipe, meta, weights, pictures)
    about = {**network.about, **_origin(folder, recipe, meta, weights, network)}
    out.mkdir(parents=True, exist_ok=True)
    agreements: dict[str, Agreement] = {}
    notes, kept = list(network.notes), list[str]()
    with files.aside(out, kept) as aside:
        if TENSORS in names:
            files.write_tensors(aside / TENSORS, network.net, folder.name)
            again = exporter.rebuilt(recipe, meta, about, aside / TENSORS)
            agreements[TENSORS] = network.compare(TENSORS, by_name(again, list(network.outputs)))
        if ONNX in names:
            say("writing model.onnx")
            agreements[ONNX], shapes, more = write_onnx(aside / ONNX, network, about)
            about |= shapes
            notes += more
        about["notes"] = notes
        about["checked"] = {name: asdict(one) for name, one in agreements.items()}
        about["sha256"] = {name: sha256(aside / name) for name in names}
        write_aside(aside / ABOUT, json.dumps(about, indent=1) + "\n")
        write_aside(aside / CARD, model_card.card(folder, recipe, weights, about, agreements))
        kept += [*names, ABOUT, CARD]
    return Exported(tuple(out / name for name in kept), agreements, tuple(notes))


def _origin(
    folder: RunFolder, recipe: Recipe, meta: DatasetInfo, weights: Path, network: Exportable
) -> dict[str, Json]:
    """Describe where an export comes from, for model.json."""
    split, rows = network.checked_on
    return {
        "outputs": dict(network.outputs),
        "output": "; ".join(f"{name}: {text}" for name, text in network.outputs.items()),
        "network": files.network(recipe.task, network.net),
        "run": folder.name,
        "run_id": folder.info().run_id,
        "weights": str(weights.relative_to(folder.path)),
        "data": {"digest": meta.digest, "checked_on": split, "pictures": rows},
        "made_with": {"trainkit": __version__, "torch": torch.__version__},
        "meta": asdict(meta),
        "scores": model_card.scores_of(folder, recipe, weights),
        "recipe": loader.dump(recipe),
    }


def load(folder: Path | str) -> nn.Module:
    """Load the network of an exported folder, from its model.safetensors and model.json, in eval mode.

    It takes pixels. Segmentation networks return logits, others a tuple of the `outputs` listed in model.json.
    Raises UserError if a file is missing, damaged, or does not match model.json.
    """
    recipe, exporter, said, meta = _read(Path(folder))
    return exporter.rebuilt(recipe, meta, said, Path(folder, TENSORS))


def trained(folder: Path | str) -> tuple[Rebuilt, dict[str, Any]]:
    """Load the network of an exported folder as it was trained, without the exported preprocessing.

    Returns also the content of model.json. Raises as `load`.
    """
    recipe, exporter, said, meta = _read(Path(folder))
    made = placed(recipe, headless(recipe, meta), Path(folder, TENSORS), lambda net: exporter.part(recipe.task, net))
    return replace(made, meta=meta), said


def _read(folder: Path) -> tuple[Recipe, Exporter, dict[str, Any], DatasetInfo]:
    """Read model.json, and check the file of tensors. Raises UserError."""
    where, again = str(folder / ABOUT), "run `trainkit export` again"
    if not os.path.lexists(folder / ABOUT):
        raise UserError(where, "does not exist", remedy="give a folder written by `trainkit export`")
    said = read_json(folder / ABOUT, JSON_BYTES, "a model written by `trainkit export`")
    try:
        text, digest, outputs = said["recipe"], said["sha256"][TENSORS], said.get("outputs", {})
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(where, f"cannot be read: {error!r}"[:300], remedy=again) from None
    if not isinstance(text, str) or not isinstance(outputs, dict):
        raise UserError(where, "its recipe is not text, or its outputs have no names", remedy=again)
    meta = meta_of(said.get("meta"), where, again)
    file = folder / TENSORS
    if file.is_file() and sha256(file) != digest:
        found = "SHA-256 differs from that in model.json"
        raise UserError(str(file), found, remedy="run `trainkit export` again")
    recipe = loader.parse(Recipe, text, where, ("train.precision=no",), TABLES, stored=True)
    exporter = _exporter(recipe)
    if exporter is None:
        raise UserError(where, "its recipe cannot be exported", remedy="run `trainkit export` again")
    return recipe, exporter, said, meta


def _exporter(recipe: Recipe) -> Exporter | None:
    """Select the exporter by the kind of data, or for data of a plug-in by the task; None if there is none."""
    kind = kinds.of(recipe.data)
    for row in (kind,) if kind else (kinds.KINDS["scenes"], kinds.KINDS["volumes"]):
        choose = kinds.function(row, "export")
        if choose is not None and (found := choose(recipe)) is not None:
            return found
    return None
