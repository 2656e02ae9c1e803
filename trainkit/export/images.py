"""Networks that say one thing of a picture, its class or its embedding, as files for use elsewhere.

What is written maps RGB pixels 0 .. 255, float32 (B, 3, H, W) of the size that was trained on, to logits, embeddings or
both: normalisation is inside, and so is the mirror image where the task looks at it. A network of timm keeps timm's
names, and with its `config.json` is a folder that `timm.create_model("local-dir:OUT", pretrained=True)` loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainkit import __version__
from trainkit.checkpoint import safe_load
from trainkit.config import loader
from trainkit.data.images import preprocess
from trainkit.data.images.preprocess import Preparation
from trainkit.errors import UserError, number_of
from trainkit.export import files, model_card
from trainkit.export.export import Exported
from trainkit.export.files import ABOUT, CARD, CONFIG, ONNX, TENSORS, Format
from trainkit.export.latency import Latency, time_network
from trainkit.files import write_aside
from trainkit.interfaces import MODALITIES, RGB, Meta
from trainkit.models.reid import ReidNet
from trainkit.models.timm_classifier import Classifier
from trainkit.tasks.embed import WithHead
from trainkit.tracking.run_folder import RunFolder
from trainkit.training.best import best_weights

CLOSE = 1e-3
"""How far a number may be off, as a share of the largest; 1e-5 is usual."""
LEAST_COSINE = 0.9999
"""Between an embedding and the trained network's."""

Outputs = dict[str, Tensor]
Found = Callable[[Tensor], Outputs]


@dataclass(frozen=True)
class Agreement:
    """How near a file comes to the trained network on real pictures."""

    pictures: int
    apart: dict[str, float]
    """Of each output the largest difference, as a share of its largest value."""
    same: float | None
    """Share of the pictures that get the same class; None without classes."""
    cosine: float | None
    """Least cosine of an embedding and the trained network's; None without embeddings."""
    of: str = "pictures"
    """What was compared."""

    def __str__(self) -> str:
        parts = [f"{name} within {value:.2g} of its largest value" for name, value in self.apart.items()]
        parts += [] if self.same is None else [f"{100 * self.same:.6g} % of the same class"]
        parts += [] if self.cosine is None else [f"cosine of embeddings at least {self.cosine:.7g}"]
        return f"{number_of(self.pictures, self.of)}, {', '.join(parts)}"


