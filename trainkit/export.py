"""A trained network of pictures for use elsewhere: safetensors and ONNX, each proved against the run that made it.

What is written maps RGB pixels 0 .. 255, float32 (B, 3, H, W), to logits (B, classes, H, W): normalisation, rounding up
of sides and, where there is one, the refinement of points are inside. Nothing is kept that does not find on real
pictures of the run's evaluation what the trained network finds there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit import __version__, config, weights
from trainkit.errors import UserError, number_of
from trainkit.latency import Forward, Latency, session, time_network
from trainkit.needs import best_weights
from trainkit.predicting import check_free, meta_of, read_meta
from trainkit.recipe import TABLES, Recipe
from trainkit.store import RunFolder, Store, write_aside
from trainkit.task import Meta

Format = Literal["safetensors", "onnx"]
FORMATS: tuple[Format, ...] = ("safetensors", "onnx")
ABOUT = "model.json"

LEAST_SAME = 0.999
"""Share of the pixels that must get the same class. All of them do, but for ties: rounding differs by machine."""
CLOSE = 1e-3
"""How far logits may differ, as a share of the largest; 1e-5 is usual. Where points are refined, this share of the
pixels may differ by more: which points are least sure may turn on rounding."""


@dataclass(frozen=True)
class Agreement:
    """How near a file comes to the trained network on real pictures."""

    pictures: int
    largest: float
    """Largest difference of logits."""
    range: float
    """Largest logit, either way."""
    same: float
    """Share of the pixels that get the same class."""
    apart: float
    """Share of the pixels with a logit that is further off than `CLOSE`."""

    def __str__(self) -> str:
        compared = number_of(self.pictures, "pictures")
        return (
            f"{compared}, logits at most {self.largest:.2g} apart (they reach {self.range:.3g}), "
            f"{100 * self.same:.6g} % of the pixels of the same class"
        )


@dataclass(frozen=True)
class Exported:
    """What was written."""

    written: tuple[Path, ...]
    agreements: dict[str, Agreement]
    """By file name."""
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
    it, in float32 on the CPU. With `latency` the ways of running it are timed for about `seconds`. `say` is told what
    comes next where that takes long.

    Raises UserError before any work where the run does not segment pictures, a file is there already, or a package is
    missing; and where a file disagrees, which is then not left.
    """
    store = Store.locate()
    folder = store.find(run)
    meta = read_meta(folder)
    # The run's precision may be one that this machine does not have.
    recipe = config.load(folder.recipe, ("train.precision=no",), plugins)
    if not hasattr(recipe.task, "deployable"):
        raise UserError(f"run {folder.name}", "is not of pictures with a class for every pixel", "a run of segment2d")
    if pictures < 1:
        raise UserError("--pictures", str(pictures), "1 or more")
    names = [f"model.{format}" for format in FORMATS if format in formats]
    check_free(out, [out / name for name in (*names, ABOUT)])
    if "onnx" in formats:
        _require("onnx", "onnxscript", "onnxruntime")

    file = best_weights(folder.path)
    task, net = recipe.task, recipe.task.build(meta, {}, recipe.seed).learns
    weights.load_into(net, weights.read_tensors(file), str(file))
    net.eval()
    deployed = task.deployable(net, recipe.data.mean, recipe.data.std)
    split = _split(recipe)
    chosen = _Chosen(split, pictures)
    _check_scored(task, net, deployed, split, chosen, str(file))

    out.mkdir(parents=True, exist_ok=True)
    about = _about(folder, recipe, meta, split, chosen, file, task, net)
    agreements, notes = {}, list(chosen.notes)
    refined = getattr(net, "point_head", None) is not None
    kept: list[str] = []
    with _aside(out, kept) as aside:
        if "safetensors" in formats:
            _write_tensors(aside / "model.safetensors", net, folder.name)
            again = _rebuilt(recipe, meta, aside / "model.safetensors")
            agreements["model.safetensors"] = _agree("model.safetensors", again, deployed, chosen, refined)
        if "onnx" in formats:
            say("writing model.onnx")
            agreements["model.onnx"], about["sides"], said = _onnx(
                aside / "model.onnx", deployed, chosen, refined, about
            )
            notes += said
        about["notes"] = notes
        about["checked"] = {name: asdict(one) for name, one in agreements.items()}
        about["sha256"] = {name: _sha256(aside / name) for name in names}
        timed = None
        if latency:
            onnx = aside / "model.onnx" if "onnx" in formats else None
            last = recipe.device.channels_last
            timed = time_network(deployed, chosen.first(), onnx, seconds=seconds, last=last, say=say)
            about["latency"] = asdict(timed)
        write_aside(aside / ABOUT, json.dumps(about, indent=1) + "\n")
        kept += [*names, ABOUT]
    return Exported(tuple(out / name for name in kept), agreements, tuple(notes), timed)


