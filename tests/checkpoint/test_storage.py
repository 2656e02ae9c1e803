"""Checkpoints: whatever dies, fills up or rots, there is one that is whole, and no other is ever used."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from trainkit import files
from trainkit.checkpoint import state_dict, storage, verification
from trainkit.checkpoint.verification import CheckpointError
from trainkit.errors import UserError
from trainkit.tracking import store

ROOT = Path(__file__).parents[2]


def contents(step: int) -> dict[str, dict[str, Tensor]]:
    """Tensors of every kind that a training holds, different for each step."""
    g = torch.Generator().manual_seed(step)
    model = {
        "weight": torch.randn(7, 5, generator=g),
        "half": torch.randn(6, generator=g).half(),
        "brain": torch.randn(6, generator=g).bfloat16(),
        "double": torch.randn(2, generator=g).double(),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "counter": torch.tensor(step),
        "flag": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
    }
    return {"model": model, "memory": {}, "optimizer": {"weight/exp_avg": torch.randn(7, 5, generator=g)}}


def save(folder: Path, step: int, seed: int | None = None) -> Path:
    return storage.write(
        folder,
        step,
        contents(step if seed is None else seed),
        {"epoch": 2, "best": {"val/accuracy": 0.1 + 0.2}},
        "a: 1\n",
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return safetensors.torch.save({"x": a.detach().contiguous()}) == safetensors.torch.save(
        {"x": b.detach().contiguous()}
    )


def same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[group].keys() == b[group].keys() and all(same_bits(a[group][k], b[group][k]) for k in a[group]) for group in a
    )


# --------------------------------------------------------------------------------------------------- round trips


def test_every_kind_of_tensor_and_number_comes_back_bit_for_bit(tmp_path):
    state = {
        "step": 12, "cursor": 2**53 + 1, "third": 1 / 3, "tiny": 5e-324, "none": None, "best": float("-inf"),
        "nested": {"z": [1, 2.5, {"ü": "größer"}], "a": True},
    }  # fmt: skip
    path = storage.write(tmp_path / "run", 12, contents(3), state, "name: ü\n")
    loaded = storage.read(path)
    assert path.name == "step-000000012" and loaded.step == 12 and loaded.recipe_text == "name: ü\n"
    assert same(loaded.tensors, contents(3))
    assert loaded.state == state and list(loaded.state["nested"]) == ["z", "a"]
    assert verification.verify(path) == []
    manifest = json.loads((path / "MANIFEST.json").read_text())
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert sorted(manifest["files"]) == [
        "memory.safetensors", "model.safetensors", "optimizer.safetensors", "recipe.yaml", "state.json",
    ]  # fmt: skip


def test_views_and_tied_tensors_are_saved_whole(tmp_path):
    table = torch.arange(12.0).reshape(3, 4)
    tensors = {"model": {"a": table, "tied": table, "turned": table.t(), "slice": table[:, 1]}}
    loaded = storage.read(storage.write(tmp_path, 1, tensors, {}, "")).tensors["model"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors["model"].items())


@pytest.mark.parametrize(("cut", "joined"), [(8 << 20, 1 << 20), (64, 16), (7, 3), (16, 0)])
def test_a_file_in_pieces_is_what_the_library_would_write(tmp_path, monkeypatch, cut, joined):
    """Pieces are cut and joined on their way to the disk; the library reads what it writes itself, bit for bit."""
    monkeypatch.setattr(storage, "_CHUNK", cut)
    monkeypatch.setattr(storage, "_JOINED", joined)
    g = torch.Generator().manual_seed(0)
    tensors = {
        f"{str(kind).rpartition('.')[2]}.{size}": torch.randint(0, 256, (size, 3, kind.itemsize), generator=g)
        .to(torch.uint8).view(kind)
        for kind in storage._TYPES if kind != torch.bool for size in (0, 1, 5)
    }  # fmt: skip
    tensors |= {"flag ü": torch.tensor([True, False, True]), "number": torch.tensor(3), "odd": torch.ones(7).half()}
    path = storage.write(tmp_path, 1, {"model": tensors, "memory": {}}, {}, "")
    content = (path / "model.safetensors").read_bytes()
    library = safetensors.torch.load(safetensors.torch.save(tensors))
    again = safetensors.torch.load(content)
    assert again.keys() == library.keys() == tensors.keys() and len(again) == 48
    assert all(same_bits(again[name], library[name]) for name in tensors)
    assert safetensors.torch.load((path / "memory.safetensors").read_bytes()) == {}
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, entry in header.items():
        assert (8 + int.from_bytes(content[:8], "little") + entry["data_offsets"][0]) % tensors[name].itemsize == 0


def test_a_type_that_the_format_does_not_know_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"wide has type torch\.complex128, which safetensors does not support"):
        storage.write(tmp_path, 1, {"model": {"wide": torch.zeros(1, dtype=torch.complex128)}}, {}, "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [{1: "a"}, {"a": {2}}, {"a": torch.zeros(1)}, {"a": [b"x"]}, {"step": 8}])
def test_a_state_that_json_would_change_is_a_programming_error(tmp_path, value):
    with pytest.raises(ValueError, match=r"state"):
        storage.write(tmp_path / "run", 7, {}, value, "")
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------- faults while writing (K1, K2)

CHANGING = frozenset({"mkdir", "open", "fdopen", "write", "fsync", "close", "rename", "unlink", "rmdir"})


class Faulty:
    """Stands in for `os` inside the module: calls `fault(n, name, call)` in place of the n-th call that matters."""

    def __init__(self, fault: Callable[[int, str, Callable], object], calls: frozenset[str] = CHANGING):
        self.fault, self.calls, self.count = fault, calls, 0

    def __getattr__(self, name: str):
        real = getattr(os, name)
        if name not in self.calls:
            return real

        def call(*args, **kwargs):
            self.count += 1
            return self.fault(self.count, name, lambda *other: real(*(other or args), **kwargs), *args)

        return call


def step_two_and_prune(folder: Path) -> None:
    save(folder, 2)
    storage.prune(folder, keep_last=1)


def step_one_again(folder: Path) -> None:
    save(folder, 1, seed=2)


NAMES = ["next step", "same step", "same step after a replacement was cut short"]
SCENARIOS = [(step_two_and_prune, False), (step_one_again, False), (step_one_again, True)]
every_scenario = pytest.mark.parametrize(("scenario", "cut_short"), SCENARIOS, ids=NAMES)


@pytest.fixture
def scratch(tmp_path):
    """A folder in memory where there is one: hundreds of syncs to a disk take longer than all else in these tests."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def calls_of(scenario: Callable, folder: Path) -> int:
    """How many calls of the system that matter a scenario makes."""
    faulty = Faulty(lambda count, name, call, *args: call())
    with pytest.MonkeyPatch.context() as patch:
        for module in (storage, verification, store):
            patch.setattr(module, "os", faulty)
        scenario(folder)
    return faulty.count


