"""Files that try to run something when they are read: each makes a sentinel if anybody runs what it holds."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import subprocess
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments

    def __call__(self):
        """What is called must look as if it could be."""


@dataclass(frozen=True)
class Payload:
    """A file; `unsafely` is the reader that it was made for, by which it does run."""

    name: str
    suffix: str
    data: bytes
    unsafely: Callable[[Path], Any]


def _unpickle(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


def _torch(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def calls(sentinel: Path) -> dict[str, Any]:
    """Objects that make the sentinel when they are unpickled, each by another way."""
    touch, make = f"touch {sentinel}", f"open({str(sentinel)!r}, 'w').close()"
    return {
        "os.system": Call(os.system, touch),
        "eval": Call(eval, make),
        "exec": Call(exec, make),
        "getattr": Call(Call(getattr, sentinel, "touch")),
        "open": Call(open, str(sentinel), "w"),
        "popen": Call(os.popen, touch),
        "subprocess": Call(subprocess.check_call, ["touch", str(sentinel)]),
        "mkdir": Call(os.mkdir, str(sentinel)),
        "Path.touch": Call(Path.touch, sentinel),
    }


def payloads(folder: Path) -> list[Payload]:
    """All of them; the sentinel of each is `sentinel(folder, payload)`."""
    made: list[Payload] = []

    def add(name: str, suffix: str, content: Callable[[Path], bytes], unsafely: Callable[[Path], Any]) -> None:
        made.append(Payload(name, suffix, content(folder / f"{len(made)}.ran"), unsafely))

    for call in calls(folder):
        for protocol, suffix in ((0, ".pkl"), (2, ".bin"), (4, ".pt"), (5, ".ckpt")):
            if protocol in (2, 5) or call in ("os.system", "eval", "exec"):
                add(f"pickle {protocol} of {call}", suffix,
                    lambda s, c=call, p=protocol: pickle.dumps(calls(s)[c], protocol=p), _unpickle)  # fmt: skip
    for call in ("os.system", "eval", "Path.touch"):
        for what, wrap in _WRAPPED.items():
            add(f"torch zip, {call} {what}", ".pth", lambda s, c=call, w=wrap: _saved(w(calls(s)[c])), _torch)
        add(f"torch legacy, {call}", ".pth", lambda s, c=call: _saved(calls(s)[c], zipped=False), _torch)
        add(f"torch protocol 4, {call}", ".bin", lambda s, c=call: _saved(calls(s)[c], protocol=4), _torch)
        add(f"npy object, {call}", ".npy", lambda s, c=call: _npy(calls(s)[c]), lambda p: np.load(p, allow_pickle=True))
        add(f"npz object, {call}", ".npz", lambda s, c=call: _npz(calls(s)[c]), _npz_unsafely)
        add(f"InsightFace bin, {call}", ".bin", lambda s, c=call: _bin(calls(s)[c]), _unpickle)
    add("joblib", ".joblib", lambda s: _joblib(calls(s)["os.system"], 0), lambda p: __import__("joblib").load(p))
    add("joblib, packed", ".pkl", lambda s: _joblib(calls(s)["os.system"], 3), lambda p: __import__("joblib").load(p))
    add("pickle in gzip", ".gz", lambda s: gzip.compress(pickle.dumps(calls(s)["eval"])),
        lambda p: pickle.loads(gzip.decompress(p.read_bytes())))  # fmt: skip
    add("pickle in zlib", ".z", lambda s: zlib.compress(pickle.dumps(calls(s)["eval"])),
        lambda p: pickle.loads(zlib.decompress(p.read_bytes())))  # fmt: skip
    add("pandas", ".pickle", lambda s: pickle.dumps(calls(s)["exec"]), lambda p: __import__("pandas").read_pickle(p))
    add("module by name", ".pth", lambda s: _by_name("posix", "system", f"touch {s}"), _unpickle)
    add("stack global", ".pt", lambda s: _stack_global("posix", "system", f"touch {s}"), _unpickle)
    add("instance", ".bin", lambda s: b"(Vtouch " + str(s).encode() + b"\niposix\nsystem\n.", _unpickle)
    add("object", ".bin", lambda s: b"(cposix\nsystem\nVtouch " + str(s).encode() + b"\no.", _unpickle)
    add("second pickle", ".bin", lambda s: pickle.dumps([[], []]) + pickle.dumps(calls(s)["os.system"]), _second)
    for call, text in _YAML.items():
        add(f"YAML {call}", ".yaml", lambda s, t=text: t.format(s).encode(), _yaml_unsafely)
    for kind in ("parquet", "arrow"):
        add(f"{kind} extension type", f".{kind}", lambda s, k=kind: _extension(k, pickle.dumps(calls(s)["eval"])),
            _extension_unsafely)  # fmt: skip
    add("PostScript", ".png", _postscript, _ghostscript)
    return made


def sentinel(folder: Path, number: int) -> Path:
    """What the payload of that number makes when it runs."""
    return folder / f"{number}.ran"


_WRAPPED: dict[str, Callable[[Any], Any]] = {
    "alone": lambda bomb: bomb,
    "beside tensors": lambda bomb: {"weight": torch.ones(2), "hook": bomb},
    "in a state_dict": lambda bomb: {"state_dict": OrderedDict(weight=torch.ones(2)), "optimizer": [bomb]},
    "as a key": lambda bomb: {(bomb,): torch.ones(1)},
    "deep": lambda bomb: {"a": [{"b": (1, [bomb])}]},
    "as accelerate's random states": lambda bomb: {"step": 3, "random_state": bomb, "torch_manual_seed": 1},
    "as an optimizer": lambda bomb: {"state": {0: {"exp_avg": torch.ones(1), "x": bomb}}, "param_groups": []},
}


def _saved(content: Any, zipped: bool = True, protocol: int = 2) -> bytes:
    out = io.BytesIO()
    torch.save(content, out, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    return out.getvalue()


def _npy(bomb: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([bomb], object), allow_pickle=True)
    return out.getvalue()


def _npz(bomb: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in ("image_paths", "templates", "rows", "cells", "labels"):
            archive.writestr(f"{name}.npy", _npy(bomb))
    return out.getvalue()


def _npz_unsafely(path: Path) -> None:
    with np.load(path, allow_pickle=True) as arrays:
        for name in arrays.files:
            arrays[name]


def _bin(bomb: Any) -> bytes:
    return pickle.dumps(([b"\xff\xd8jpeg", bomb], [True]), protocol=2)


def _joblib(bomb: Any, compress: int) -> bytes:
    import joblib

    out = io.BytesIO()
    joblib.dump([np.ones(3), bomb], out, compress=compress)
    return out.getvalue()


def _by_name(module: str, name: str, word: str) -> bytes:
    return f"c{module}\n{name}\n(V{word}\ntR.".encode()


def _stack_global(module: str, name: str, word: str) -> bytes:
    def text(value: str) -> bytes:
        return b"\x8c" + struct.pack("<B", len(value)) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(word) + b"\x85R."


def _second(path: Path) -> None:
    with path.open("rb") as file:
        pickle.load(file)
        pickle.load(file)


_YAML = {
    "apply": "name: !!python/object/apply:os.system ['touch {}']\n",
    "new": "!!python/object/new:os.system ['touch {}']\n",
    "deep": "a:\n  - b: !!python/object/apply:subprocess.check_call [[touch, {}]]\n",
}


def _yaml_unsafely(path: Path) -> None:
    import yaml

    yaml.unsafe_load(path.read_text())


def _extension(kind: str, pickled: bytes) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    told = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickled}
    fields = [pa.field("image", pa.binary(), metadata=told), pa.field("label", pa.int64())]
    table = pa.table([pa.array([b"x"], pa.binary()), pa.array([0])], schema=pa.schema(fields))
    out = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, out)
    else:
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    return out.getvalue()


def _extension_unsafely(path: Path) -> None:
    """What pyarrow did before 14.0.1 (CVE-2023-47248)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(path) if path.suffix == ".parquet" else pa.ipc.open_stream(path.read_bytes()).schema
    pickle.loads(schema.field("image").metadata[b"ARROW:extension:metadata"])


