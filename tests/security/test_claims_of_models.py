"""Descriptions of models that somebody wrote by hand are refused with a sentence; tables of contents are bounded."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.security.test_decompression_bombs import MEMORY, measured
from trainkit.checkpoint import safe_load
from trainkit.errors import UserError
from trainkit.export import export
from trainkit.export.files import TENSORS
from trainkit.inference.predictor import Predictor
from trainkit.tracking.logged_model import ABOUT

META = {"classes": 10, "shape": [3, 64, 64], "digest": "0" * 64}
VIT, CONVNEXT = "vit_tiny_patch16_224", "convnext_atto"


def recipe(net: str, task: str = "classify", data: str = "images") -> str:
    return (
        f"name: r\ntask: {{name: {task}, net: {{{net}}}}}\ndata: {{name: {data}, train: nowhere}}\n"
        "optim: {lr: 0.1}\ntrain: {length: 1 epoch, batch_size: 4}\n"
    )


def face(net: str) -> str:
    return recipe(net, "embed", "faces")


NO_MODELS = [
    {"recipe": recipe(f"model: {VIT}, args: {{num_heads: 0}}")},
    {"recipe": recipe(f"model: {VIT}"), "meta": META | {"shape": []}},
    {"recipe": ["x"]}, {"recipe": None}, {"recipe": 5}, {"recipe": {}}, {"recipe": ""}, {"recipe": "a: " * 9999},
    {"weights": ["x"]}, {"weights": None}, {"weights": "../w.safetensors"}, {"meta": None}, {"meta": []},
    {"meta": {}}, {"meta": META | {"classes": "many"}}, {"meta": META | {"classes": -1}}, {"format": [1]},
    {"meta": META | {"shape": ["a"]}}, {"meta": META | {"shape": [3, -64, 64]}}, {"meta": META | {"class_names": [1]}},
    {"format": 0, "made_with": []}, {"meta": META | {"class_colours": [[1, 2]]}},
]  # fmt: skip


def model(folder: Path, **changes: object) -> Path:
    save_file({"net.head.fc.weight": torch.zeros(10, 40)}, folder / "w.safetensors")
    about = {"format": 1, "recipe": recipe(f"model: {CONVNEXT}"), "weights": "w.safetensors", "meta": META}
    (folder / ABOUT).write_text(json.dumps(about | changes))
    return folder


def test_a_description_of_other_types_is_a_user_error(tmp_path):
    for changes in NO_MODELS:
        with pytest.raises(UserError):
            Predictor.from_folder(model(tmp_path, **changes))
    for text in ("", "[]", "3", "[" * 100_000, '{"format": ' * 5000, "\xff"):
        (tmp_path / ABOUT).write_bytes(text.encode("latin-1"))
        with pytest.raises(UserError):
            Predictor.from_folder(tmp_path)


def test_a_folder_of_somebody_elses_export_is_a_user_error(tmp_path):
    save_file({"a": torch.zeros(4)}, tmp_path / TENSORS)
    meta = META | {"classes": 10**9, "shape": [3, 112, 112]}
    digest = {TENSORS: hashlib.sha256((tmp_path / TENSORS).read_bytes()).hexdigest()}
    about = {"recipe": face("name: mobilefacenet"), "sha256": digest, "meta": meta, "outputs": {"embedding": ""}}
    for changes in (
        {}, {"recipe": ["x"]}, {"recipe": None}, {"sha256": []}, {"sha256": {TENSORS: 5}}, {"meta": 5}, {"outputs": []},
        {"meta": {"classes": []}}, {"outputs": {"evil": 1}}, {"outputs": "x"},
    ):  # fmt: skip
        (tmp_path / "model.json").write_text(json.dumps(about | changes))
        for read in (export.load, export.trained):
            with pytest.raises(UserError) as caught:
                read(tmp_path)
            assert changes or "does not fit" in caught.value.found, "class centres are no part of an export"
    for text in ("[]", "5", '"x"', "[" * 100_000, ""):
        (tmp_path / "model.json").write_text(text)
        with pytest.raises(UserError):
            export.load(tmp_path)


def test_tables_of_contents_are_bounded(tmp_path):
    file = tmp_path / "w.safetensors"
    entry = '"%05d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    table = ("{" + ",".join(entry % n for n in range(safe_load.MAX_TENSORS + 1)) + "}").encode()
    file.write_bytes(struct.pack("<Q", len(table)) + table)
    with pytest.raises(UserError, match="20,001 tensors; expected at most 20,000"):
        safe_load.read_tensors(file)
    table = b"{" + b" " * safe_load.MAX_PICKLE_BYTES + b"}"
    file.write_bytes(struct.pack("<Q", len(table)) + table)
    with pytest.raises(UserError, match="table of contents too large"):
        safe_load.read_tensors(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02](" + b"]" * 20_000_000 + b"e.")
    end, memory, seconds = measured(safe_load.read_tensors, file)
    assert "table of contents too large" in end and memory < MEMORY, (end, memory, seconds)