class Deployed(nn.Module):
    """Pixels to what a task says of a picture, with all that stands between."""

    def __init__(self, task: Any, net: nn.Module, prepared: Preparation, outputs: Sequence[str]):
        super().__init__()
        self.task, self.net, self.outputs = task, net, tuple(outputs)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(prepared, name), dtype=torch.float32).view(1, 3, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """RGB (B, 3, H, W), 0 .. 255, to `outputs`, float32: logits (B, classes), embedding (B, D)."""
        rows = self._rows((pixels / 255 - self.mean) / self.std)
        return tuple(rows[name].float() for name in self.outputs)

    def _rows(self, image: Tensor) -> Mapping[str, Tensor]:
        if isinstance(self.net, Classifier):  # without its switching of gradients, which no export needs
            features = self.net.net.forward_features(image)
            embedding = self.net.net.forward_head(features, pre_logits=True).flatten(1)
            return {"logits": self.net.net.forward_head(features), "embedding": embedding}
        if not isinstance(self.net, ReidNet):
            return self.task.predict(self.net, {"image": image})
        # A record that is alone is its own fusion.
        none = image[:0]
        images = {name: image if name == MODALITIES[RGB] else none for name in self.net.pictures}
        return {"embedding": self.net.neck(self.net.encode(images, None))}


class _First(nn.Module):
    """The first output alone, to be timed."""

    def __init__(self, deployed: nn.Module):
        super().__init__()
        self.deployed = deployed

    def forward(self, pixels: Tensor) -> Tensor:
        return self.deployed(pixels)[0]


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
    prepared = preprocess.of(recipe.data)
    file = best_weights(folder.path)
    task, net = recipe.task, recipe.task.build(meta, {}, recipe.seed).learns
    safe_load.load_into(net, safe_load.read_tensors(file), str(file))
    net.eval()
    if "hub-folder" in formats and not isinstance(net, Classifier):
        found = f"the network of run {folder.name} is {_named(net)}, which timm cannot make"
        raise UserError("--to hub-folder", found, "a run of classify", "--to safetensors --to onnx")
    split = files.scored_split(recipe)
    pixels, expected, rows = _real(task, net, split, pictures)
    outputs = [name for name in ("logits", "embedding") if name in expected]
    if latency and "logits" not in outputs:
        raise UserError("--latency", "a network that gives embeddings alone", "one that gives classes", "leave it out")
    deployed = Deployed(task, net, prepared, outputs).eval()

    out.mkdir(parents=True, exist_ok=True)
    about = _about(folder, recipe, meta, prepared, split, rows, file, expected)
    about["network"] = files.network(task, _taken(task, net))
    agreements, notes = {}, []
    names, kept = files.names_of(formats), []
    with files.aside(out, kept) as aside:
        if TENSORS in names:
            files.write_tensors(aside / TENSORS, _taken(task, net), folder.name)
            again = _rebuilt(recipe, meta, aside / TENSORS, outputs)
            agreements[TENSORS] = agree(TENSORS, by_name(again), pixels, expected)
        if CONFIG in names:
            write_aside(aside / CONFIG, json.dumps(timm_config(recipe, meta, prepared, net), indent=1) + "\n")
            agreements[CONFIG] = agree(CONFIG, _by_timm(aside, prepared), pixels, {"logits": expected["logits"]})
        if ONNX in names:
            say("writing model.onnx")
            agreements[ONNX], about["batch"], said = onnx_of(aside / ONNX, deployed, pixels, expected, about)
            notes += said
        timed: Latency | None = None
        if latency:
            onnx, last = aside / ONNX if ONNX in names else None, recipe.device.channels_last
            timed = time_network(_First(deployed), pixels[:1], onnx, seconds=seconds, last=last, say=say)
        files.say_of(aside, names, about, agreements, notes, timed)
        write_aside(aside / CARD, model_card.card(folder, recipe, file, about, agreements, timed))
        kept += [*names, ABOUT, CARD]
    return Exported(tuple(out / name for name in kept), agreements, tuple(notes), timed)


def rebuilt(recipe: Any, meta: Meta, said: Mapping[str, Any], file: Path) -> nn.Module:
    """The network of an exported folder, whose model.json is `said`: pixels to its `outputs`, in their order."""
    return _rebuilt(recipe, meta, file, list(said["outputs"]))


def timm_config(recipe: Any, meta: Meta, prepared: Preparation, net: Classifier) -> dict[str, Any]:
    """What timm must know to make the network again, and to prepare pictures for it, as config.json says it.

    Dropped features and blocks are of the training alone and left out.
    """
    import timm

    spec = recipe.task.net
    architecture = spec.model.partition(".")[0]
    own = net.net.pretrained_cfg
    known = timm.get_pretrained_cfg(architecture, allow_unregistered=False)
    fixed = known is not None and bool(known.fixed_input_size)
    sized = {"img_size": list(prepared.side)} if fixed else {}
    size = [meta.shape[0], *prepared.side]
    names = list(meta.class_names)
    return {
        "architecture": architecture,
        "num_classes": meta.classes,
        "num_features": net.net.num_features,
        **({"label_names": names} if names else {}),
        "model_args": {**spec.args, **sized},
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": size,
            "fixed_input_size": fixed,
            "interpolation": "bicubic",
            "crop_pct": prepared.crop_pct,
            "crop_mode": prepared.crop_mode,
            "mean": list(prepared.mean),
            "std": list(prepared.std),
            "num_classes": meta.classes,
            "pool_size": None,
            "first_conv": own.get("first_conv"),
            "classifier": own.get("classifier"),
        },
    }


