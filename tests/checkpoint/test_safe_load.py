"""Reading tensors: real files load, files that are programs never run, damaged and foreign ones end in a sentence."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import subprocess
import zipfile
from collections import OrderedDict

import pytest
import torch
from torch import nn

from trainkit.checkpoint.safe_load import load_into, read_centres, read_tensors, write_tensors
from trainkit.errors import UserError
from trainkit.models.face_backbones import build
from trainkit.models.network_specs import IResNetSpec, MobileFaceNetSpec


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), fc=nn.Linear(5, 6)))


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype, name


# Files that load


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_what_torch_saved_is_read(tmp_path, legacy):
    path = tmp_path / "net.pth"
    state = net().state_dict()
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    assert_same(read_tensors(path), state)


def test_safetensors_are_read_whatever_the_file_is_called(tmp_path):
    state = net().state_dict()
    for name in ("net.safetensors", "net.bin"):
        write_tensors(tmp_path / name, state, {"recipe": "x"})
        assert_same(read_tensors(tmp_path / name), state)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3, "lr": 0.1},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {"state_dict_backbone": {f"module.{k}": v for k, v in state.items()}, "global_step": 7},
        lambda state: {f"module.{k}": v for k, v in state.items()},
        lambda state: {f"_orig_mod.{k}": v for k, v in state.items()},
        lambda state: {f"model.net.{k}": v for k, v in state.items()},
        lambda state: {f"module._orig_mod.{k}": v for k, v in state.items()},
        lambda state: {k.replace(".", "._orig_mod."): v for k, v in state.items()},
        lambda state: {k: nn.Parameter(v) if v.is_floating_point() else v for k, v in state.items()},
    ],
)
def test_wrappers_and_prefixes_are_taken_off(tmp_path, wrap):
    state = net().state_dict()
    torch.save(wrap(state), tmp_path / "net.pth")
    got = read_tensors(tmp_path / "net.pth")
    assert_same(got, state)
    assert not any(t.requires_grad or isinstance(t, nn.Parameter) for t in got.values())


def test_a_name_called_module_stays_unless_all_begin_with_it(tmp_path):
    torch.save({"module.w": torch.ones(1), "b": torch.zeros(1)}, tmp_path / "net.pth")
    assert set(read_tensors(tmp_path / "net.pth")) == {"module.w", "b"}


def test_every_dtype_and_view_survives(tmp_path):
    base = torch.arange(24.0)
    state = {
        str(d): torch.ones(2, dtype=d) for d in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool)
    }
    state |= {
        "view": base[6:12],
        "transposed": base.view(4, 6).T,
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }
    torch.save(state, tmp_path / "a.pth")
    assert_same(read_tensors(tmp_path / "a.pth"), state)
    write_tensors(tmp_path / "b.safetensors", state)
    assert_same(read_tensors(tmp_path / "b.safetensors"), state)


def test_shared_tensors_are_written_each_in_full(tmp_path):
    tied = torch.randn(3, 3, requires_grad=True)
    write_tensors(tmp_path / "a.safetensors", {"a": tied, "b": tied, "row": tied[1], "column": tied[:, 1]})
    got = read_tensors(tmp_path / "a.safetensors")
    assert (
        torch.equal(got["a"], got["b"]) and torch.equal(got["row"], tied[1]) and torch.equal(got["column"], tied[:, 1])
    )


@pytest.mark.parametrize("spec", [IResNetSpec(name="iresnet18", embedding=8, width=0.125),
                                  MobileFaceNetSpec(name="mobilefacenet", embedding=8, width=0.125)])  # fmt: skip
def test_a_face_network_gives_the_same_embeddings_after_its_file(tmp_path, spec):
    torch.manual_seed(1)
    one, other, x = build(spec, (3, 16, 16)), build(spec, (3, 16, 16)), torch.randn(4, 3, 16, 16)
    one(x)  # moves the running statistics
    torch.save({f"module.{k}": v for k, v in one.state_dict().items()}, tmp_path / "net.pth")
    load_into(other, read_tensors(tmp_path / "net.pth"), "net.pth")
    assert torch.equal(one.eval()(x), other.eval()(x))


# Files that are programs


class Bomb:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def payloads(sentinel: str) -> dict[str, tuple[object, str]]:
    """What is pickled, and how it must be named in the refusal."""
    touch = f"touch {sentinel}"
    source = f"open({sentinel!r}, 'w').close()"
    return {
        "os.system": (Bomb(os.system, touch), "posix.system"),
        "eval": (Bomb(eval, source), "builtin"),
        "exec": (Bomb(exec, source), "builtin"),
        "getattr": (Bomb(getattr, "x", "upper"), "builtin"),
        "open": (Bomb(open, sentinel, "w"), "open"),
        "subprocess": (Bomb(subprocess.check_call, ["touch", sentinel]), "check_call"),
        "popen": (Bomb(subprocess.Popen, ["touch", sentinel]), "Popen"),
        "mkdir": (Bomb(os.mkdir, sentinel), "posix.mkdir"),
        "import": (Bomb(__import__, "os"), "__import__"),
        "torch.load": (Bomb(torch.load, sentinel), "torch.serialization.load"),
        "torch.save": (Bomb(torch.save, 1, sentinel), "torch.serialization.save"),
        "nested in a list": ({"w": torch.ones(1), "list": [1, (2, Bomb(os.system, touch))]}, "posix.system"),
        "as a key": ({Bomb(os.system, touch): torch.ones(1)}, "posix.system"),
        "in a state_dict": (
            {"state_dict": OrderedDict(w=torch.ones(1)), "hook": Bomb(os.system, touch)},
            "posix.system",
        ),
        "a whole module": (nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    }


@pytest.mark.parametrize("how", ["torch", "torch legacy", "pickle 0", "pickle 2", "pickle 4", "torch protocol 4"])
def test_files_that_call_for_code_are_refused_and_never_run(tmp_path, how):
    sentinel = tmp_path / "sentinel"
    for number, (title, (payload, named)) in enumerate(payloads(str(sentinel)).items()):
        path = tmp_path / f"bomb{('.pth', '.safetensors')[number % 2]}"
        if how == "torch":
            torch.save(payload, path)
        elif how == "torch legacy":
            torch.save(payload, path, _use_new_zipfile_serialization=False)
        elif how == "torch protocol 4":
            torch.save(payload, path, pickle_protocol=4)
        else:
            path.write_bytes(pickle.dumps(payload, protocol=int(how[-1])))
        said = "to load, and was not opened" if how.startswith("torch") else "neither a safetensors nor a PyTorch file"
        with pytest.raises(UserError, match=said) as refused:
            read_tensors(path)
        if how in ("torch", "torch legacy"):
            assert named in str(refused.value), title
        assert str(path) in str(refused.value)
        assert not sentinel.exists(), title


def by_hand(pickled: bytes, extra: dict[str, bytes] | None = None, **options) -> bytes:
    """A PyTorch zip archive around a pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", **options) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/data/0", b"\0" * 64)
        for name, value in (extra or {}).items():
            archive.writestr(name, value)
    return content.getvalue()