def load(folder: Path | str) -> nn.Module:
    """The network of an exported folder, from its model.safetensors and model.json: pixels to logits, in eval mode.

    Raises UserError where either is missing, damaged, or not what model.json says.
    """
    folder = Path(folder)
    where = str(folder / ABOUT)
    try:
        said = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        text, held, digest = said["recipe"], said["meta"], said["sha256"]["model.safetensors"]
    except FileNotFoundError:
        raise UserError(where, "is missing", "what `trainkit export` wrote") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(where, f"cannot be read: {error}", "what `trainkit export` wrote") from None
    file = folder / "model.safetensors"
    if file.is_file() and _sha256(file) != digest:
        raise UserError(str(file), "is not the file that model.json was written for", remedy="export it again")
    recipe = config.parse(Recipe, text, where, ("train.precision=no",), TABLES)
    return _rebuilt(recipe, meta_of(held), file)


# ---- What is compared ------------------------------------------------------------------------------------------------


class _Chosen:
    """Some pictures of a split, spread over it, as pixels: read when they are asked for, since they may be large."""

    def __init__(self, split: Any, most: int):
        self._split = split
        self.rows = np.unique(np.linspace(0, split.size - 1, min(most, split.size)).round().astype(np.int64))
        self.notes: tuple[str, ...] = ()
        factor = self._factor(0)
        if factor != 1:
            self.notes = (
                f"the run scores pictures {factor:.3g} times as large as they are packed: bring them to that size "
                "before the network sees them",
            )

    def _factor(self, at: int) -> float:
        return float(self._split.base[self._split.scenes.rows[self.rows[at]]])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Tensor]:
        """Float pixels 0 .. 255, (1, 3, H, W)."""
        for at in range(len(self)):
            yield self.get(at)

    def get(self, at: int) -> Tensor:
        """Those of one, at the size at which the run sees it."""
        pixels = self._split.fetch(self.rows[at : at + 1], 0)["image"].float()
        factor = self._factor(at)
        if factor == 1:
            return pixels
        size = [max(1, round(side * factor)) for side in pixels.shape[2:]]
        return F.interpolate(pixels, size, mode="bilinear", align_corners=False)

    def first(self) -> Tensor:
        """Those of the first."""
        return self.get(0)


def _split(recipe: Any) -> Any:
    """The pictures that the run is scored on first."""
    opened = recipe.data.open(recipe.seed)
    for name, evaluation in recipe.evaluations.items():
        if (word := evaluation.split or name) in opened.evaluations:
            # Its plain kind: the same pictures, whole and once.
            return opened.evaluations.get(word.partition(".")[0], opened.evaluations[word])
    raise UserError("evaluations", "the run has none, so there are no pictures to compare with", "one or more")


@torch.no_grad()
def _agree(name: str, found: Forward, trained: Forward, pictures: Any, refined: bool) -> Agreement:
    """Compare on all `pictures`. Raises UserError where what is found is not the same."""
    largest, high, same, apart, pixels = 0.0, 0.0, 0, 0, 0
    for seen in pictures:
        expected, got = trained(seen), found(seen)
        if got.shape != expected.shape:
            raise UserError(name, f"logits of {tuple(got.shape)} for pixels of {tuple(seen.shape)}", "not kept")
        off = (got - expected).abs().amax(1)
        largest, high = max(largest, off.max().item()), max(high, expected.abs().max().item())
        same += int((got.argmax(1) == expected.argmax(1)).sum())
        # NaN is apart.
        apart += int((~(off <= CLOSE * max(1.0, expected.abs().max().item()))).sum())
        pixels += off.numel()
    agreement = Agreement(len(pictures), largest, high, same / pixels, apart / pixels)
    if agreement.same < LEAST_SAME or agreement.apart > (1 - LEAST_SAME if refined else 0):
        raise UserError(name, f"does not find what the trained network finds: {agreement}", "nothing was kept")
    return agreement


@torch.no_grad()
def _check_scored(task: Any, net: nn.Module, deployed: Forward, split: Any, pictures: _Chosen, where: str) -> None:
    """Refuse a network whose normalisation or sizes are not those with which the run was scored."""
    for seen in pictures:
        normal = split.on_device({"image": seen / 255})["image"]
        scored = task.probabilities(net, normal)
        same = (deployed(seen).argmax(1) == scored.argmax(1)).float().mean().item()
        off = (deployed(seen).softmax(1) - scored).abs().amax(1)
        if same < LEAST_SAME or not (off > CLOSE).float().mean() <= 1 - LEAST_SAME:
            found = f"on whole pixels it finds something else than when it was scored: {100 * same:.4g} % the same"
            raise UserError(where, found, "nothing was written")


# ---- What is written -------------------------------------------------------------------------------------------------


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        found = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise UserError("--format onnx", found, remedy='pip install "trainkit[export]"')


