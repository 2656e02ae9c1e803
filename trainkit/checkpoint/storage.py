"""Store checkpoints on disk: written to a temporary folder, hashed, renamed, verified before use, without pickle.

A checkpoint is a folder `step-000000123/` that holds

| file                  | content                                                                            |
|-----------------------|------------------------------------------------------------------------------------|
| `<group>.safetensors` | tensors by name: `model`, `memory`, `ema`, `optimizer` (`<parameter>/<state key>`)  |
| `state.json`          | the rest of the state: step, gates, best records, recipe, data, versions           |
| `recipe.yaml`         | the resolved recipe                                                                |
| `MANIFEST.json`       | written last: format version, and size and SHA-256 of each file above              |

After the first commit there is always at least one complete checkpoint, even if the process is killed in any system
call; and a checkpoint that differs from its manifest is never used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from trainkit.checkpoint.verification import (
    MANIFEST,
    RECIPE,
    STATE,
    STEP,
    CheckpointError,
    damaged,
    differences,
    encoded,
    encoded_manifest,
    files_of,
    listed,
    parsed_state,
    read_file,
    sha256,
    unreadable,
    verified,
    verify,
)
from trainkit.files import Json, sync_folder, through_no_link

_ASIDE = re.compile(r"\.(?:tmp|trash)-\d+-[0-9a-f-]+")
"""Names of folders that are written or deleted; earlier versions had more numbers in them."""
_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_HEADROOM = 1.2
_FREE = "free disk space; older checkpoints are intact"
_CHUNK = 8 << 20
_JOINED = 1 << 20
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Words of safetensors for the types of tensors."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, its hashes verified."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    """Group (`model`, `optimizer`, ...) to tensors by name, on the CPU."""
    state: dict[str, Json]
    recipe_text: str


def write(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Json], recipe_text: str
) -> Path:
    """Commit a checkpoint of `step` under `folder`, which is created if missing, and return its path.

    `tensors` is group to tensors by name, on any device; `state` is plain JSON data (tuples come back as lists) and
    gets the key `step`. While a valid checkpoint of the same step is replaced, one of the two
    always exists.

    Raises `CheckpointError` if the disk is full or fails: partial files are removed, older checkpoints are intact, and
    training may continue. Raises ValueError for states that would change in JSON.
    """
    folder = Path(folder)
    if state.get("step", step) != step:
        raise ValueError(f"the state is of step {state['step']}, the checkpoint of step {step}")
    for group in tensors:
        if not _GROUP.fullmatch(group):
            raise ValueError(f"{group!r} is not a valid name for a group of tensors")
    texts = {STATE: encoded({**state, "step": step}), RECIPE: recipe_text.encode()}
    needed = int(_HEADROOM * (sum(map(_bytes_of, tensors.values())) + sum(map(len, texts.values()))))
    target = folder / f"step-{step:09d}"
    aside = _aside(folder, "tmp", step)
    try:
        if not os.path.isdir(folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)  # not its parents: a run deleted meanwhile is not recreated
            sync_folder(folder.parent)
        if shutil.disk_usage(folder).free < needed:
            raise CheckpointError(str(folder), _room(folder, step, needed), remedy=_FREE)
        os.mkdir(aside)
        contents = {f"{group}.safetensors": _serialised(members) for group, members in tensors.items()}
        contents |= {name: [memoryview(text)] for name, text in texts.items()}
        files = {name: _write_file(aside / name, pieces) for name, pieces in contents.items()}
        contents[MANIFEST] = [memoryview(encoded_manifest(files))]
        _write_file(aside / MANIFEST, contents[MANIFEST])
        sync_folder(aside)
        superseded = _make_room(target)
        os.rename(aside, target)
        aside = target  # from here on, a failure removes the committed folder
        sync_folder(folder)
        _read_back(target, contents)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        room = f"; {_room(folder, step, needed)}" if full else ""  # before partial files are removed
        _withdraw(aside, target)
        remedy = _FREE if full else "older checkpoints are intact"
        found = f"cannot be written: {error.strerror or error}{room}"
        raise CheckpointError(str(target), found, remedy=remedy) from error
    except (MemoryError, RuntimeError) as error:  # of PyTorch, if a tensor cannot be copied to the CPU
        _withdraw(aside, target)
        found = f"cannot be written: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        raise CheckpointError(str(target), found, remedy="older checkpoints are intact") from error
    except BaseException:
        _withdraw(aside, target)
        raise
    if superseded is not None:
        _discard(superseded)
    return target


def _room(folder: Path, step: int, needed: int) -> str:
    """Return the free space of a disk and the size of a checkpoint as text."""
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free, "
    except OSError:
        free = ""
    return f"{free}a checkpoint of step {step} needs {needed / 1e6:.1f} MB"


def _make_room(target: Path) -> Path | None:
    """Rename an existing checkpoint of the same step, to a name that still counts as a checkpoint."""
    old = target.with_name(target.name + ".old")
    if os.path.lexists(target) and os.path.lexists(old):
        # An earlier replacement was interrupted. Remove only the invalid one of the two, so that one always remains.
        _discard(target if verify(target) else old)
    if os.path.lexists(target):
        os.rename(target, old)
    return old if os.path.lexists(old) else None


def _withdraw(aside: Path, target: Path) -> None:
    """Delete a checkpoint that could not be written, and restore the name of the one that it replaced."""
    _discard(aside)
    with contextlib.suppress(OSError):
        _put_back(target)


def _put_back(target: Path) -> None:
    """Restore the name of a checkpoint that was moved aside, if no other has it."""
    old = target.with_name(target.name + ".old")
    if os.path.lexists(old) and not os.path.lexists(target):
        os.rename(old, target)
        sync_folder(target.parent)


def _write_file(path: Path, pieces: Iterable[memoryview]) -> tuple[int, str]:
    """Write and sync a new file; returns its size and SHA-256."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    digest, size = hashlib.sha256(), 0
    try:
        for chunk in _chunks(pieces):
            digest.update(chunk)
            size += len(chunk)
            while chunk:
                taken = os.write(descriptor, chunk)  # the system may write fewer bytes than requested
                if not taken:
                    raise OSError(errno.EIO, f"{path.name}: the system writes no more bytes")
                chunk = chunk[taken:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def _chunks(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in parts of at most 8 MB: long pieces are cut, short ones joined."""
    joined = bytearray()
    for piece in pieces:
        if len(joined) + len(piece) > _CHUNK:
            yield memoryview(joined)
            joined = bytearray()
        if len(piece) <= _JOINED:
            joined += piece
            continue
        if joined:
            yield memoryview(joined)
            joined = bytearray()
        for start in range(0, len(piece), _CHUNK):
            yield piece[start : start + _CHUNK]
    if joined:
        yield memoryview(joined)


def _read_back(path: Path, contents: Mapping[str, Iterable[memoryview]]) -> None:
    """Raise OSError unless the files hold what was written, byte for byte."""
    buffer = memoryview(bytearray(_CHUNK))
    for name, pieces in contents.items():
        with open(path / name, "rb", opener=through_no_link) as file:
            for chunk in _chunks(pieces):
                part = buffer[: len(chunk)]
                # Arrays, because their comparison releases the interpreter lock: the training runs in parallel.
                if file.readinto(part) != len(part) or not np.array_equal(np.asarray(part), np.asarray(chunk)):
                    raise OSError(errno.EIO, f"{name} differs when it is read back")
            if file.read(1):
                raise OSError(errno.EIO, f"{name} is longer when it is read back")


def _serialised(members: Mapping[str, Tensor]) -> list[memoryview]:
    """A safetensors file in pieces that share memory with the tensors, those on the CPU and contiguous at least.

    The library's own writer holds the interpreter while it copies all of them twice.
    """
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in members.items()}
    # Wide types first, so that every tensor begins at a multiple of its own width.
    plain = dict(sorted(plain.items(), key=lambda item: (-item[1].element_size(), str(item[1].dtype), item[0])))
    entries, end = {}, 0
    for name, tensor in plain.items():
        if tensor.dtype not in _TYPES:
            raise ValueError(f"{name} has type {tensor.dtype}, which safetensors does not support")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    bits = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in plain.values()]
    return [memoryview(struct.pack("<Q", len(header)) + header), *bits]


def _bytes_of(members: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in members.values())


def read(path: Path) -> Loaded:
    """Read a checkpoint. Raises `CheckpointError` naming the file if a byte differs from its manifest.

    Each file is read once, and the hashed bytes themselves are parsed: nothing can change in between.
    """
    path = Path(path)
    try:
        manifest, names = listed(path)
        expected = files_of(manifest)
        if isinstance(expected, str):
            raise damaged(path, expected)
        # The set of files first: nothing is read when it is wrong.
        if problems := differences(manifest, {name: expected.get(name, (0, "")) for name in names}):
            raise damaged(path, problems[0])
        tensors, texts = {}, {}
        for name in names:
            content = read_file(path / name)
            if problems := differences(manifest, {**expected, name: (len(content), sha256(content))}):
                raise damaged(path, problems[0])
            if name.endswith(".safetensors"):
                tensors[name.removesuffix(".safetensors")] = _parsed_tensors(path / name, content)
            else:
                texts[name] = content
        state = parsed_state(path, texts[STATE])
        recipe_text = texts[RECIPE].decode()
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise damaged(path, f"{RECIPE}: not UTF-8 text") from error
    return Loaded(path, state["step"], tensors, state, recipe_text)


def state_of(path: Path) -> dict[str, Json]:
    """Return only the state of a checkpoint. Raises `CheckpointError` if a byte of it has changed."""
    return parsed_state(Path(path), verified(Path(path), STATE))


def _parsed_tensors(path: Path, content: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise damaged(path.parent, f"{path.name}: not a safetensors file: {error}") from error


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint under `folder` that verifies, and why newer ones were refused."""
    refused: list[str] = []
    for path in reversed(_checkpoints(Path(folder))):
        problems = verify(path)
        if not problems:
            return path, refused
        refused.append(problems[0])
    return None, refused


def prune(folder: Path, keep_last: int, keep_best: Iterable[int] = ()) -> list[Path]:
    """Delete all but the newest `keep_last` complete checkpoints and those of the steps `keep_best`.

    Call it after a commit. The checkpoint written last is always kept, even if later steps exist that a run went back
    behind. Returns the deleted paths; raises `CheckpointError`.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; expected 1 or more")
    folder, best = Path(folder), set(keep_best)
    complete = {path: written for path in _checkpoints(folder) if (written := _completed_at(path)) is not None}
    kept = {*list(complete)[-keep_last:], *sorted(complete, key=complete.__getitem__)[-1:]}
    deleted = [path for path in _checkpoints(folder) if path not in kept and _step_of(path) not in best]
    # Checkpoints later than all kept ones are damaged; keep them for diagnosis.
    newest = max(map(_step_of, kept), default=-1)
    deleted = [path for path in deleted if _step_of(path) <= newest]
    _delete(deleted)
    return deleted


def drop_after(folder: Path, step: int) -> list[Path]:
    """Delete checkpoints later than `step`, for a run that goes back to `step`."""
    later = [path for path in _checkpoints(Path(folder)) if _step_of(path) > step]
    _delete(later)
    return later


def clean(folder: Path) -> list[Path]:
    """Remove partial files. Returns what was removed.

    Call it with the lock of the run held: they are of processes that have died.
    """
    removed = []
    for name in _listing(folder):
        superseded = False
        if name.endswith(".old") and STEP.fullmatch(name):
            target = folder / name.removesuffix(".old")
            with contextlib.suppress(OSError):
                _put_back(target)
            superseded = os.path.lexists(folder / name) and not verify(target)
        if (superseded or _ASIDE.fullmatch(name)) and _discard(folder / name) is None:
            removed.append(folder / name)
    return removed


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        if (error := _discard(path)) is not None:
            raise CheckpointError(
                str(path), f"cannot be deleted: {error.strerror}", remedy="check the permissions"
            ) from error


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").removesuffix(".old"))


def _checkpoints(folder: Path) -> list[Path]:
    """Return folders with a checkpoint's name, oldest step first; of two with one step the replaced one first."""
    found = [(int(match[1]), not match[2], name) for name in _listing(folder) if (match := STEP.fullmatch(name))]
    return [folder / name for _, _, name in sorted(found)]


def _listing(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _completed_at(path: Path) -> float | None:
    """Return the time at which a checkpoint was written; None unless all files are present with their sizes."""
    try:
        manifest, names = listed(path)
        files = files_of(manifest)
        sizes = {name: os.path.getsize(path / name) for name in names}
        if isinstance(files, str) or {name: size for name, (size, _) in files.items()} != sizes:
            return None
        return os.path.getmtime(path / MANIFEST)
    except (CheckpointError, OSError):
        return None


def _discard(path: Path) -> OSError | None:
    """Delete a folder; a checkpoint is renamed first, so that it is never found partially deleted."""
    try:
        if not os.path.lexists(path):
            return None
        if match := STEP.fullmatch(path.name):
            trash = _aside(path.parent, "trash", int(match[1]))
            os.rename(path, trash)
            path = trash
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return None
        for name in os.listdir(path):
            if os.path.isdir(path / name) and not os.path.islink(path / name):
                shutil.rmtree(path / name)
            else:
                os.unlink(path / name)
        os.rmdir(path)
    except OSError as error:
        return error
    return None


def _aside(folder: Path, kind: str, step: int) -> Path:
    """Return a unique name for what is written or deleted."""
    return folder / f".{kind}-{step}-{uuid.uuid4().hex}"