def test_code_in_the_key_of_a_storage_is_refused(tmp_path):
    sentinel = tmp_path / "sentinel"
    call = b"cposix\nsystem\n(Vtouch " + str(sentinel).encode() + b"\ntR"
    key = b"\x80\x02}(X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n"
    key += b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    rest = b"X\x03\x00\x00\x00cpuK\x10tQK\x00K\x04\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRu."
    path = tmp_path / "bomb.pth"
    path.write_bytes(by_hand(key + call + rest))
    with pytest.raises(UserError, match=r"needs posix.system to load"):
        read_tensors(path)
    path.write_bytes(by_hand(key + b"X\x01\x00\x00\x000" + rest))  # the same archive with a harmless key is fine
    assert torch.equal(read_tensors(path)["w"], torch.zeros(4))
    assert not sentinel.exists()


@pytest.mark.parametrize(
    ("instructions", "named"),
    [
        (b"(Vtouch x\niposix\nsystem\n.", "posix.system"),
        (b"(cposix\nsystem\nVtouch x\no.", "posix.system"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)\x81.", "NEWOBJ"),
        (b"\x80\x02ccollections\nOrderedDict.__class__\n)R.", "OrderedDict.__class__"),
        (b"\x80\x02ctorch\nload\n)R.", "torch.load"),
        (b"\x80\x02P0\n.", "PERSID"),
    ],
)
def test_rare_instructions_are_refused(tmp_path, instructions, named):
    (tmp_path / "x.pth").write_bytes(by_hand(instructions))
    with pytest.raises(UserError, match=r"needs .* to load") as refused:
        read_tensors(tmp_path / "x.pth")
    assert named in str(refused.value)