def template(folder: Path, cut_short: bool) -> Path:
    """A run with a checkpoint of step 1, and perhaps the one that it replaced."""
    folder.mkdir(exist_ok=True)
    path = save(folder / "template", 1)
    if cut_short:
        shutil.copytree(path, path.with_name(path.name + ".old"))
    return folder / "template"


def one_of_the_two_is_whole(folder: Path) -> bool:
    path, _ = storage.newest_valid(folder)
    return path is not None and any(same(storage.read(path).tensors, contents(step)) for step in (1, 2))


# The slow two are repeated by the errors below: one that lasts leaves the disk as a kill does.
@pytest.mark.parametrize(
    ("scenario", "cut_short"),
    [pytest.param(*s, marks=[pytest.mark.slow] if i else [], id=NAMES[i]) for i, s in enumerate(SCENARIOS)],
)
def test_killed_at_any_system_call_a_whole_checkpoint_is_left_and_cleaned_up(scratch, scenario, cut_short):
    start, calls = template(scratch, cut_short), calls_of(scenario, template(scratch / "counted", cut_short))
    assert calls > 25, "the faults never reached the writer"
    for n in range(1, calls + 1):
        folder = scratch / str(n)
        shutil.copytree(start, folder)
        child = os.fork()
        if child == 0:

            def die(count: int, name: str, call: Callable, *args, n=n):
                if count < n:
                    return call()
                if name == "write":
                    call(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

            storage.os = verification.os = store.os = Faulty(die)
            try:
                scenario(folder)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert one_of_the_two_is_whole(folder), f"nothing whole is left after a kill at call {n}"
        removed = storage.clean(folder)
        assert one_of_the_two_is_whole(folder) and not any(map(os.path.exists, removed))
        left = [name for name in os.listdir(folder) if not re.fullmatch(r"step-\d{9}", name)]
        assert left == [], f"not cleaned up after a kill at call {n}"
        assert os.WIFSIGNALED(status), "the fault was never reached"
        if n % 7 == 0:  # and a later save goes through
            scenario(folder)
            assert one_of_the_two_is_whole(folder)


ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES, errno.EINTR, errno.EROFS]


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@every_scenario
def test_an_error_of_any_system_call_costs_no_older_checkpoint(scratch, monkeypatch, scenario, cut_short, lasting):
    start, calls = template(scratch, cut_short), calls_of(scenario, template(scratch / "counted", cut_short))
    raised = []
    for n in range(1, calls + 1):
        folder = scratch / str(n)
        shutil.copytree(start, folder)

        def fail(count: int, name: str, call: Callable, *args, n=n):
            if count == n or (lasting and count > n):
                if name == "close":
                    call()
                raise OSError(ERRORS[n % len(ERRORS)], os.strerror(ERRORS[n % len(ERRORS)]))
            return call()

        faulty = Faulty(fail)
        with monkeypatch.context() as patched:
            for module in (storage, verification, store):
                patched.setattr(module, "os", faulty)
            try:
                scenario(folder)
            except CheckpointError as error:
                raised.append(n)
                assert str(folder) in str(error)
        assert one_of_the_two_is_whole(folder), f"nothing whole is left after an error at call {n}"
        if not lasting:
            assert not [name for name in os.listdir(folder) if name.startswith(".tmp")], f"litter after call {n}"
            # A best checkpoint is looked for by its own name.
            assert all((folder / name[:14]).exists() for name in os.listdir(folder) if name.endswith(".old"))
        assert faulty.count >= n, "the fault was never reached"
    assert len(raised) > 25