@contextlib.contextmanager
def _aside(out: Path, kept: list[str]) -> Iterator[Path]:
    """A folder beside what is to be written; `kept`, filled within, goes to `out`, and only if all went well.

    What exports that were killed have left there is removed: `.export-HOST-PID`, of this host and of a process that is
    gone.
    """
    mine = f".export-{socket.gethostname()}-"
    for left in out.glob(f"{mine}*"):
        number = left.name.removeprefix(mine)
        if number.isdecimal() and (int(number) == os.getpid() or not psutil.pid_exists(int(number))):
            shutil.rmtree(left, ignore_errors=True)
    aside = out / f"{mine}{os.getpid()}"
    aside.mkdir()
    try:
        yield aside
        check_free(out, [out / name for name in kept])
        for name in kept:
            os.replace(aside / name, out / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _about(
    folder: RunFolder, recipe: Any, meta: Meta, split: Any, pictures: _Chosen, file: Path, task: Any, net: nn.Module
) -> dict[str, Any]:
    """What a program that reads the files must know, and where they come from."""
    return {
        "input": "pixels: RGB 0 .. 255, float32 (B, 3, H, W)",
        "output": "logits: float32 (B, classes, H, W); the largest is the class",
        "names": list(meta.class_names or map(str, range(meta.classes))),
        "colours": [list(colour) for colour in split.protocol.colours],
        "mean": list(recipe.data.mean),
        "std": list(recipe.data.std),
        "normalised": "inside: (pixels / 255 - mean) / std",
        "size": list(pictures.first().shape[2:]),
        "multiple": net.multiple,
        "run": folder.name,
        "run_id": folder.info().run_id,
        "weights": str(file.relative_to(folder.path)),
        "data": {"digest": meta.digest, "checked_on": split.name, "pictures": [int(row) for row in pictures.rows]},
        "made_with": {"trainkit": __version__, "torch": torch.__version__},
        "meta": asdict(meta),
        "recipe": config.dump(recipe),
    }


def _write_tensors(file: Path, net: nn.Module, run: str) -> None:
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in net.state_dict().items()}
    # Not save_file, whose files only their owner may read.
    file.write_bytes(save(tensors, {"format": "pt", "run": run}))


def _rebuilt(recipe: Any, meta: Meta, file: Path) -> nn.Module:
    net = recipe.task.build(meta, {}, recipe.seed).learns
    weights.load_into(net, weights.read_tensors(file), str(file))
    return recipe.task.deployable(net.eval(), recipe.data.mean, recipe.data.std)


def _onnx(
    file: Path, deployed: nn.Module, pictures: _Chosen, refined: bool, about: dict[str, Any]
) -> tuple[Agreement, str, list[str]]:
    """Write and check; with any sides where that can be, else with those of the first picture.

    Gives how near it comes, what sides it takes, and sentences.
    """
    first, reason = pictures.first(), "the number of points is fixed"
    height, width = first.shape[2:]
    try:
        # Where points are refined, their number and the doublings are constants of the file.
        if not refined:
            _write_onnx(file, deployed, first, about, any_sides=True)
            _agree(file.name, session(file), deployed, _other_sides(first), refined)
            return _agree(file.name, session(file), deployed, pictures, refined), "any", []
    except Exception as error:
        # Whatever the exporter or the runtime stumbles over: torch.onnx has no exception of its own for all of it.
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    same = [at for at in range(len(pictures)) if pictures.get(at).shape == first.shape]
    _write_onnx(file, deployed, first, about, any_sides=False)
    _agree(file.name, session(file), deployed, [torch.cat([first, first.flip(3)])], refined)
    agreement = _agree(file.name, session(file), deployed, [pictures.get(at) for at in same], refined)
    note = f"model.onnx takes pictures of {height} x {width} pixels alone, for {reason}"
    return agreement, f"{height} x {width}", [note]


def _other_sides(first: Tensor) -> list[Tensor]:
    """A picture cut, turned, enlarged, and twice at once."""
    height, width = first.shape[2:]
    cut = first[:, :, : max(1, height - 7), : max(1, width - 13)]
    larger = F.interpolate(first, scale_factor=1.37, mode="bilinear", align_corners=False)
    return [cut, first.transpose(2, 3), larger, torch.cat([first, first.flip(3)])]


def _write_onnx(file: Path, deployed: nn.Module, pixels: Tensor, about: dict[str, Any], any_sides: bool) -> None:
    file.unlink(missing_ok=True)
    if any_sides and all(side % about["multiple"] == 0 for side in pixels.shape[2:]):
        # What is exported is the way that was taken, and only other sides are resized.
        pixels = pixels[:, :, :-1, :-1]
    free = {0: torch.export.Dim.DYNAMIC} | (dict.fromkeys((2, 3), torch.export.Dim.DYNAMIC) if any_sides else {})
    # A batch of 1 would be taken for a constant.
    example = torch.cat([pixels, pixels.flip(3)])
    with warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            deployed,
            (example,),
            dynamo=True,
            dynamic_shapes=(free,),
            input_names=["pixels"],
            output_names=["logits"],
            verbose=False,
        )
    program.model.metadata_props.update(
        run=about["run"], names=json.dumps(about["names"]), input=about["input"], output=about["output"]
    )
    program.save(str(file), external_data=False)


@contextlib.contextmanager
def _quiet(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