def _named(net: nn.Module) -> str:
    inner = net.net if isinstance(net, WithHead | Classifier) else net
    return type(inner).__name__


def _taken(task: Any, net: nn.Module) -> nn.Module:
    """What is taken away: of a classifier timm's own network, of embeddings alone not the centres of the training."""
    if isinstance(net, Classifier) or (isinstance(net, WithHead) and not task.classify):
        return net.net
    return net


def _rebuilt(recipe: Any, meta: Meta, file: Path, outputs: Sequence[str]) -> Deployed:
    net = recipe.task.build(meta, {}, recipe.seed).learns
    safe_load.load_into(_taken(recipe.task, net), safe_load.read_tensors(file), str(file))
    return Deployed(recipe.task, net, preprocess.of(recipe.data), outputs).eval()


@torch.no_grad()
def _real(task: Any, net: nn.Module, split: Any, most: int) -> tuple[Tensor, Outputs, np.ndarray]:
    """Pictures that the run is scored on, as pixels (n, 3, H, W) 0 .. 255, what it finds there, and their rows.

    They take the way of an evaluation: what is prepared otherwise elsewhere shows.
    """
    if not isinstance(net, ReidNet):
        rows = files.spread(split.size, most)
        batch = split.fetch(rows, 0)
        return batch["image"].float(), task.predict(net, split.on_device(batch)), rows
    rows = np.flatnonzero(split.modality == RGB)
    rows = rows[files.spread(len(rows), most)]
    batch = split.fetch(rows, 0)
    feature = task.predict(net, split.on_device(batch))["feature"].float()
    places = feature.new_zeros(len(feature), len(MODALITIES), feature.shape[1])
    places[:, RGB] = feature
    present = torch.zeros(places.shape[:2], dtype=torch.bool)
    present[:, RGB] = True
    return batch[f"image.{MODALITIES[RGB]}"].float(), {"embedding": net.neck(net.fuse(places, present))}, rows


def by_name(deployed: Any) -> Found:
    """What a network with `outputs` gives, by their names."""
    return lambda pixels: dict(zip(deployed.outputs, deployed(pixels), strict=True))


def _by_timm(folder: Path, prepared: Preparation) -> Found:
    """The folder as timm alone loads it, over pixels that are normalised as its config.json says."""
    import timm

    try:
        net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as error:
        found = f"timm {timm.__version__} cannot load it: {files.first_line(error)}"
        raise UserError("--to hub-folder", found, remedy="--to safetensors --to onnx") from error
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (prepared.mean, prepared.std))
    return lambda pixels: {"logits": net((pixels / 255 - mean) / std)}


def _session(file: Path, outputs: Sequence[str], takes: str) -> Found:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    opened = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def found(pixels: Tensor) -> Outputs:
        arrays = opened.run(list(outputs), {takes: pixels.numpy()})
        return {name: torch.from_numpy(array) for name, array in zip(outputs, arrays, strict=True)}

    return found