def _postscript(path: Path) -> bytes:
    # Pillow hands such an image to Ghostscript; the `gs` of `false_ghostscript` makes the sentinel that it names.
    return f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%Title: {path}\n%%EndComments\nshowpage\n".encode()


def _ghostscript(path: Path) -> None:
    from PIL import Image

    with Image.open(path) as picture:
        picture.load()


def false_ghostscript(folder: Path) -> Path:
    """A folder for PATH whose `gs` makes what the title of its input names, as Ghostscript could."""
    folder.mkdir()
    # The input is a file among the arguments, or standard input.
    script = """#!/bin/sh
for word in "$@"; do
  if [ -f "${word#-f}" ]; then touch "$(sed -n 's/^%%Title: //p' "${word#-f}")"; exit 1; fi
done
[ "$1" = --version ] && { echo 10.0; exit 0; }
exit 1
"""
    (folder / "gs").write_text(script)
    (folder / "gs").chmod(0o755)
    return folder


def bombs() -> dict[str, bytes]:
    """JSON and headers of safetensors that would exhaust a reader, or lie to it."""
    header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}

    def tensors(told: Any, body: bytes = b"\0" * 8, length: int | None = None) -> bytes:
        text = told if isinstance(told, bytes) else json.dumps(told).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + body

    return {
        "JSON, 100,000 deep": b"[" * 100_000,
        "JSON, a mapping 100,000 deep": b'{"a":' * 100_000,
        "JSON, a number of a million digits": b'{"step": ' + b"9" * 1_000_000 + b"}",
        "JSON, not finite": b'{"step": 1e999, "x": NaN}',
        "JSON, no mapping": b"[1, 2, 3]",
        "JSON, half a character": b'{"name": "\\ud800"}',
        "JSON, keys twice": b'{"step": 1, "step": 2}',
        "JSON, null": b"null",
        "safetensors, a header beyond the file": tensors(header, length=2**40),
        "safetensors, a header of 2^63 bytes": tensors(header, length=2**63),
        "safetensors, offsets beyond the file": tensors({"w": {**header["w"], "data_offsets": [0, 2**40]}}),
        "safetensors, offsets backwards": tensors({"w": {**header["w"], "data_offsets": [8, 0]}}),
        "safetensors, a hole": tensors({"w": {**header["w"], "data_offsets": [4, 12]}}, b"\0" * 12),
        "safetensors, overlapping": tensors({"v": header["w"], **header}),
        "safetensors, more elements than bytes": tensors({"w": {**header["w"], "shape": [2**62, 4]}}),
        "safetensors, an unknown type": tensors({"w": {**header["w"], "dtype": "OBJECT"}}),
        "safetensors, a type that is a call": tensors({"w": {**header["w"], "dtype": "posix.system"}}),
        "safetensors, a name that is a path": tensors({"../../w": header["w"]}),
        "safetensors, 100,000 deep": tensors(b'{"w":' * 100_000),
        "safetensors, no JSON": tensors(b"{" + b"\xff" * 100),
        "safetensors, a name twice": tensors(b'{"w":' + json.dumps(header["w"]).encode() + b',"w":'
                                             + json.dumps(header["w"]).encode() + b"}"),
        "safetensors, metadata that are no text": tensors({"__metadata__": {"a": [1]}, **header}),
    }  # fmt: skip
