"""Verify checkpoints: manifest, hashes, damaged and foreign files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import UserError
from trainkit.files import Json, through_no_link

FORMAT = 1
"""Version of the folder's layout; raised for changes that an older version would misread."""
MANIFEST = "MANIFEST.json"
STATE = "state.json"
RECIPE = "recipe.yaml"
STEP = re.compile(r"step-(\d{9,})(\.old)?")
"""Names of checkpoints."""

_MANIFEST_LIMIT = 1 << 20
_CHUNK = 8 << 20


class CheckpointError(UserError):
    """A checkpoint could not be written or is not valid. Older checkpoints are untouched."""


def verify(path: Path) -> list[str]:
    """Return the problems of the checkpoint at `path`, a sentence each; none if every byte is intact."""
    path = Path(path)
    try:
        manifest, names = listed(path)
        problems = differences(manifest, {name: fingerprint(path / name) for name in names})
        if not problems:
            parsed_state(path, read_file(path / STATE))
    except CheckpointError as error:
        return [f"{error.where}: {error.found}"]
    except OSError as error:
        return [f"{error.filename or path}: cannot be read: {error.strerror}"]
    return [f"{path}/{problem}" for problem in problems]


def check_file(path: Path) -> None:
    """Raise `CheckpointError` for a file of a checkpoint that differs from its manifest.

    A file outside a checkpoint has no manifest and is not checked.
    """
    path = Path(path)
    if not STEP.fullmatch(path.absolute().parent.name) and not (path.parent / MANIFEST).is_file():
        return
    verified(path.absolute().parent, path.name)


def verified(path: Path, name: str) -> bytes:
    """Return the bytes of one file of a checkpoint after comparing them with the manifest; others must be present.

    Raises `CheckpointError`.
    """
    try:
        manifest, names = listed(path)
        expected = files_of(manifest)
        if isinstance(expected, str):
            raise damaged(path, expected)
        content = read_file(path / name)
    except OSError as error:
        raise unreadable(path, error) from error
    found = {other: expected.get(other, (0, "")) for other in names} | {name: (len(content), sha256(content))}
    if problems := differences(manifest, found):
        raise damaged(path, problems[0])
    return content


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint that the system cannot read."""
    return CheckpointError(str(error.filename or path), f"cannot be read: {error.strerror}")


def describe(path: Path) -> str:
    """Describe the content of a checkpoint in a few lines of text."""
    from safetensors import SafetensorError, safe_open

    problems, lines = verify(path), [str(path)]
    try:
        state = json.loads(read_file(path / STATE))
        for key in ("step", "best", "identity", "machine", "versions"):
            if key in state:
                lines.append(f"  {key:<12} {_one_line(state[key])}")
        for name in sorted(os.listdir(path)):
            if name.endswith(".safetensors"):
                with safe_open(path / name, "numpy") as file:
                    count = len(list(file.keys()))
                lines.append(f"  {name:<24} {count} tensors, {os.path.getsize(path / name) / 1e6:.2f} MB")
    except (OSError, ValueError, TypeError, RecursionError, SafetensorError) as error:
        lines.append(f"  cannot be read further: {error}")
    lines += [f"  DAMAGED: {problem}" for problem in problems] or ["  valid: every file matches its SHA-256"]
    return "\n".join(lines)


def _one_line(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_one_line(member)}" for key, member in value.items())
    if isinstance(value, list):
        return "; ".join(map(_one_line, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def parsed_state(path: Path, content: bytes) -> dict[str, Json]:
    """Parse the state. Raises `CheckpointError` if it is damaged, or of another step than the folder's name."""
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{STATE}: not JSON") from error
    if not isinstance(state, dict) or type(state.get("step")) is not int:
        raise damaged(path, f"{STATE}: no step in it")
    named = STEP.fullmatch(path.name)
    if named and int(named[1]) != state["step"]:
        raise damaged(path, f"{STATE}: of step {state['step']}, but the folder is named for step {int(named[1])}")
    return state


def damaged(path: Path, problem: str) -> CheckpointError:
    """Return the error of a checkpoint with a problem."""
    where, _, found = problem.partition(": ")
    return CheckpointError(f"{path}/{where}", found, remedy="resume from an older checkpoint; this one is not used")