def test_archives_that_two_readers_could_read_differently_are_refused(tmp_path):
    table = b"\x80\x02}."
    path = tmp_path / "x.pth"
    for content in (
        by_hand(table, {"other/data.pkl": table}),
        by_hand(table, {"other/file": b""}),
        by_hand(table, {"../outside": b""}),
        by_hand(table, compression=zipfile.ZIP_DEFLATED),
        by_hand(table, {"archive/constants.pkl": table, "archive/code/x.py": b""}),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError):
            read_tensors(path)
    with pytest.warns(UserWarning, match="Duplicate"):
        path.write_bytes(by_hand(table, {"archive/data/0": b"other"}))
    with pytest.raises(UserError, match="PyTorch did not write"):
        read_tensors(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.pth"]


def test_a_small_file_cannot_claim_a_huge_tensor(tmp_path):
    torch.save({"w": torch.zeros(1).expand(2**40)}, tmp_path / "x.pth")
    with pytest.raises(UserError, match="not stored in full"):
        read_tensors(tmp_path / "x.pth")
    torch.save({f"w{i}": torch.zeros(200).expand(5, 200) for i in range(50)}, tmp_path / "x.pth")
    with pytest.raises(UserError, match="not stored in full"):
        read_tensors(tmp_path / "x.pth")


# Damaged and foreign files


@pytest.fixture(params=["zip", "legacy", "safetensors"])
def whole(request, tmp_path) -> bytes:
    if request.param == "safetensors":
        write_tensors(tmp_path / "x", net().state_dict())
    else:
        torch.save(net().state_dict(), tmp_path / "x", _use_new_zipfile_serialization=request.param == "zip")
    return (tmp_path / "x").read_bytes()


def test_truncated_files_end_in_a_sentence(tmp_path, whole):
    path = tmp_path / "cut.pth"
    for share in (0, 1, 8, 15, 16, 40, *range(100, len(whole), len(whole) // 25), len(whole) - 1):
        path.write_bytes(whole[:share])
        with pytest.raises(UserError, match=r"cut\.pth"):
            read_tensors(path)


def test_random_damage_ends_in_a_sentence_or_in_tensors(tmp_path, whole):
    path, dice, refused = tmp_path / "hurt.pth", random.Random(0), 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        path.write_bytes(content)
        try:
            assert all(isinstance(t, torch.Tensor) for t in read_tensors(path).values())
        except UserError:
            refused += 1
    assert refused > 20


def test_a_flipped_bit_of_a_torch_archive_is_noticed(tmp_path):
    torch.save({"w": torch.arange(1000.0)}, tmp_path / "x.pth")
    content = bytearray((tmp_path / "x.pth").read_bytes())
    content[content.index(struct.pack("<f", 700.0))] ^= 1
    (tmp_path / "x.pth").write_bytes(content)
    with pytest.raises(UserError, match="checksum"):
        read_tensors(tmp_path / "x.pth")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "an empty dictionary"),
        ([torch.ones(1)], "a list"),
        (torch.ones(3), "a Tensor"),
        ({"w": torch.ones(1), "epoch": 3}, "not tensors: epoch"),
        ({3: torch.ones(1)}, "not tensors: 3"),
        ({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)}, "two tensors named 'a'"),
    ],
)
def test_what_is_no_dictionary_of_tensors_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(UserError, match=message):
        read_tensors(tmp_path / "x.pth")


