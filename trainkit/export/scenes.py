"""A trained network that gives every pixel a class, as files for use elsewhere, each proved against the run.

What is written maps RGB pixels 0 .. 255, float32 (B, 3, H, W), to logits (B, classes, H, W): normalisation, rounding up
of sides and, where there is one, the refinement of points are inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit import __version__
from trainkit.checkpoint import safe_load
from trainkit.config import loader
from trainkit.errors import UserError, number_of
from trainkit.export import files, model_card
from trainkit.export.export import Exported
from trainkit.export.files import ABOUT, CARD, ONNX, TENSORS, Format
from trainkit.export.latency import Forward, session, time_network
from trainkit.files import write_aside
from trainkit.interfaces import Meta
from trainkit.tracking.run_folder import RunFolder
from trainkit.training.best import best_weights

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
            f"{compared}, logits within {self.largest:.2g} (they reach {self.range:.3g}), "
            f"{100 * self.same:.6g} % of the pixels of the same class"
        )


def export(
    folder: RunFolder,
    recipe: Any,
    meta: Meta,
    out: Path,
    formats: Sequence[Format],
    *,
    pictures: int,
    latency: bool,
    seconds: float,
    say: Callable[[str], None],
) -> Exported:
    """Write the network of the best weights of a run to the folder `out`; see `export.export`, which has checked it."""
    if "hub-folder" in formats:
        found = f"the network of run {folder.name} gives every pixel a class, which those of timm do not"
        raise UserError("--to hub-folder", found, "a run of classify", "--to safetensors --to onnx")
    file = best_weights(folder.path)
    task, net = recipe.task, recipe.task.build(meta, {}, recipe.seed).learns
    safe_load.load_into(net, safe_load.read_tensors(file), str(file))
    net.eval()
    deployed = task.deployable(net, recipe.data.mean, recipe.data.std)
    split = files.scored_split(recipe)
    chosen = _Chosen(split, pictures)
    _check_scored(task, net, deployed, split, chosen, str(file))

    out.mkdir(parents=True, exist_ok=True)
    about = _about(folder, recipe, meta, split, chosen, file, task, net)
    agreements, notes = {}, list(chosen.notes)
    refined = getattr(net, "point_head", None) is not None
    names, kept = files.names_of(formats), []
    with files.aside(out, kept) as aside:
        if TENSORS in names:
            files.write_tensors(aside / TENSORS, net, folder.name)
            again = _rebuilt(recipe, meta, aside / TENSORS)
            agreements[TENSORS] = _agree(TENSORS, again, deployed, chosen, refined)
        if ONNX in names:
            say("writing model.onnx")
            agreements[ONNX], about["sides"], said = _onnx(aside / ONNX, deployed, chosen, refined, about)
            notes += said
        timed = None
        if latency:
            onnx, last = aside / ONNX if ONNX in names else None, recipe.device.channels_last
            timed = time_network(deployed, chosen.first(), onnx, seconds=seconds, last=last, say=say)
        files.say_of(aside, names, about, agreements, notes, timed)
        write_aside(aside / CARD, model_card.card(folder, recipe, file, about, agreements, timed))
        kept += [*names, ABOUT, CARD]
    return Exported(tuple(out / name for name in kept), agreements, tuple(notes), timed)


def rebuilt(recipe: Any, meta: Meta, said: Any, file: Path) -> nn.Module:
    """The network of an exported folder: pixels to logits."""
    return _rebuilt(recipe, meta, file)


# ---- What is compared ------------------------------------------------------------------------------------------------


class _Chosen:
    """Some pictures of a split, spread over it, as pixels: read when they are asked for, since they may be large."""

    def __init__(self, split: Any, most: int):
        self._split = split
        self.rows = files.spread(split.size, most)
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
        "network": files.network(task, net),
        "run": folder.name,
        "run_id": folder.info().run_id,
        "weights": str(file.relative_to(folder.path)),
        "data": {"digest": meta.digest, "checked_on": split.name, "pictures": [int(row) for row in pictures.rows]},
        "made_with": {"trainkit": __version__, "torch": torch.__version__},
        "meta": asdict(meta),
        "recipe": loader.dump(recipe),
    }


def _rebuilt(recipe: Any, meta: Meta, file: Path) -> nn.Module:
    net = recipe.task.build(meta, {}, recipe.seed).learns
    safe_load.load_into(net, safe_load.read_tensors(file), str(file))
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
        reason = files.first_line(error)
    same = [at for at in range(len(pictures)) if pictures.get(at).shape == first.shape]
    try:
        _write_onnx(file, deployed, first, about, any_sides=False)
        _agree(file.name, session(file), deployed, [torch.cat([first, first.flip(3)])], refined)
        agreement = _agree(file.name, session(file), deployed, [pictures.get(at) for at in same], refined)
    except UserError:
        raise
    except Exception as error:
        found = f"cannot be made of this network: {files.first_line(error)}"
        raise UserError(file.name, found, "operations that ONNX has", "--to safetensors does without") from error
    note = f"model.onnx takes pictures of {height} x {width} pixels alone, for {reason}"
    return agreement, f"{height} x {width}", [note]


def _other_sides(first: Tensor) -> list[Tensor]:
    """A picture cut, turned, enlarged, and twice at once."""
    height, width = first.shape[2:]
    cut = first[:, :, : max(1, height - 7), : max(1, width - 13)]
    larger = F.interpolate(first, scale_factor=1.37, mode="bilinear", align_corners=False)
    return [cut, first.transpose(2, 3), larger, torch.cat([first, first.flip(3)])]


def _write_onnx(file: Path, deployed: nn.Module, pixels: Tensor, about: dict[str, Any], any_sides: bool) -> None:
    if any_sides and all(side % about["multiple"] == 0 for side in pixels.shape[2:]):
        # What is exported is the way that was taken, and only other sides are resized.
        pixels = pixels[:, :, :-1, :-1]
    free = dict.fromkeys((0, 2, 3) if any_sides else (0,), torch.export.Dim.DYNAMIC)
    # A batch of 1 would be taken for a constant.
    example = torch.cat([pixels, pixels.flip(3)])
    files.write_onnx(file, deployed, example, free, ["logits"], about)