def test_an_interrupt_from_the_keyboard_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def interrupt(count: int, name: str, call: Callable, *args):
        if count == 9:
            raise KeyboardInterrupt
        return call()

    monkeypatch.setattr(storage, "os", Faulty(interrupt))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-000000001"]


def test_a_system_that_takes_few_bytes_at_a_time_gets_them_all(tmp_path, monkeypatch):
    def short(count: int, name: str, call: Callable, *args):
        return call(args[0], args[1][: max(1, len(args[1]) // 3)]) if name == "write" else call()

    monkeypatch.setattr(storage, "os", Faulty(short, frozenset({"write"})))
    path = save(tmp_path, 5)
    assert same(storage.read(path).tensors, contents(5))


def test_a_disk_that_stores_other_bytes_is_found_out_at_once(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def rot(count: int, name: str, call: Callable, *args):
        data = bytearray(args[1])
        if len(data) > 100:
            data[-1] ^= 1
        return call(args[0], bytes(data))

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="differs when it is read back"):
        patched.setattr(storage, "os", Faulty(rot, frozenset({"write"})))
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-000000001"]


def test_everything_is_synced_before_it_is_named_and_the_name_after(tmp_path, monkeypatch):
    tmp_path.joinpath("run").mkdir()
    events: list[tuple[str, str]] = []
    paths: dict[int, str] = {}

    def record(count: int, name: str, call: Callable, *args):
        result = call()
        if name == "open":
            paths[result] = os.path.basename(args[0])
        subject = paths.get(args[0], "") if name in ("write", "fsync") else os.path.basename(args[name == "rename"])
        events.append((name, subject))
        return result

    faulty = Faulty(record, frozenset({"open", "write", "fsync", "rename", "mkdir"}))
    monkeypatch.setattr(storage, "os", faulty)
    monkeypatch.setattr(files, "os", faulty)
    save(tmp_path / "run", 3)
    renamed = events.index(("rename", "step-000000003"))
    written = {file for name, file in events if name == "write"}
    assert len(written) == 6
    for file in written:
        last_write = max(i for i, event in enumerate(events) if event == ("write", file))
        assert last_write < events.index(("fsync", file)) < renamed
    synced = [file for name, file in events[:renamed] if name == "fsync"]
    assert synced[-2] == "MANIFEST.json" and synced[-1].startswith(".tmp-3-")
    assert ("fsync", "run") in events[renamed:]


def test_where_the_run_was_deleted_nothing_is_made_again(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        storage.write(tmp_path / "deleted" / "checkpoints", 2, contents(1), {}, "")
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 4_400_000))
    big = {"model": {"weight": torch.zeros(1_000_000)}}
    with pytest.raises(CheckpointError, match=r"4\.4 MB free.* needs 4\.8 MB") as caught:
        storage.write(tmp_path, 2, big, {}, "")
    assert str(tmp_path) in str(caught.value) and os.listdir(tmp_path) == ["step-000000001"]
    assert storage.write(tmp_path, 2, {"model": {"weight": torch.zeros(900_000)}}, {}, "").exists()


def test_the_same_step_may_be_written_twice_and_the_later_wins(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 1, seed=9)
    assert os.listdir(tmp_path) == ["step-000000001"] and same(storage.read(path).tensors, contents(9))


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    (save(tmp_path, 1) / "state.json").write_text("{}")
    save(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step-000000001"] and verification.verify(tmp_path / "step-000000001") == []


# ------------------------------------------------------------------------------------------------ damage (C1 - C3)


def test_truncated_files_are_named_and_the_older_checkpoint_is_used(tmp_path):
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    rng = random.Random(0)
    for file in sorted(newer.iterdir()):
        whole = file.read_bytes()
        for length in {0, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(20))}:
            file.write_bytes(whole[:length])
            path, refused = storage.newest_valid(tmp_path)
            assert path == older and file.name in refused[0], f"{file.name} cut at {length}"
            with pytest.raises(CheckpointError, match=file.name):
                storage.read(newer)
        file.write_bytes(whole)
    assert storage.newest_valid(tmp_path) == (newer, [])


def undetected_flips(path: Path, flips: int) -> int:
    """Flip single bits, anywhere in a checkpoint, in memory; returns how many of them the verifier does not see."""
    rng = random.Random(1)
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    manifest = files.pop("MANIFEST.json")
    found = {name: (len(content), verification.sha256(content)) for name, content in files.items()}
    assert verification.differences(manifest, found) == []
    everything = {**files, "MANIFEST.json": manifest}
    names = rng.choices(list(everything), [len(content) for content in everything.values()], k=flips)
    undetected = 0
    for name in names:
        flipped = bytearray(everything[name])
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        if name == "MANIFEST.json":
            problems = verification.differences(bytes(flipped), found)
        else:
            problems = verification.differences(
                manifest, {**found, name: (len(flipped), verification.sha256(bytes(flipped)))}
            )
        undetected += not problems
    return undetected


def test_ten_thousand_flipped_bits_are_all_seen(tmp_path):
    assert undetected_flips(save(tmp_path, 1), 10_000) == 0


def test_every_single_bit_of_a_manifest_counts(tmp_path):
    path = save(tmp_path, 1)
    manifest = (path / "MANIFEST.json").read_bytes()
    found = {f.name: verification.fingerprint(f) for f in path.iterdir() if f.name != "MANIFEST.json"}
    for position in range(8 * len(manifest)):
        flipped = bytearray(manifest)
        flipped[position // 8] ^= 1 << position % 8
        assert verification.differences(bytes(flipped), found), f"bit {position}"


def swap(path: Path, name: str) -> None:
    other = path.with_name("step-000000001") / name
    (path / name).write_bytes(other.read_bytes())


def link(path: Path, name: str) -> None:
    shutil.move(path / name, path.parent / "elsewhere")
    (path / name).symlink_to(path.parent / "elsewhere")


def link_folder(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere", target_is_directory=True)


def edit_manifest(path: Path, **changes) -> None:
    manifest = json.loads((path / "MANIFEST.json").read_text()) | changes
    (path / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")


def list_files(path: Path, **files: bytes) -> None:
    """A manifest that agrees with what lies there, as somebody with intent would write it."""
    files = {"recipe.yaml": b"", "state.json": b'{"step": 2}', **{k.replace("__", "."): v for k, v in files.items()}}
    for file in path.iterdir():
        file.unlink()
    for name, content in files.items():
        (path / name).write_bytes(content)
    entries = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    (path / "MANIFEST.json").write_bytes(verification.encoded_manifest(entries))


DAMAGES = {
    "no manifest": (lambda p: (p / "MANIFEST.json").unlink(), "MANIFEST.json: missing"),
    "no model": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors: missing"),
    "no state": (lambda p: (p / "state.json").unlink(), "state.json: missing"),
    "an extra file": (lambda p: (p / "optimizer.bin").write_bytes(b"x"), "optimizer.bin: not in the manifest"),
    "an empty file": (lambda p: (p / "optimizer.safetensors").write_bytes(b""), "optimizer.safetensors: 0 bytes"),
    "an empty manifest": (lambda p: (p / "MANIFEST.json").write_bytes(b""), "MANIFEST.json: damaged"),
    "a manifest of brackets": (lambda p: (p / "MANIFEST.json").write_bytes(b"[" * 90_000), "MANIFEST.json: damaged"),
    "a vast manifest": (lambda p: (p / "MANIFEST.json").write_bytes(b" " * (2 << 20)), "larger than 1,048,576 bytes"),
    "a renamed file": (lambda p: (p / "model.safetensors").rename(p / "ema.safetensors"), "ema.safetensors: not in"),
    "a file of another step": (lambda p: swap(p, "model.safetensors"), "model.safetensors: content has changed"),
    "another step's files": (lambda p: [swap(p, f.name) for f in list(p.iterdir())], "state.json: of step 1"),
    "a link for a file": (lambda p: link(p, "model.safetensors"), "model.safetensors: not a plain file"),
    "a link for the manifest": (lambda p: link(p, "MANIFEST.json"), "MANIFEST.json: not a plain file"),
    "a link for the folder": (link_folder, "not a folder"),
    "a file for the folder": (lambda p: (shutil.rmtree(p), p.write_text("")), "not a folder"),
    "a folder inside": (lambda p: (p / "sub").mkdir(), "sub: not a plain file"),
    "a pipe inside": (lambda p: os.mkfifo(p / "pipe"), "pipe: not a plain file"),
    "a newer format": (lambda p: edit_manifest(p, format=2), "format 2 of a newer trainkit"),
    "an older format": (lambda p: edit_manifest(p, format=0), "format 0; this version of trainkit reads format 1"),
    "no format": (lambda p: edit_manifest(p, format="1"), "format '1'"),
    "more in the manifest": (lambda p: edit_manifest(p, note="x"), "MANIFEST.json: damaged"),
    "no list of files": (lambda p: edit_manifest(p, files=[]), "MANIFEST.json: damaged"),
    "a path out of the folder": (
        lambda p: edit_manifest(p, files={"../x": {"size": 1, "sha256": "0"}}),
        "an invalid file name",
    ),
    "no state in a good manifest": (lambda p: list_files(p, state__json=b"[]"), "state.json: no step in it"),
    "a state of brackets": (lambda p: list_files(p, state__json=b"[" * 90_000), "state.json: not JSON"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_folder_that_is_not_what_was_written_is_refused_with_the_reason(tmp_path, damage):
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    apply, reason = DAMAGES[damage]
    apply(newer)
    path, refused = storage.newest_valid(tmp_path)
    assert path == older and len(refused) == 1
    assert reason in refused[0] and str(newer) in refused[0]
    with pytest.raises(CheckpointError) as caught:
        storage.read(newer)
    assert reason in str(caught.value)
    assert "DAMAGED" in verification.describe(newer) if newer.is_dir() else True


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xff" * 8,
        (10**12).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        b"\x02" + b"\0" * 7 + b"{}xx",
    ],
)
def test_a_damaged_tensor_file_under_a_manifest_that_agrees_is_still_a_sentence(tmp_path, header):
    path = save(tmp_path, 2)
    list_files(path, model__safetensors=header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        storage.read(path)
    assert "step-000000002" in verification.describe(path)


def test_nothing_there_is_nothing_found(tmp_path):
    assert storage.newest_valid(tmp_path / "none") == (None, [])
    assert verification.verify(tmp_path / "none") == [f"{tmp_path / 'none'}: cannot be read: No such file or directory"]
    with pytest.raises(CheckpointError, match="No such file"):
        storage.read(tmp_path / "none")


# --------------------------------------------------------------------------------------------------- pickles (X1)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, sentinel: Path):
        self.sentinel = sentinel

    def __reduce__(self):
        return os.mkdir, (str(self.sentinel),)


def test_pickled_files_are_refused_and_never_opened_as_pickles(tmp_path):
    sentinel = tmp_path / "sentinel"
    payload = pickle.dumps(Bomb(sentinel))
    archive = tmp_path / "archive.pt"
    torch.save({"weight": Bomb(sentinel)}, archive)
    names = ["optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "model.pth", "model.ckpt", "x.npy"]
    run = tmp_path / "run"
    for position, bomb in enumerate([payload, archive.read_bytes()]):
        for name in names:
            path = save(run, position + 1)
            (path / name).write_bytes(bomb)
            assert f"{name}: not in the manifest" in verification.verify(path)[0]
            with pytest.raises(CheckpointError):
                storage.read(path)
        for name in ("model__safetensors", "state__json", "recipe__yaml"):
            list_files(save(run, 2), **{name: bomb})
            with pytest.raises(CheckpointError):
                storage.read(run / "step-000000002")
        for path in run.iterdir():
            verification.describe(path)
        storage.newest_valid(run), storage.prune(run, 1), storage.clean(run)
    assert not sentinel.exists()
    pickle.loads(payload)
    assert sentinel.exists(), "the bomb is a dud, and this test showed nothing"


# --------------------------------------------------------------------------------------------- a folder of many


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in sorted(folder.glob("step-*"))]


def test_pruning_keeps_the_last_and_the_best(tmp_path):
    for step in range(1, 9):
        save(tmp_path, step)
    deleted = storage.prune(tmp_path, keep_last=2, keep_best=[3, 8, 77])
    assert steps(tmp_path) == [3, 7, 8] and [int(path.name[5:]) for path in deleted] == [1, 2, 4, 5, 6]
    assert len(os.listdir(tmp_path)) == 3
    with pytest.raises(ValueError, match="keep_last"):
        storage.prune(tmp_path, keep_last=0)


def test_pruning_does_not_count_damaged_checkpoints_as_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "step-000000005" / "model.safetensors").write_bytes(b"cut")
    (tmp_path / "step-000000002" / "MANIFEST.json").unlink()
    storage.prune(tmp_path, keep_last=2)
    assert steps(tmp_path) == [3, 4, 5]


def test_pruning_never_takes_the_checkpoint_written_last(tmp_path):
    """A run that went back to step 2, because later steps rotted without changing size, must not lose its work."""
    for step in (2, 8, 9):
        path = save(tmp_path, step)
        os.utime(path / "MANIFEST.json", (step, step))
    save(tmp_path, 3)
    storage.prune(tmp_path, keep_last=2)
    assert steps(tmp_path) == [3, 8, 9]
    storage.drop_after(tmp_path, 3)
    assert steps(tmp_path) == [3]


def test_newer_means_a_higher_step_beyond_nine_digits_too(tmp_path):
    for step in (999_999_999, 1_000_000_000, 5):
        save(tmp_path, step)
    assert storage.newest_valid(tmp_path)[0].name == "step-1000000000"


def test_cleaning_spares_all_that_is_not_ours(tmp_path):
    kept = save(tmp_path, 1)
    ours = [storage._aside(tmp_path, "tmp", 2), tmp_path / ".trash-2-999999999-12345-abcdef"]  # of an earlier version
    foreign = [tmp_path / ".tmp-notes", tmp_path / "figures", tmp_path / ".git"]
    for folder in [*ours, *foreign]:
        folder.mkdir()
        (folder / "file").write_text("x")
    assert sorted(storage.clean(tmp_path)) == sorted(ours)
    assert all(path.exists() for path in [kept, *foreign])


def test_describe_says_what_is_inside(tmp_path):
    state = {"identity": {"recipe": "abc123"}, "best": {"val/dice": 0.7654321}, "versions": {"torch": "2.14"}}
    text = verification.describe(storage.write(tmp_path, 40, contents(1), state, ""))
    for part in (
        "step         40",
        "abc123",
        "val/dice 0.765432",
        "torch 2.14",
        "9 tensors",
        "valid: every file matches",
    ):
        assert part in text
    assert "DAMAGED" not in text


# ---------------------------------------------------------------------------------- networks and their optimizers


class Net(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 2)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3))) * self.mask


def net(width: int = 4, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(width).to(memory_format=torch.channels_last)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        torch.manual_seed(step)  # as the loop does: some optimizers draw random numbers
        x = torch.randn(4, 3, 6, 6)

        def closure(x=x):
            optimizer.zero_grad()
            loss = module(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def groups(module: nn.Module) -> list[dict]:
    named = dict(module.named_parameters())
    return [
        {"params": [p for n, p in named.items() if p.ndim > 1], "lr": 0.01},
        {"params": [p for n, p in named.items() if p.ndim == 1], "lr": 0.003, "weight_decay": 0.0},
    ]


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(groups(m)),
    "sgd momentum": lambda m: torch.optim.SGD(groups(m), momentum=0.9, dampening=0.5),
    "adamw": lambda m: torch.optim.AdamW(groups(m), weight_decay=0.05),
    "adamw fused": lambda m: torch.optim.AdamW(groups(m), weight_decay=0.05, fused=True),
    "adamw amsgrad": lambda m: torch.optim.AdamW(groups(m), amsgrad=True),
    "adamw with lr on the device": lambda m: torch.optim.AdamW(groups(m), lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda m: torch.optim.Adafactor(groups(m)),
    "rmsprop": lambda m: torch.optim.RMSprop(groups(m), momentum=0.9, centered=True),
    "lbfgs": lambda m: torch.optim.LBFGS(m.to(memory_format=torch.contiguous_format).parameters(), max_iter=3),
}
TIMM = [
    "lamb",
    "lars",
    "lion",
    "nadamw",
    "madgrad",
    "adopt",
    "muon",
    "kron",
    "lookahead_adamw",
    "adafactorbv",
    "laprop",
]


def timm_optimizer(name: str) -> Callable:
    from timm.optim import create_optimizer_v2

    return lambda m: create_optimizer_v2(m, opt=name, lr=0.01, weight_decay=0.02)


def goes_on_with_the_same_bits(folder: Path, make: Callable, at: int) -> None:
    """Train to step 5 without a break, and with one at step `at` into fresh objects; compare all bits."""
    straight = net()
    optimizer = make(straight)
    train(straight, optimizer, 0, at)
    tensors, scalars = state_dict.optimizer_tensors(optimizer, straight.named_parameters())
    groups = {"model": state_dict.module_tensors(straight), "optimizer": tensors}
    loaded = storage.read(storage.write(folder, at, groups, {"optimizer": scalars}, ""))
    train(straight, optimizer, at, 5)

    resumed = net(seed=1)
    fresh = make(resumed)
    for group in fresh.param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = 77.0
    state_dict.load_module(resumed, loaded.tensors["model"], "test")
    named = dict(resumed.named_parameters())
    state_dict.load_optimizer(fresh, named, loaded.tensors["optimizer"], loaded.state["optimizer"])
    again, again_scalars = state_dict.optimizer_tensors(fresh, named)
    assert again_scalars == scalars and same({"o": again}, {"o": tensors})
    train(resumed, fresh, at, 5)

    ours, theirs = (
        state_dict.optimizer_tensors(o, m.named_parameters()) for o, m in [(fresh, resumed), (optimizer, straight)]
    )
    assert ours[1] == theirs[1] and same({"o": ours[0]}, {"o": theirs[0]})
    assert same({"m": state_dict.module_tensors(resumed)}, {"m": state_dict.module_tensors(straight)})


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_with_the_same_bits(tmp_path, name, at):
    goes_on_with_the_same_bits(tmp_path, OPTIMIZERS[name], at)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_an_optimizer_of_timm_goes_on_with_the_same_bits(tmp_path, name):
    goes_on_with_the_same_bits(tmp_path, timm_optimizer(name), 3)


def test_optimizer_state_is_kept_by_the_names_of_parameters():
    module = net()
    optimizer = OPTIMIZERS["adamw"](module)
    assert state_dict.optimizer_tensors(optimizer, module.named_parameters())[0] == {}
    train(module, optimizer, 0, 2)
    tensors, scalars = state_dict.optimizer_tensors(optimizer, module.named_parameters())
    assert len(tensors) == 6 * 3
    for name, parameter in module.named_parameters():
        assert torch.equal(tensors[f"{name}/exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert tensors[f"{name}/step"].shape == () and tensors[f"{name}/step"] == 2
    assert scalars["groups"][1]["parameters"] == ["conv.bias", "norm.weight", "norm.bias", "head.bias"]
    assert scalars["groups"][1]["options"]["weight_decay"] == 0.0
    assert not {"fused", "foreach", "params"} & scalars["groups"][0]["options"].keys()


def test_restored_moments_lie_in_memory_as_their_weights_do():
    """Fused kernels refuse weights in channels_last with moments that are not."""
    module = net()
    optimizer = OPTIMIZERS["adamw fused"](module)
    train(module, optimizer, 0, 1)
    saved = state_dict.optimizer_tensors(optimizer, module.named_parameters())
    state_dict.load_optimizer(optimizer, module.named_parameters(), *saved)
    moment = optimizer.state[module.conv.weight]["exp_avg"]
    assert moment.stride() == module.conv.weight.stride() and not moment.is_contiguous()


def test_a_state_with_nothing_in_it_stays_so():
    """SGD that finds no momentum starts it with the gradient; one that finds zeros damps it."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[module.head.bias]["momentum_buffer"] = None
    tensors, scalars = state_dict.optimizer_tensors(optimizer, module.named_parameters())
    assert tensors == {} and scalars["state"] == {"head.bias": {"momentum_buffer": None}}
    state_dict.load_optimizer(optimizer, module.named_parameters(), tensors, scalars)
    assert dict(optimizer.state) == {module.head.bias: {"momentum_buffer": None}}


def test_another_optimizer_or_network_is_refused_by_name():
    module = net()
    optimizer = OPTIMIZERS["adamw"](module)
    train(module, optimizer, 0, 1)
    tensors, scalars = state_dict.optimizer_tensors(optimizer, module.named_parameters())
    named = dict(module.named_parameters())
    with pytest.raises(UserError, match="state of AdamW; expected SGD"):
        state_dict.load_optimizer(OPTIMIZERS["sgd"](module), named, tensors, scalars)
    with pytest.raises(UserError, match=r"conv\.bias is unexpected, conv\.weight is unexpected"):
        state_dict.load_optimizer(torch.optim.AdamW(module.head.parameters()), named, tensors, scalars)
    with pytest.raises(UserError, match=r"2 groups of \[2, 4\] parameters in another order; expected 1 groups"):
        state_dict.load_optimizer(torch.optim.AdamW(module.parameters()), named, tensors, scalars)
    fewer = {name: tensor for name, tensor in tensors.items() if name != "head.bias/exp_avg"}
    with pytest.raises(UserError, match=r"head\.bias/exp_avg is missing"):
        state_dict.load_optimizer(optimizer, named, fewer, scalars)
    with pytest.raises(UserError, match="x/y is unexpected"):
        state_dict.load_optimizer(optimizer, named, tensors | {"x/y": torch.zeros(1)}, scalars)
    with pytest.raises(ValueError, match="without a name"):
        state_dict.optimizer_tensors(optimizer, {"conv.weight": module.conv.weight})


def test_a_network_of_another_shape_lists_what_does_not_fit_and_is_left_alone():
    small, large = net(4), net(6)
    before = state_dict.module_tensors(large)
    with pytest.raises(UserError) as caught:
        state_dict.load_module(large, state_dict.module_tensors(small), "step-7")
    text = str(caught.value)
    assert text.startswith("step-7: conv.bias is float32 (4,) instead of float32 (6,)")
    assert text.count(" is float32") == 7 and "head.bias" not in text
    assert same({"m": before}, {"m": state_dict.module_tensors(large)})
    with pytest.raises(UserError, match=r"float16 \(2,\) instead of float32"):
        state_dict.load_module(small, {k: v.half() for k, v in state_dict.module_tensors(small).items()}, "x")
    with pytest.raises(UserError, match=r"conv\.bias is missing.*new is unexpected"):
        tensors = state_dict.module_tensors(small)
        del tensors["conv.bias"]
        state_dict.load_module(small, tensors | {"new": torch.zeros(1)}, "x")
    with pytest.raises(UserError) as caught:
        state_dict.load_module(nn.Linear(1, 1), {f"k{i:03d}": torch.zeros(1) for i in range(100)}, "x")
    assert "and 92 more" in str(caught.value) and str(caught.value).count(" is ") == 10


def test_scratch_is_not_saved():
    saved = state_dict.module_tensors(net())
    assert "scratch" not in saved and "mask" in saved


def test_a_snapshot_does_not_move_with_the_network():
    module = net()
    snapshot = state_dict.module_tensors(module)
    before = {name: tensor.clone() for name, tensor in snapshot.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert same({"m": snapshot}, {"m": before})
    assert state_dict.module_tensors(module, keep=False) == {}


SHARDED = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from trainkit.checkpoint import storage as checkpoint, state_dict as live; from trainkit.tracking import store
rank, world, folder, task = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
if world > 1:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{task}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
def train(first, last):
    for step in range(first, last):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
def save(step, run):
    main = rank == 0
    model = live.module_tensors(net, keep=main)
    state, scalars = live.optimizer_tensors(optimizer, net.named_parameters(), keep=main)
    if main:
        checkpoint.write(folder / run, step, {"model": model, "optimizer": state}, {"optimizer": scalars}, "")
def load(step, run):
    loaded = checkpoint.read(folder / run / f"step-{step:09d}")
    live.load_module(net, loaded.tensors["model"], run)
    live.load_optimizer(
        optimizer, net.named_parameters(), loaded.tensors["optimizer"], loaded.state["optimizer"])
if task == "train":
    train(0, 2); save(2, "straight"); train(2, 4); save(4, "straight")
elif task == "resume":
    load(2, "straight"); save(2, "resumed"); train(2, 4); save(4, "resumed")
elif task == "pass":
    load(2, "straight"); save(2, "passed")
elif task == "back":
    load(2, "passed"); save(2, "back")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""


def run_processes(folder: Path, task: str, world: int) -> None:
    (folder / "script.py").write_text(SHARDED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, folder / "script.py", str(rank), str(world), folder, task], env=environment)
        for rank in range(world)
    ]
    assert [process.wait(120) for process in started] == [0] * world


@pytest.mark.slow
def test_sharded_training_writes_the_files_of_one_process_and_goes_on_with_the_same_bits(tmp_path):
    for task, world in [("train", 2), ("resume", 2), ("pass", 1), ("back", 2)]:
        run_processes(tmp_path, task, world)

    def files(run: str, step: int) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (tmp_path / run / f"step-{step:09d}").iterdir()}

    assert files("resumed", 2) == files("straight", 2) and files("resumed", 4) == files("straight", 4)
    assert files("passed", 2) == files("straight", 2), "one process writes other files than two"
    assert files("back", 2) == files("straight", 2)
    assert files("straight", 2)["optimizer.safetensors"] != files("straight", 4)["optimizer.safetensors"]
    loaded = storage.read(tmp_path / "straight" / "step-000000002").tensors
    assert loaded["model"]["0.weight"].shape == (7, 5) == loaded["optimizer"]["0.weight/exp_avg"].shape