def listed(path: Path) -> tuple[bytes, list[str]]:
    """Return the bytes of the manifest and the names of all other files.

    Raises `CheckpointError` for anything but plain files in the folder, or without a manifest; and OSError.
    """
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise CheckpointError(str(path), "not a folder", "the folder of a checkpoint, not a link to it")
    names = sorted(os.listdir(path))
    for name in names:
        if not stat.S_ISREG(os.lstat(path / name).st_mode):
            raise CheckpointError(str(path / name), "not a plain file", "no links, folders or pipes", "remove it")
    if MANIFEST not in names:
        raise CheckpointError(
            str(path / MANIFEST),
            "missing, so the checkpoint was never completed",
            remedy="resume from an older checkpoint",
        )
    if os.path.getsize(path / MANIFEST) > _MANIFEST_LIMIT:
        raise CheckpointError(str(path / MANIFEST), f"larger than {_MANIFEST_LIMIT:,} bytes", "a manifest")
    names.remove(MANIFEST)
    return read_file(path / MANIFEST), names


def differences(manifest: bytes, found: Mapping[str, tuple[int, str]]) -> list[str]:
    """Compare the manifest with the files found, name -> (size, SHA-256); returns the problems, a sentence each."""
    expected = files_of(manifest)
    if isinstance(expected, str):
        return [expected]
    problems = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            problems.append(f"{name}: missing")
        elif name not in expected:
            problems.append(f"{name}: not in the manifest")
        elif found[name][0] != expected[name][0]:
            problems.append(f"{name}: {found[name][0]} bytes; {expected[name][0]} were written")
        elif found[name][1] != expected[name][1]:
            problems.append(
                f"{name}: content has changed (SHA-256 {found[name][1][:12]}..., not {expected[name][1][:12]}...)"
            )
    return problems


def files_of(manifest: bytes) -> dict[str, tuple[int, str]] | str:
    """Return the files that a manifest lists, name -> (size, SHA-256), or its problem as a sentence."""
    try:
        content = json.loads(manifest)
        version = content["format"]
        if type(version) is int and version > FORMAT:
            return f"{MANIFEST}: format {version} of a newer trainkit; this version reads format {FORMAT}"
        if version != FORMAT:
            return f"{MANIFEST}: format {version!r}; this version of trainkit reads format {FORMAT}"
        files = {name: (entry["size"], entry["sha256"]) for name, entry in content["files"].items()}
        # A manifest that parses but was written differently (spaces, doubled keys, more fields) is damaged as well.
        canonical = encoded_manifest(files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST}: damaged"
    if canonical != manifest:
        return f"{MANIFEST}: damaged"
    if any("/" in name or "\\" in name or name in ("", ".", "..", MANIFEST) for name in files):
        return f"{MANIFEST}: lists an invalid file name"
    if not {STATE, RECIPE} <= files.keys():
        return f"{MANIFEST}: {STATE} or {RECIPE} is not listed"
    return files


def encoded_manifest(files: Mapping[str, tuple[int, str]]) -> bytes:
    """Return the manifest of files, name -> (size, SHA-256)."""
    entries = {name: {"size": size, "sha256": digest} for name, (size, digest) in sorted(files.items())}
    return encoded({"format": FORMAT, "files": entries})


def encoded(value: Mapping[str, Json]) -> bytes:
    """Return a state as JSON. Raises ValueError for values that would change in JSON."""
    refuse_unfaithful(value, "state")
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def refuse_unfaithful(value: object, where: str) -> None:
    """Raise ValueError for values that JSON refuses or silently changes (1 as a key becomes "1")."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; keys of a state are strings")
            refuse_unfaithful(member, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for position, member in enumerate(value):
            refuse_unfaithful(member, f"{where}[{position}]")
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise ValueError(f"{where} is a {type(value).__name__}, which a state cannot hold")


def sha256(content: bytes) -> str:
    """Return the hexadecimal SHA-256 of bytes."""
    return hashlib.sha256(content).hexdigest()


def read_file(path: Path) -> bytes:
    """Read a file, and follow no link."""
    with open(path, "rb", opener=through_no_link) as file:
        return file.read()


def fingerprint(path: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a file, read in parts of 8 MB."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", opener=through_no_link) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()
