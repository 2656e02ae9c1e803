"""Write the files of an export: a temporary folder, ONNX, tensors, hashes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from trainkit.config.schema import Recipe
from trainkit.config.validation import to_tree
from trainkit.errors import UserError
from trainkit.files import Json
from trainkit.inference.output_folder import check_free
from trainkit.interfaces import Split, Task

Format = Literal["safetensors", "onnx"]
FORMATS: tuple[Format, ...] = ("safetensors", "onnx")
"""Default formats."""
ABOUT, CARD = "model.json", "README.md"
TENSORS, ONNX = "model.safetensors", "model.onnx"

Outputs = dict[str, Tensor]
"""Outputs of a network, by name."""


def names_of(formats: Sequence[Format]) -> list[str]:
    """List the files of formats, in order."""
    return [name for word, name in (("safetensors", TENSORS), ("onnx", ONNX)) if word in formats]


def require(*packages: str) -> None:
    """Raise UserError if packages for ONNX are missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        found = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise UserError(
            "--to onnx", found, remedy='install them with pip install "trainkit[export]", or use --to safetensors'
        )


@contextlib.contextmanager
def aside(out: Path, kept: list[str]) -> Iterator[Path]:
    """Create a temporary folder; the files listed in `kept` move to `out` only if no error occurs.

    Folders of killed exports are removed: `.export-HOST-PID` of this host whose process no longer exists.
    """
    mine = f".export-{socket.gethostname()}-"
    for left in out.glob(f"{mine}*"):
        number = left.name.removeprefix(mine)
        if number.isdecimal() and (int(number) == os.getpid() or not psutil.pid_exists(int(number))):
            shutil.rmtree(left, ignore_errors=True)
    folder = out / f"{mine}{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
        check_free(out, [out / name for name in kept])
        for name in kept:
            os.replace(folder / name, out / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def scored_split(recipe: Recipe) -> Split:
    """Return the split of a run's first evaluation, in its plain form: each image whole and once."""
    opened = recipe.data.open(recipe.seed)
    for name, evaluation in recipe.evaluations.items():
        if (word := evaluation.split or name) in opened.evaluations:
            return opened.evaluations.get(word.partition(".")[0], opened.evaluations[word])
    found = "none, so there are no images for the comparison"
    raise UserError("evaluations", found, "one or more", "name a run with an evaluation")


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of `count` indices, evenly spread, int64."""
    return np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(np.int64))


def network(task: Task, net: nn.Module) -> str:
    """Describe a network: `resnet18, 11,181,642 parameters`."""
    block = to_tree(task)
    spec = block.get("net") or block.get("student")
    name = spec.get("model") or spec.get("name") if isinstance(spec, dict) else None
    name = name or type(net).__name__
    return f"{name}, {sum(p.numel() for p in net.parameters()):,} parameters"


def write_tensors(file: Path, net: nn.Module, run: str) -> None:
    """Write the tensors of a network by its own names."""
    from safetensors.torch import save

    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in net.state_dict().items()}
    # Not save_file, whose files are readable only by their owner.
    file.write_bytes(save(tensors, {"format": "pt", "run": run}))


def write_onnx(
    file: Path,
    net: nn.Module,
    example: Tensor,
    free: Sequence[int],
    outputs: Sequence[str],
    about: Mapping[str, Json],
) -> None:
    """Write a network that takes `pixels`, or the input named in `about`; dimensions `free` are dynamic."""
    file.unlink(missing_ok=True)
    with warnings.catch_warnings(), _quiet("torch.onnx", "onnxscript", "onnx_ir"):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            net,
            (example,),
            dynamo=True,
            dynamic_shapes=(dict.fromkeys(free, torch.export.Dim.DYNAMIC),),
            input_names=[about.get("takes", "pixels")],
            output_names=list(outputs),
            verbose=False,
        )
    if program is None:
        raise RuntimeError("torch.onnx returned no program")
    program.model.metadata_props.update(
        run=about["run"], names=json.dumps(about["names"]), input=about["input"], output=about["output"]
    )
    program.save(str(file), external_data=False)


def session(file: Path | str) -> Callable[[Tensor], Outputs]:
    """Open an ONNX file as a function of tensors, run by ONNX Runtime with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    opened = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    takes, names = opened.get_inputs()[0].name, [one.name for one in opened.get_outputs()]

    def run(pixels: Tensor) -> Outputs:
        arrays = opened.run(names, {takes: pixels.cpu().numpy()})
        return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}

    return run


def first_line(error: BaseException) -> str:
    """Return the first line of the first cause: exporters and runtimes have no common exception."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


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