@torch.no_grad()
def agree(
    name: str,
    found: Found,
    pixels: Tensor,
    expected: Mapping[str, Tensor],
    one_by_one: bool = False,
    of: str = "pictures",
) -> Agreement:
    """Compare what is found of pictures, the first alone and then the others, with what the trained network found.

    Raises UserError where it is not the same.
    """
    cuts = range(1, len(pixels)) if one_by_one else [1]
    parts = [found(some) for some in torch.tensor_split(pixels, list(cuts)) if len(some)]
    apart, same, cosine = {}, None, None
    for key in parts[0]:
        got, true = torch.cat([part[key] for part in parts]).float(), expected[key].float()
        if got.shape != true.shape:
            raise UserError(name, f"{key} of shape {tuple(got.shape)}", f"{tuple(true.shape)}; nothing was kept")
        apart[key] = ((got - true).abs().max() / true.abs().max().clamp_min(1e-12)).item()
        if key == "logits":
            same = (got.argmax(1) == true.argmax(1)).float().mean().item()
        else:
            cosine = nn.functional.cosine_similarity(got.double(), true.double()).min().item()
    agreement = Agreement(len(pixels), apart, same, cosine, of)
    # NaN is no agreement. Of two classes that are level within `CLOSE` either may lead.
    if not all(value <= CLOSE for value in apart.values()) or not (cosine is None or cosine >= LEAST_COSINE):
        raise UserError(name, f"does not find what the trained network finds: {agreement}", "nothing was kept")
    return agreement


def onnx_of(
    file: Path, deployed: Deployed, pixels: Tensor, expected: Mapping[str, Tensor], about: Mapping[str, Any]
) -> tuple[Agreement, str, list[str]]:
    """Write and check: for batches of any size where that can be, else for one picture at a time.

    Gives how near it comes, what batches it takes, and sentences. Raises UserError where it cannot be at all.
    """
    wanted = {name: expected[name] for name in deployed.outputs}
    takes, of = about.get("takes", "pixels"), about.get("of", "pictures")
    # A batch of 1 would be taken for a constant.
    example = torch.cat([pixels, pixels.flip(3)])[:2]
    try:
        files.write_onnx(file, deployed, example, {0: torch.export.Dim.DYNAMIC}, deployed.outputs, about)
        return agree(file.name, _session(file, deployed.outputs, takes), pixels, wanted, of=of), "any", []
    except Exception as error:
        reason = files.first_line(error)
    try:
        files.write_onnx(file, deployed, pixels[:1], {}, deployed.outputs, about)
        agreement = agree(file.name, _session(file, deployed.outputs, takes), pixels, wanted, True, of)
    except UserError:
        raise
    except Exception as error:
        found = f"cannot be made of {_named(deployed.net)}: {files.first_line(error)}"
        raise UserError(file.name, found, "operations that ONNX has", "--to safetensors does without") from error
    return agreement, "1", [f"model.onnx takes one of the {of} at a time, for {reason}"]


def _about(
    folder: RunFolder,
    recipe: Any,
    meta: Meta,
    prepared: Preparation,
    split: Any,
    rows: np.ndarray,
    file: Path,
    expected: Mapping[str, Tensor],
) -> dict[str, Any]:
    """What a program that reads the files must know, and where they come from."""
    height, width = prepared.side
    words = {
        "logits": f"float32 (B, {meta.classes}); their softmax is the probability of each class",
        "embedding": "float32 (B, {}), not normalised; compare by cosine",
    }
    outputs = {
        name: words[name].format(expected[name].shape[1]) for name in ("logits", "embedding") if name in expected
    }
    return {
        "input": f"pixels: RGB 0 .. 255, float32 (B, 3, {height}, {width})",
        "output": "; ".join(f"{name}: {text}" for name, text in outputs.items()),
        "outputs": outputs,
        "names": list(meta.class_names or map(str, range(meta.classes))) if "logits" in outputs else [],
        "mean": list(prepared.mean),
        "std": list(prepared.std),
        "normalised": "inside: (pixels / 255 - mean) / std",
        "size": [height, width],
        "fit": prepared.words,
        "crop_pct": prepared.crop_pct,
        "crop_mode": prepared.crop_mode,
        "run": folder.name,
        "run_id": folder.info().run_id,
        "weights": str(file.relative_to(folder.path)),
        "data": {"digest": meta.digest, "checked_on": split.name, "pictures": [int(row) for row in rows]},
        "made_with": {"trainkit": __version__, "torch": torch.__version__},
        "meta": asdict(meta),
        "recipe": loader.dump(recipe),
    }
