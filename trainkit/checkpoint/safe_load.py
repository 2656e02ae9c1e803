"""Read tensors from untrusted files: safetensors, and PyTorch files without running the code pickled in them.

A `.pth` file is a program for the pickle machine. Before PyTorch reads it, its instructions are scanned as data and
compared with a list of those that a dictionary of tensors needs; any other is refused and named. PyTorch's restricted
loader (`weights_only=True`) is the second barrier. Neither can be disabled.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from trainkit.checkpoint.verification import check_file
from trainkit.errors import UserError, few

MAX_BYTES = 8 * 2**30
"""Largest file size in bytes; iResNet-100 has 0.26 GB."""
MAX_PICKLE_BYTES = 32 * 2**20
"""Largest table of contents of a PyTorch file, or of safetensors; ten thousand tensors take about 2 MB."""
MAX_TENSORS = 20_000
"""Most tensors of a file; iResNet-100 has 900."""
MAX_INSTRUCTIONS = 2_000_000
"""Most pickle instructions in the tables of contents of a PyTorch file; each can make an object of 64 bytes. A tensor
takes about 40."""

GLOBALS = frozenset(
    {
        "collections OrderedDict",
        "torch Size",
        "torch._utils _rebuild_parameter",
        "torch._utils _rebuild_tensor",
        "torch._utils _rebuild_tensor_v2",
        "torch.storage TypedStorage",
        "torch.storage UntypedStorage",
        "torch BFloat16Storage",
        "torch BoolStorage",
        "torch ByteStorage",
        "torch CharStorage",
        "torch DoubleStorage",
        "torch FloatStorage",
        "torch HalfStorage",
        "torch IntStorage",
        "torch LongStorage",
        "torch ShortStorage",
    }
)
"""`module name` of every callable that a file may use."""
# fmt: off
_OPCODES = frozenset({
    "PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "GLOBAL", "REDUCE", "BUILD", "BINPERSID",
})
# fmt: on
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
"""How PyTorch before 1.6 began its files: its magic number, pickled."""
_WRAPPERS = ("state_dict", "model", "model_state_dict", "state_dict_backbone")
_RESAVE = (
    "convert it where it came from: to safetensors, or with torch.save(net.state_dict(), ...); "
    "trainkit runs no code from files of weights"
)


def read_tensors(path: Path | str, max_bytes: int = MAX_BYTES) -> dict[str, Tensor]:
    """Read named tensors, on the CPU, from safetensors or a PyTorch file.

    Wrappers (`state_dict`, `model`, ...) are opened; the prefixes of DataParallel (`module.`), torch.compile
    (`_orig_mod.`) and CVLface's safetensors (`model.net.`) are removed. Raises UserError for a file that is missing,
    damaged, not of tensors, or needs code; for a file of a checkpoint also if it differs from its manifest.
    """
    path = Path(path)
    where = str(path)
    try:
        if not path.is_file():
            found = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(where, found, "a file of weights", "check the path")
        size = path.stat().st_size
        if size > max_bytes:
            raise UserError(where, f"{size:,} bytes", f"at most {max_bytes:,} bytes", "use a file with weights only")
        check_file(path)
        with path.open("rb") as file:
            start = file.read(16)
            if start[:4] == b"PK\x03\x04":
                tensors = _read_zip(file, where)
            elif start.startswith(_LEGACY):
                tensors = _read_legacy(path, where)
            elif start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size:
                tensors = _read_safetensors(path, where)
            else:
                found = "is empty" if not size else "neither a safetensors nor a PyTorch file"
                raise UserError(where, found, remedy=_RESAVE)
    except OSError as error:
        raise UserError(
            where, f"cannot be read ({error.strerror or error})", remedy="check the file and its permissions"
        ) from error
    return _plain_names(_checked(tensors, where, size), where)


def _read_safetensors(path: Path, where: str) -> dict[str, Tensor]:
    # Imported only when files are read: 50 ms.
    from safetensors import SafetensorError
    from safetensors import torch as by_torch

    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_PICKLE_BYTES:
                raise UserError(where, "table of contents too large", f"at most {MAX_PICKLE_BYTES:,} bytes", _RESAVE)
            # No name or value of a sound header has an opening brace: an object is a tensor, or the metadata.
            count = file.read(length).count(b"{") - 1
        if count > MAX_TENSORS:
            raise UserError(where, f"{count:,} tensors", f"at most {MAX_TENSORS:,}", "use a file with weights only")
        return by_torch.load_file(path)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _damaged(where, f"not a complete safetensors file ({error})") from error


def _read_zip(file: BinaryIO, where: str) -> object:
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            names = [member.filename for member in members]
            tables = [name for name in names if name.endswith(".pkl")]
            if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
                raise UserError(where, "a TorchScript archive, which is a program", "named tensors", _RESAVE)
            # PyTorch and Python must read the same content: one root, no duplicate names, no compression.
            roots = {name.partition("/")[0] for name in names}
            packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
            if len(tables) != 1 or not tables[0].endswith("/data.pkl") or tables[0].count("/") != 1:
                raise UserError(where, "a zip archive that is not a PyTorch file", "one data.pkl inside", _RESAVE)
            if len(roots) != 1 or len(set(names)) != len(names) or packed:
                raise UserError(where, "a zip archive that PyTorch did not write", "a plain PyTorch file", _RESAVE)
            if archive.getinfo(tables[0]).file_size > MAX_PICKLE_BYTES:
                raise UserError(where, "table of contents too large", f"at most {MAX_PICKLE_BYTES:,} bytes", _RESAVE)
            broken = archive.testzip()
            if broken:
                raise _damaged(where, f"part {broken} does not match its checksum")
            _scan(io.BytesIO(archive.read(tables[0])), where)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise _damaged(where, f"not a complete PyTorch file ({error})") from error
    file.seek(0)
    return _load(file, where)


def _read_legacy(path: Path, where: str) -> object:
    # Read once, so that the scanned bytes are loaded. PyTorch would also try a real file as a tar archive.
    content = io.BytesIO(path.read_bytes())
    # Magic number, protocol, machine, the object itself, names of its storages; then raw numbers.
    for _ in range(5):
        _scan(content, where)
    content.seek(0)
    return _load(content, where)


def _load(file: BinaryIO, where: str) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    except Exception as error:  # A damaged file can raise any exception; none may become a traceback.
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise _damaged(where, f"PyTorch cannot read it ({reason})") from error


def _scan(pickle: BinaryIO, where: str) -> None:
    """Scan the instructions of one pickle. Raises UserError for one that tensors do not need."""
    surplus = ""
    strings: list[str] = []
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if number > MAX_INSTRUCTIONS:
                found = "table of contents too large"
                raise UserError(where, found, f"at most {MAX_INSTRUCTIONS:,} instructions", _RESAVE)
            if opcode.name in ("GLOBAL", "INST") and argument not in GLOBALS:
                raise _refused(where, str(argument).replace(" ", "."))
            if isinstance(argument, str):
                strings = [*strings[-1:], argument]
            # The names of this instruction are computed while loading: the last strings are only for the message.
            if opcode.name == "STACK_GLOBAL" and " ".join(strings) not in GLOBALS:
                raise _refused(where, ".".join(strings))
            if not surplus and opcode.name == "PROTO" and argument != 2:
                surplus = f"pickle protocol {argument} (PyTorch writes 2)"
            # Continue after the first of these, to name the function that it is used for.
            if not surplus and opcode.name not in _OPCODES:
                surplus = f"the pickle instruction {opcode.name}"
    except (ValueError, IndexError, EOFError, OverflowError) as error:
        if not surplus:
            raise _damaged(where, f"table of contents cannot be read ({error})") from error
    if surplus:
        raise _refused(where, surplus)


def _refused(where: str, what: str) -> UserError:
    return UserError(where, f"needs {what} to load, and was not opened", "only tensors", _RESAVE)


def _damaged(where: str, how: str) -> UserError:
    return UserError(where, how, remedy="download or copy the file again: it is damaged or incomplete")


def _checked(content: object, where: str, size: int) -> dict[str, Tensor]:
    """Return the dictionary of tensors in what was loaded, wrappers opened. Raises UserError."""
    while isinstance(content, dict):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), dict)), None)
        if inner is None:
            break
        content = inner
    if not isinstance(content, dict) or not content:
        found = "an empty dictionary" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise UserError(where, f"contains {found}", "tensors by name", _RESAVE)
    other = [
        str(name) for name, tensor in content.items() if not isinstance(name, str) or not isinstance(tensor, Tensor)
    ]
    if other:
        raise UserError(where, f"entries that are not tensors: {few(other, 10)}", "tensors by name", _RESAVE)
    unpacked = 0
    for name, tensor in content.items():
        # A view can claim many elements of a storage with one element; copied, it would become that large.
        unpacked += 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()
        if tensor.layout != torch.strided or tensor.is_quantized or unpacked > size:
            found = f"{name!r} of shape {tuple(tensor.shape)} is not stored in full"
            raise UserError(where, found, "plain dense tensors", _RESAVE)
    return {name: tensor.detach().contiguous() for name, tensor in content.items()}


def _plain_names(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    plain = {}
    everywhere = all(name.startswith("module.") for name in tensors)
    cvlface = all(name.startswith("model.net.") for name in tensors)
    for name, tensor in tensors.items():
        # `module` can be part of the network's own names, unless all names begin with it; `_orig_mod` never is.
        parts = [part for part in name.split(".") if part != "_orig_mod"]
        short = ".".join(parts[1:] if everywhere and parts[0] == "module" else parts)
        short = short.removeprefix("model.net.") if cvlface else short
        if not short or short in plain:
            raise UserError(where, f"two tensors named {short or name!r}", "each name once", _RESAVE)
        plain[short] = tensor
    return plain


def load_into(net: nn.Module, tensors: Mapping[str, Tensor], where: str, ignore: Iterable[str] = ()) -> None:
    """Copy tensors into a network by name, all or nothing; half precision is widened to the network's own.

    `ignore` are patterns (`head.*`) of names to skip, missing or not. Raises UserError with up to ten names each that
    are missing, unexpected or of another shape, or that have values which are not finite.
    """
    own = net.state_dict()
    patterns = tuple(ignore)

    def counts(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in patterns)

    # Batch norm uses its counter only without momentum; converted checkpoints leave it out.
    missing = [name for name in own if name not in tensors and not name.endswith("num_batches_tracked")]
    missing = [name for name in missing if counts(name)]
    unexpected = [name for name in tensors if name not in own and counts(name)]
    shared = {name: tensor for name, tensor in tensors.items() if name in own and counts(name)}
    misfits = [
        f"{name} {tuple(tensor.shape)} {_kind(tensor)} instead of {tuple(own[name].shape)} {_kind(own[name])}"
        for name, tensor in shared.items()
        if tensor.shape != own[name].shape or _kind(tensor) != _kind(own[name])
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing: {few(missing, 10)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {few(unexpected, 10)}")
    if misfits:
        problems.append(f"{len(misfits)} of another shape: {few(misfits, 10)}")
    if problems:
        raise UserError(
            where,
            f"does not fit {type(net).__name__}; " + "; ".join(problems),
            remedy="use weights of the same network, width, embedding and image size, or change task.net",
        )
    broken = [name for name, t in shared.items() if t.is_floating_point() and not torch.isfinite(t).all()]
    if broken:
        raise UserError(where, f"values that are not finite in {few(broken, 10)}", remedy="use another file")
    net.load_state_dict(shared, strict=False)


def read_centres(path: Path | str, classes: int, dim: int) -> Tensor:
    """Read class centres (classes, dim), float32: `weight` (C, D) of InsightFace or `kernel` (D, C) of AdaDistill."""
    tensors = read_tensors(path)
    found = [name for name in tensors if name in ("weight", "kernel", "head.weight", "head.kernel")]
    if len(found) != 1:
        raise UserError(
            str(path),
            f"contains {few(tensors, 10)}",
            "one table of class centres, `weight` (C, D) or `kernel` (D, C)",
            "use another file",
        )
    table = tensors[found[0]]
    wanted = (dim, classes) if found[0].endswith("kernel") else (classes, dim)
    if tuple(table.shape) != wanted or not table.is_floating_point():
        raise UserError(
            str(path),
            f"{found[0]} {tuple(table.shape)} {_kind(table)}",
            f"{wanted} for {classes} classes and embeddings of {dim}",
            "use class centres of the same data set and embedding",
        )
    if not torch.isfinite(table).all():
        raise UserError(str(path), f"values that are not finite in {found[0]}", remedy="use another file")
    return (table.T if found[0].endswith("kernel") else table).float().contiguous()


def write_tensors(path: Path | str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors as safetensors; tensors that share memory are written each in full."""
    from safetensors import SafetensorError
    from safetensors import torch as by_torch

    plain, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        shares = tensor.numel() > 0 and (place in seen or tensor.untyped_storage().nbytes() != tensor.nbytes)
        seen.add(place)
        plain[name] = tensor.clone() if shares else tensor
    try:
        by_torch.save_file(plain, str(path), dict(metadata) if metadata else None)
    except (OSError, SafetensorError) as error:
        raise UserError(
            str(path), f"cannot be written ({error})", remedy="check the folder and the free space"
        ) from error


def _kind(tensor: Tensor) -> str:
    return "float" if tensor.is_floating_point() else "integer"