def test_no_file_a_folder_and_a_giant_are_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_tensors(tmp_path / "x.pth")
    with pytest.raises(UserError, match="is a folder"):
        read_tensors(tmp_path)
    with (tmp_path / "x.pth").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match="at most"):
        read_tensors(tmp_path / "x.pth")
    (tmp_path / "x.pth").write_bytes(b"\xff\xd8\xff picture")
    with pytest.raises(UserError, match="neither a safetensors nor a PyTorch file"):
        read_tensors(tmp_path / "x.pth")


def test_misfits_are_listed_up_to_ten_and_nothing_is_copied():
    target, before = net(), net().state_dict()
    tensors = {k: v + 1 if v.is_floating_point() else v for k, v in net().state_dict().items()}
    del tensors["conv.bias"]
    tensors["fc.weight"] = torch.zeros(7, 5)
    tensors["bn.weight"] = torch.zeros(4, dtype=torch.int64)
    tensors |= {f"head.{i}": torch.zeros(1) for i in range(15)}
    with pytest.raises(UserError) as error:
        load_into(target, tensors, "teacher.pth")
    text = str(error.value)
    assert text.startswith("teacher.pth: does not fit Sequential")
    assert "1 missing: conv.bias" in text and "15 unexpected: head.0" in text and "and 5 more" in text
    assert (
        "fc.weight (7, 5) float instead of (6, 5) float" in text
        and "bn.weight (4,) integer instead of (4,) float" in text
    )
    assert "head.9" in text and "head.10" not in text
    assert_same(target.state_dict(), before)


def test_ignored_names_may_be_missing_left_over_or_of_another_shape():
    target, source = net(), {k: v + 1 for k, v in net().state_dict().items()}
    del source["conv.bias"]
    source["head.w"], source["fc.weight"] = torch.zeros(1), torch.zeros(2)
    load_into(target, source, "x", ignore=("conv.*", "head.*", "fc.weight"))
    assert torch.equal(target.bn.weight, net().bn.weight + 1)
    assert torch.equal(target.conv.weight, net().conv.weight) and torch.equal(target.fc.weight, net().fc.weight)


def test_half_precision_is_widened_and_a_missing_batch_counter_forgiven():
    target, source = net(), {k: v.half() if v.is_floating_point() else v for k, v in net().state_dict().items()}
    del source["bn.num_batches_tracked"]
    load_into(target, source, "x")
    assert target.fc.weight.dtype == torch.float32
    assert torch.equal(target.fc.weight, net().fc.weight.half().float())


def test_values_that_are_not_finite_are_refused():
    source = net().state_dict()
    source["fc.bias"][2] = float("nan")
    with pytest.raises(UserError, match=r"not finite in fc\.bias"):
        load_into(net(), source, "x")


def test_centres_of_both_families_are_read_the_same_way_round(tmp_path):
    table = torch.randn(5, 3)
    torch.save({"kernel": nn.Parameter(table.T)}, tmp_path / "adadistill.pth")
    torch.save({"weight": table.half()}, tmp_path / "insightface.pth")
    write_tensors(tmp_path / "own.safetensors", {"weight": table})
    assert torch.equal(read_centres(tmp_path / "adadistill.pth", 5, 3), table)
    assert torch.equal(read_centres(tmp_path / "own.safetensors", 5, 3), table)
    halved = read_centres(tmp_path / "insightface.pth", 5, 3)
    assert halved.dtype == torch.float32 and torch.equal(halved, table.half().float())
    with pytest.raises(UserError, match="for 6 classes and embeddings of 3"):
        read_centres(tmp_path / "adadistill.pth", 6, 3)
    with pytest.raises(UserError, match="for 3 classes and embeddings of 5"):
        read_centres(tmp_path / "insightface.pth", 3, 5)
    torch.save({"kernel": table.T, "weight": table}, tmp_path / "both.pth")
    with pytest.raises(UserError, match="one table"):
        read_centres(tmp_path / "both.pth", 5, 3)


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write_tensors(tmp_path / "absent" / "x.safetensors", {"w": torch.ones(1)})
