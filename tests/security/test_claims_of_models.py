"""A stranger's model whose recipe asks for more than its weights hold is refused before that is built."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from pathlib import Path

import pytest
import timm  # 3 s, which are no reading of a model
import torch
from monai.networks.nets.dynunet import DynUNet  # noqa: F401
from safetensors.torch import save_file

from tests.security.test_decompression_bombs import MEMORY, measured
from trainkit.checkpoint import safe_load
from trainkit.checkpoint.build_limit import no_larger_than
from trainkit.errors import UserError
from trainkit.export import export
from trainkit.export.files import TENSORS
from trainkit.inference.predictor import Predictor
from trainkit.tracking.logged_model import ABOUT

SECONDS = 4.0
"""Of processor time in a fork of the tests; each takes less than one of a small process."""
META = {"classes": 10, "shape": [3, 64, 64], "digest": "0" * 64}
VOLUME = {"shape": [1, 64, 64, 64], "axes": "zyx", "spacing": [1, 1, 1]}
VIT, CONVNEXT, SWIN = "vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224"


def recipe(net: str, task: str = "classify", data: str = "images", more: str = "") -> str:
    return (
        f"name: r\ntask: {{name: {task}, net: {{{net}}}}}\ndata: {{name: {data}, train: nowhere{more}}}\n"
        "optim: {lr: 0.1}\ntrain: {length: 1 epoch, batch_size: 4}\n"
    )


def face(net: str) -> str:
    return recipe(net, "embed", "faces")


def volume(net: str) -> str:
    return recipe(net, "segment3d", "volumes", ", patch: [64, 64, 64]")


CLAIMS: dict[str, tuple[str, dict[str, object]]] = {
    "100,000 layers": (recipe(f"model: {VIT}, args: {{depth: 100000}}"), {}),
    "400,000 blocks": (recipe(f"model: {CONVNEXT}, args: {{depths: [100000, 100000, 100000, 100000]}}"), {}),
    "a width of 30,000": (recipe(f"model: {VIT}, args: {{embed_dim: 30000, num_heads: 1}}"), {}),
    "layers of 100,000 channels": (recipe(f"model: {CONVNEXT}, args: {{dims: [40, 80, 160, 100000]}}"), {}),
    "an MLP of a million times": (recipe(f"model: {VIT}, args: {{mlp_ratio: 1000000}}"), {}),
    "a billion more tokens": (recipe(f"model: {VIT}, args: {{reg_tokens: 1000000000}}"), {}),
    "a window of 300": (recipe(f"model: {SWIN}, args: {{window_size: 300}}"), {}),
    "one of timm's largest networks": (recipe("model: eva_giant_patch14_224"), {}),
    "a billion classes": (recipe(f"model: {CONVNEXT}"), {"classes": 10**9}),
    "10^30 classes": (recipe(f"model: {CONVNEXT}"), {"classes": 10**30}),
    "images of 60,000 x 60,000": (recipe(f"model: {VIT}"), {"shape": [3, 60_000, 60_000]}),
    "a billion class centres": (face("name: iresnet18"), {"classes": 10**9}),
    "faces of 4,096 x 4,096": (face("name: iresnet18"), {"shape": [3, 4096, 4096]}),
    "faces of a billion channels": (face("name: iresnet18"), {"shape": [10**9, 112, 112]}),
    "iresnet100 of four times the width": (face("name: iresnet100, width: 4"), {"shape": [3, 112, 112]}),
    "a U-Net of 4,096 channels": (volume("name: unet, filters: [4096, 4096], res_units: 16"), VOLUME),
    "numbers that a network does not take": (recipe(f"model: {VIT}, args: {{num_heads: 0}}"), {}),
    "images of no size": (recipe(f"model: {VIT}"), {"shape": []}),
}
NO_MODELS = [
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


def test_a_recipe_that_asks_for_more_than_the_file_holds_is_refused_before_it_is_built(tmp_path):
    for name, (text, meta) in CLAIMS.items():
        end, memory, seconds = measured(Predictor.from_folder, model(tmp_path, recipe=text, meta=META | meta))
        print(f"{name}: {end[:100]}; {memory >> 20} MB, {seconds:.2f} s")
        # 10^30 is no size at all, which the network says.
        assert end.startswith("refused: ") and ("w.safetensors: " in end or "task.net: " in end), (name, end)
        assert memory < MEMORY and seconds < SECONDS, (name, memory, seconds)


@pytest.mark.parametrize(
    "name", ["tf_efficientnet_lite0", "mobilenetv3_small_100", "resnet18", "swin_tiny_patch4_window7_224"]
)
@pytest.mark.parametrize("side", [160, 384])
def test_a_network_is_built_with_its_own_weights_whatever_its_builder_computes(name, side):
    """Of these `timm` builders run an example; a depthwise convolution of EfficientNet was taken for a map of 33 M."""
    args = {"img_size": side} if name.startswith("swin") else {}
    built = timm.create_model(name, num_classes=10, **args)
    with no_larger_than(built.state_dict(), "w"), torch.no_grad():
        again = timm.create_model(name, num_classes=10, **args).eval()
        assert again(torch.zeros(1, 3, side, side)).shape == (1, 10)


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
        {"recipe": recipe(f"model: {VIT}, args: {{depth: 100000}}")},
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


def test_parts_that_a_builder_drops_do_not_count_against_a_network(tmp_path):
    held = {"weight": torch.zeros(100, 100)}
    with no_larger_than(held, "w"):
        for _ in range(3):
            torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(100)))
        assert torch.arange(4096, 8192).numel() == 4096
        torch.full((10,), 10**9), torch.randint(0, 10**9, (3,)), torch.zeros(5).repeat(2, 3)
    for made in (
        lambda: torch.zeros(10**6, 10**6), lambda: torch.empty((10**12,)), lambda: torch.eye(10**6),
        lambda: torch.arange(10**12), lambda: torch.zeros(10**5, 1) - torch.zeros(1, 10**5),
        lambda: torch.zeros(10).repeat(10**9), lambda: torch.zeros(1).new_zeros(10**6, 10**6),
        lambda: [torch.nn.Linear(4096, 4096) for _ in range(2)], lambda: torch.nn.Linear(10**6, 10**6),
        lambda: torch.nn.ModuleList(torch.nn.Identity() for _ in range(10_000)),
        lambda: [torch.nn.BatchNorm1d(1) for _ in range(1000)],
    ):  # fmt: skip
        with pytest.raises(UserError, match="holds 1 tensors of 10,000 elements"), no_larger_than(held, "w"):
            made()
    torch.nn.Linear(4096, 8192)  # no longer limited


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
