"""No file runs code, by whatever door it comes in; and every door is known.

Each payload of `malicious_files` is laid under each name that trainkit opens, and given to each function that opens it:
an answer or a UserError, and the payload's sentinel never appears. The last tests hold that the list of doors is whole.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import malicious_files
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from runs import ROOT

from trainkit.analysis import saved_rows
from trainkit.checkpoint import safe_load, storage, verification
from trainkit.cli import main
from trainkit.config import loader
from trainkit.data import evaluation_sets, import_images, leakage, pairs_csv, sources, table
from trainkit.data.formats import image_decode, insightface_bin, nifti, recordio, table_files
from trainkit.data.people import sources as people_sources
from trainkit.data.people import tokenizer
from trainkit.data.rows import row_files
from trainkit.data.scenes import files, label_maps, mask_store
from trainkit.data.scenes import sources as scene_sources
from trainkit.data.storage import image_store
from trainkit.data.volumes import sources as volume_sources
from trainkit.data.volumes import volume_store
from trainkit.environment import process
from trainkit.errors import UserError
from trainkit.export import export
from trainkit.files import sha256
from trainkit.inference import trained_model
from trainkit.tracking import journal, run_folder, store


def _records(source: Any) -> None:
    for record in source.records():
        if not isinstance(record.data, np.ndarray):
            data = record.data if isinstance(record.data, bytes) else record.data.read_bytes()
            image_decode.decode(data, record.where)


def _evaluation(path: Path) -> None:
    _records(evaluation_sets.recognise(path).read()[0])


def _cells(content: table_files.Content) -> Iterator[Any]:
    return content.read(list(content.columns))


def _people(path: Path) -> None:
    people_sources.find(str(path))


def _store(path: Path) -> None:
    store.Store(path.parent, f"sqlite:///{path}").prepare()


FILES: dict[str, Callable[[Path], Any]] = {
    "weights.read_tensors": safe_load.read_tensors,
    "weights.read_centres": lambda path: safe_load.read_centres(path, 2, 2),
    "sources.open_source": lambda path: _records(sources.open_source(path)),
    "evaluations.recognise": _evaluation,
    "insightface_bin.read_bin": insightface_bin.read_bin,
    "pairs.read_csv": pairs_csv.read_csv,
    "pictures.decode": lambda path: image_decode.decode(path.read_bytes(), str(path)),
    "table.open_table": lambda path: list(_cells(table.open_table(path).content)),
    "table_files.open_streams": lambda path: list(_cells(table_files.open_streams([path]))),
    "recordio.read_index": recordio.read_index,
    "people_sources.find": _people,
    "scene_sources.open_scenes": lambda path: scene_sources.open_scenes(str(path)),
    "label_maps.read_names": label_maps.read_names,
    "volume_sources.open_volumes": volume_sources.open_volumes,
    "nifti.read_header": nifti.read_header,
    "nifti.read_image": nifti.read_image,
    "tokens.read_merges": tokenizer.read_merges,
    "hashed.mapped": row_files.mapped,
    "duplicates._kept": lambda path: leakage._kept(path, np.arange(1)),
    "config.load": loader.load,
    "journal.read": journal.read,
    "launcher._processes_in": process._processes_in,
    "saved_rows._read": lambda path: saved_rows._read(path, ()),
    "store.Store.prepare": _store,
}
"""Functions that are given one file, whose name somebody else chose."""


@pytest.fixture(scope="module")
def hostile_files(tmp_path_factory) -> Iterator[tuple[Path, list[malicious_files.Payload]]]:
    folder = tmp_path_factory.mktemp("payloads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{malicious_files.false_ghostscript(folder / 'bin')}:{os.environ['PATH']}")
        yield folder, malicious_files.payloads(folder)


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ran*"))


def knock(door: Callable[[Path], Any], path: Path) -> str:
    """What a door says of a file; anything but an answer or a UserError is a failure of the test."""
    try:
        door(path)
    except UserError as error:
        assert len(str(error)) < 2000, "a message that floods the terminal"
        return "refused"
    return "answered"


def test_there_are_fifty_payloads_and_more_and_each_does_run_by_the_reader_it_was_made_for(hostile_files):
    folder, payloads = hostile_files
    assert len(payloads) >= 50
    aside = folder / "unsafely"
    aside.mkdir()
    for number, payload in enumerate(payloads):
        path = aside / f"x{payload.suffix}"
        path.write_bytes(payload.data)
        with contextlib.suppress(Exception):  # it has run by then; what is left of it is nonsense
            payload.unsafely(path)
        made = malicious_files.sentinel(folder, number)
        for _ in range(3000):  # `popen` does not wait for its command
            if made.exists():
                break
            time.sleep(0.02)
        assert made.exists(), payload.name
        made.rmdir() if made.is_dir() else made.unlink()
    assert ran(folder) == []


@pytest.mark.parametrize("door", FILES)
def test_no_payload_runs_by_any_door_for_a_file(hostile_files, door, tmp_path):
    folder, payloads = hostile_files
    said = []
    for payload in payloads:
        names = {payload.suffix, *_SUFFIXES.get(door, ())}
        for suffix in names:
            path = tmp_path / f"x{suffix}"
            path.write_bytes(payload.data)
            said.append(knock(FILES[door], path))
            path.unlink(missing_ok=True)
    for content in malicious_files.bombs().values():
        for suffix in {".json", ".safetensors", *_SUFFIXES.get(door, ())}:
            path = tmp_path / f"x{suffix}"
            path.write_bytes(content)
            said.append(knock(FILES[door], path))
    assert ran(folder) == []
    assert "refused" in said or door in _NEVER_REFUSE


_SUFFIXES = {
    "sources.open_source": (".rec", ".parquet"),
    "table.open_table": (".csv", ".json", ".jsonl", ".tar", ".parquet"),
    "pictures.decode": (".png", ".pgm"),
    "evaluations.recognise": (".bin", ".csv"),
    "people_sources.find": (".csv", ".parquet"),
    "scene_sources.open_scenes": (".csv", ".txt"),
    "volume_sources.open_volumes": (".nii", ".nii.gz"),
    "nifti.read_header": (".nii", ".nii.gz"),
    "nifti.read_image": (".nii", ".nii.gz"),
    "tokens.read_merges": (".gz", ".txt"),
    "config.load": (".yaml", ".yml"),
    "launcher._processes_in": (".yaml",),
    "store.Store.prepare": (".db",),
}
"""Names beside a payload's own, by which a door takes a file for one of its form."""
_NEVER_REFUSE = {"duplicates._kept", "launcher._processes_in", "saved_rows._read", "journal.read"}
"""What they cannot use they leave alone: a cache is made anew, a launcher's config or a damaged journal counts for
nothing."""


# Sets of several files, one of which is a payload, under a manifest that its maker wrote anew


def _faces(root: Path) -> Path:
    draw = np.random.default_rng(0)
    for person in ("anna", "ben"):
        (root / person).mkdir(parents=True)
        for k in range(2):
            pixels = draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / person / f"{k}.png")
    (root / "pairs.csv").write_text("path_a,path_b,same\nanna/0.png,anna/1.png,1\nanna/0.png,ben/0.png,0\n")
    return root


def _packed(root: Path) -> Path:
    import_images.import_faces(_faces(root / "from"), root / "set", image_size=16)
    return root / "set"


def _packed_evaluation(root: Path) -> Path:
    import_images.import_evaluation(_faces(root / "from") / "pairs.csv", root / "set", image_size=16)
    return root / "set"


def _masks(root: Path) -> Path:
    import scene_sets

    labels = label_maps.numbered(
        scene_sets.NAMES[: scene_sets.CLASSES], colours=scene_sets.COLOURS[: scene_sets.CLASSES]
    )
    found = scene_sources.open_scenes(f"{scene_sets.camvid(root / 'from', (2, 1))}#train")
    return mask_store.pack_masks_once(found, labels).path


def _volumes(root: Path) -> Path:
    from tests.data.volumes.test_volume_store import write

    return write(root / "set", cases=2).path


def _checkpoint(root: Path) -> Path:
    return storage.write(root, 3, {"model": {"w": torch.ones(2)}}, {"journal": 0, "best": []}, "a: 1\n")


def _saved(root: Path) -> Path:
    """What `Dataset.save_to_disk` of Hugging Face `datasets` leaves."""
    import pyarrow as pa

    root.mkdir()
    png = (ROOT / "docs" / "images" / "model.png").read_bytes()
    table = pa.table({"image": pa.array([png], pa.binary()), "label": [0]})
    with pa.ipc.new_stream(str(root / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (root / "dataset_info.json").write_text("{}")
    return root


def _decathlon(root: Path) -> Path:
    import organ_volumes

    return organ_volumes.put_set(root)


def _record_io(root: Path) -> Path:
    root.mkdir()
    for name in ("train.rec", "train.idx", "property"):
        (root / name).write_bytes(b"")
    return root


def _ijb(root: Path) -> Path:
    from tests.data.test_evaluation_sets import insightface

    return insightface(root)


def _colours(root: Path) -> Path:
    import scene_sets

    scene_sets.camvid(root, (2, 1))
    (root / "classes.json").write_text('{"a": [0, 0, 0], "b": [1, 1, 1]}')
    return root


def _people_layout(root: Path) -> Path:
    import people_sets

    people_sets.orbench(root)
    return root


def _run(root: Path) -> Path:
    root.mkdir()
    about = {"name": root.name, "recipe": "toy", "recipe_hash": "ab", "seed": 0, "started": 1.0}
    (root / "run.json").write_text(json.dumps(about))
    for name, text in {
        "meta.json": "{}",
        "recipe.yaml": "name: x\n",
        "members.json": "{}",
        "models.json": "{}",
    }.items():
        (root / name).write_text(text)
    (root / "journal.jsonl").write_text("")
    return root


def _open_run(path: Path) -> None:
    folder = run_folder.RunFolder(path)
    asked = [folder.info, lambda: trained_model.read_meta(folder), lambda: run_folder.summary(folder)]
    asked += [lambda: journal.read(folder.journal), lambda: loader.load(folder.recipe)]
    asked += [lambda: store.Store(path.parent, "sqlite:////nowhere.db")._known()]
    said = {knock(lambda _, ask=ask: ask(), path) for ask in asked}
    if "refused" in said:
        raise UserError(str(path), "one of these is refused")


def _exported(root: Path) -> Path:
    root.mkdir()
    safe_load.write_tensors(root / "model.safetensors", {"w": torch.ones(1)})
    told = {
        "recipe": "name: x\n",
        "meta": {},
        "sha256": {"model.safetensors": sha256(root / "model.safetensors")},
    }
    (root / "model.json").write_text(json.dumps(told))
    return root


def _first_volume(path: Path) -> None:
    nifti.read_image(volume_sources.open_volumes(path).cases[0].image)


def _scenes(path: Path) -> None:
    for scene in scene_sources.open_scenes(f"{path}#train").scenes:
        files.header(scene)
        files.read_mask(scene)


def _read_checkpoint(path: Path) -> None:
    found, problems = storage.newest_valid(path.parent)
    verification.describe(path)
    if found is None and problems:
        raise UserError(str(path), problems[0])
    storage.read(path)


SETS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "faces, packed": (_packed, lambda at: (_records(sources.open_source(at)), image_store.Packed(at).class_names)),
    "evaluation, packed": (_packed_evaluation, _evaluation),
    "masks, packed": (_masks, lambda path: mask_store.PackedMasks(path).mask(0)),
    "volumes, packed": (_volumes, lambda path: volume_store.PackedVolumes(path).changed()),
    "checkpoint": (_checkpoint, _read_checkpoint),
    "saved by datasets": (_saved, lambda path: _records(sources.open_source(path))),
    "volumes of the Decathlon": (_decathlon, _first_volume),
    "MXNet records": (_record_io, lambda path: _records(sources.open_source(path))),
    "templates": (_ijb, _evaluation),
    "scenes with names": (_colours, _scenes),
    "people by JSON": (_people_layout, _people),
    "a run": (_run, _open_run),
    "an export": (_exported, export.load),
}  # fmt: skip


def _mend_manifest(path: Path, name: str) -> None:
    """Let a manifest say of a file what is true of it now, as whoever changed the file could."""
    file = path / "manifest.json"
    if (path / storage.MANIFEST).is_file() and name != storage.MANIFEST:
        files = {n: verification.fingerprint(path / n) for n in sorted(os.listdir(path)) if n != storage.MANIFEST}
        (path / storage.MANIFEST).write_bytes(verification.encoded_manifest(files))
    elif name == "model.safetensors" and (path / "model.json").is_file():
        told = json.loads((path / "model.json").read_text())
        told["sha256"]["model.safetensors"] = sha256(path / name)
        (path / "model.json").write_text(json.dumps(told))
    elif file.is_file() and name != "manifest.json":
        manifest = json.loads(file.read_text())
        if name in manifest["files"]:
            manifest["files"][name] = {
                "bytes": (path / name).stat().st_size,
                "sha256": sha256(path / name),
            }
            kinds = image_store.Packed, volume_store.PackedVolumes, mask_store.PackedMasks
            kind = next(kind for kind in kinds if kind.FORM.format == manifest["format"])
            manifest["digest"] = kind.digest_of(manifest)
            file.write_text(json.dumps(manifest))


@pytest.mark.parametrize("kind", SETS)
def test_no_payload_runs_in_place_of_a_file_of_a_set(hostile_files, kind, tmp_path, cache):
    folder, payloads = hostile_files
    make, door = SETS[kind]
    whole = make(tmp_path / "whole")
    knock(door, whole)
    files = [file for file in sorted(whole.rglob("*")) if file.is_file()]
    names = {(file.parent if file.suffix in image_decode.SUFFIXES else file): file for file in files}  # one of its like
    names = [file.relative_to(whole).as_posix() for file in names.values()]
    assert names
    chosen = [payload.data for payload in payloads if payload.name in _ONE_OF_EACH]
    assert len(chosen) == len(_ONE_OF_EACH)
    refused = 0
    for name in names:
        sound = (whole / name).read_bytes()
        told = {file: file.read_bytes() for file in whole.glob("*.json")}
        for content in [*chosen, *malicious_files.bombs().values()]:
            (whole / name).write_bytes(content)
            _mend_manifest(whole, name)
            refused += knock(door, whole) == "refused"
            (whole / name).write_bytes(sound)
            for file, text in told.items():
                file.write_bytes(text)
    assert ran(folder) == [] and refused >= len(chosen)


_ONE_OF_EACH = {
    "pickle 2 of os.system", "pickle 5 of eval", "torch zip, os.system beside tensors", "torch legacy, os.system",
    "npy object, os.system", "npz object, os.system", "joblib, packed", "pickle in gzip",
    "InsightFace bin, os.system", "YAML apply", "parquet extension type", "arrow extension type", "PostScript",
}  # fmt: skip


# What would happen without the walls


def test_without_the_walls_of_the_reader_of_weights_its_payloads_run(hostile_files, tmp_path, monkeypatch):
    folder, payloads = hostile_files
    real = torch.load
    monkeypatch.setattr(safe_load, "_scan", lambda pickle, where: pickle.read())
    chosen = [(n, p) for n, p in enumerate(payloads) if p.name.startswith("torch zip, os.system")]
    assert len(chosen) > 3
    for number, payload in chosen:
        path = tmp_path / "x.pth"
        path.write_bytes(payload.data)
        knock(safe_load.read_tensors, path)  # the second wall stands
        assert ran(folder) == []
        monkeypatch.setattr(torch, "load", lambda file, **words: real(file, weights_only=False))
        knock(safe_load.read_tensors, path)
        assert ran(folder) == [f"{number}.ran"]
        malicious_files.sentinel(folder, number).unlink()
        monkeypatch.setattr(torch, "load", real)


def test_with_a_common_reader_in_place_of_ours_the_payloads_run(hostile_files, tmp_path, monkeypatch):
    """By name: what a colleague might write in a hurry."""
    folder, payloads = hostile_files
    common = {
        "InsightFace bin, eval": lambda path: monkeypatch.setattr(
            insightface_bin, "evaluate", lambda data, where: __import__("pickle").loads(data)
        ),
        "PostScript": lambda path: monkeypatch.setattr(image_decode, "FORMATS", None),
    }
    doors = {"InsightFace bin, eval": "insightface_bin.read_bin"}
    for number, payload in enumerate(payloads):
        if payload.name in common:
            path = tmp_path / f"x{payload.suffix}"
            path.write_bytes(payload.data)
            door = FILES[doors.get(payload.name, "pictures.decode")]
            knock(door, path)
            assert ran(folder) == []
            common.pop(payload.name)(path)
            with contextlib.suppress(Exception):  # it has run by then
                door(path)
            assert ran(folder) == [f"{number}.ran"], payload.name
            malicious_files.sentinel(folder, number).unlink()
    assert not common


# The command line: files in its words


@pytest.mark.slow
def test_no_payload_runs_in_the_words_of_a_command(hostile_files, tmp_path, monkeypatch, store):
    folder, payloads = hostile_files
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    chosen = [payload for payload in payloads if payload.name in _ONE_OF_EACH]
    for payload in chosen:
        path = Path(f"x{payload.suffix}")
        path.write_bytes(payload.data)
        Path("x.bin").write_bytes(payload.data)
        for words in (
            ["data", "import", path, "out"], ["data", "import", "x.bin", "out", "--evaluation"],
            ["data", "import", path, "out", "--size", "own"],
            ["data", "verify", path], ["show", path], ["check", path], ["run", path],
            ["download", path], ["predict", "x", path, "out"], ["export", path, "out"], ["compare", path, path],
            ["run", "adadistill", "data.train=x.bin"], ["data", "check", "adadistill", f"data.train={path}"],
            ["run", "adadistill", "--score", path, f"data.train={path}", "data.evaluate={a: x.bin}"],
        ):  # fmt: skip
            done = CliRunner().invoke(main.main, [str(word) for word in words])
            assert done.exit_code == 2, (words, done.output, done.exception)
            assert not Path("out").exists()
    assert ran(folder) == []


# Code that lies where a command is started


HIDDEN = ("mlflow", "json", "trainkit", "click", "uvicorn", "torch", "sitecustomize")


def lay_modules(folder: Path, sentinels: Path) -> None:
    """Modules by the names of others, which make sentinels when they are imported."""
    folder.mkdir(exist_ok=True)
    for name in HIDDEN:
        (folder / f"{name}.py").write_text(f"open({str(sentinels / f'{name}.ran')!r}, 'w').close()\n")


# The list of doors is whole

PARSERS = {
    "torch.load", "safetensors.torch.load", "safetensors.torch.load_file", "safetensors.safe_open", "numpy.load",
    "numpy.fromfile", "numpy.memmap", "numpy.genfromtxt", "numpy.loadtxt", "numpy.lib.format.open_memmap",
    "json.load", "json.loads", "yaml.parse", "yaml.compose", "yaml.safe_load", "csv.reader", "csv.DictReader",
    "PIL.Image.open", "gzip.open", "gzip.GzipFile", "zipfile.ZipFile", "tarfile.open", "sqlite3.connect",
    "onnx.load", "pickletools.genops", "onnxruntime.InferenceSession", "timm.create_model", "mmap.mmap",
    "zlib.decompress", "zlib.decompressobj", "tomllib.load", "tomllib.loads", "xml.etree.ElementTree.parse",
    "configparser.ConfigParser", "ast.literal_eval", "importlib.import_module", "lzma.open", "bz2.open",
    "lzma.LZMAFile", "bz2.BZ2File",
    "numpy.load_library", "scipy.io.loadmat", "huggingface_hub.snapshot_download", "huggingface_hub.hf_hub_download",
    "datasets.load_dataset",
    "datasets.load_dataset_builder", "datasets.load_from_disk", "fsspec.open", "mlflow.artifacts.download_artifacts",
}  # fmt: skip
ENDS = ("read_table", "read_schema", "read_metadata", "ParquetFile", "open_stream", "open_file", "memory_map",
        "read_csv", "frombuffer", "fromstring", "decode_jpeg", "read_feather", "load_model", "download_artifacts",
        "imread", "from_pretrained", "RestrictedUnpickler", "Unpickler", "array_from_file",
        "load_state_dict_from_url", "dcmread", "read_file_meta_info")  # fmt: skip
"""Calls that make something of the bytes of a file, by full name or by their last word."""

DOORS: dict[str, set[str]] = {
    # Other people's weights and networks
    "weights.read_tensors": {"checkpoint/safe_load.py torch.load",
                             "checkpoint/safe_load.py safetensors.torch.load_file",
                             "checkpoint/safe_load.py zipfile.ZipFile", "checkpoint/safe_load.py pickletools.genops"},
    # Other people's images, volumes, tables and lists
    "pictures.decode": {"data/formats/image_decode.py PIL.Image.open",
                        "data/formats/image_decode.py decode_jpeg"},
    "scenes with names": {"data/formats/image_decode.py PIL.Image.open"},
    "label_maps.read_names": {"data/folders.py json.loads"},
    "scene_sources.open_scenes": {"data/formats/table_files.py csv.reader"},
    "insightface_bin.read_bin": {"data/formats/insightface_bin.py RestrictedUnpickler",
                                 "data/formats/insightface_bin.py pickletools.genops"},
    "nifti.read_image": {"data/formats/nifti.py gzip.GzipFile",
                         "data/formats/nifti.py numpy.frombuffer"},
    "volumes of the Decathlon": {"data/folders.py json.loads"},
    "MXNet records": {"data/formats/recordio.py numpy.frombuffer"},
    "recordio.read_index": {"data/formats/recordio.py numpy.loadtxt"},
    "table.open_table": {"data/formats/table_files.py csv.reader", "data/formats/table_files.py json.loads",
                         "data/formats/table_files.py pyarrow.parquet.ParquetFile",
                         "data/formats/webdataset.py json.loads", "data/formats/webdataset.py tarfile.open"},
    "saved by datasets": {"data/formats/table_files.py pyarrow.memory_map",
                          "data/formats/table_files.py pyarrow.ipc.open_stream",
                          "data/formats/table_files.py pyarrow.ipc.MessageReader.open_stream"},
    "people by JSON": {"data/folders.py json.loads"},
    "templates": {"data/formats/ijb.py pyarrow.csv.read_csv"},
    # Sets that trainkit wrote, and somebody else may have written anew
    "hashed.mapped": {"data/rows/row_files.py numpy.lib.format.open_memmap"},
    "faces, packed": {"data/rows/row_files.py json.loads", "data/rows/reader.py mmap.mmap",
                      "data/rows/reader.py numpy.frombuffer"},
    "masks, packed": {"data/scenes/mask_store.py zlib.decompressobj", "data/scenes/mask_store.py numpy.frombuffer"},
    "volumes, packed": {"data/volumes/volume_store.py json.loads"},
    "duplicates._kept": {"data/leakage.py numpy.load"},
    "checkpoint": {"checkpoint/storage.py safetensors.torch.load", "checkpoint/verification.py json.loads",
                   "checkpoint/verification.py safetensors.safe_open"},
    "an export": {"data/folders.py json.loads"},
    "a run": {"tracking/run_folder.py json.loads", "tracking/journal.py json.loads"},
    "store.Store.prepare": {"tracking/mlflow_client.py sqlite3.connect"},
    "saved_rows._read": {
        "analysis/saved_rows.py pyarrow.parquet.read_schema", "analysis/saved_rows.py pyarrow.parquet.read_table",
    },
    # Recipes, and configs of launchers
    "config.load": {"config/yaml_reader.py yaml.parse"},
}  # fmt: skip
"""By which door payloads come to a call: `file call`."""
REASONS = {
    "a file of this package": {"data/scenes/label_maps.py json.loads"},
    "an archive; hostile ones are in tests/autoconfig/test_download.py and support/archive_bombs.py": {
        "autoconfig/archive.py zipfile.ZipFile",
    },
    "where the records of a file are, in the cache, read without pickle": {"data/formats/recordio.py numpy.load"},
    "the image in a record that `recordio.unpack` has checked": {"data/storage/record_store.py numpy.frombuffer"},
    "a journal of what was written, whose batches are compared with their CRC-32": {
        "data/rows/writer.py json.loads",
    },
    "memory of this program's own processes, and what they tell each other": {
        "data/loader/batch_memory.py json.loads", "data/loader/batch_memory.py mmap.mmap",
        "data/loader/batch_memory.py torch.frombuffer", "data/import_images.py numpy.frombuffer",
        "speed/clock.py numpy.frombuffer", "tracking/tracker.py PIL.Image.open",
    },
    "a file that this command wrote a moment before": {
        "export/images.py timm.create_model", "export/files.py onnxruntime.InferenceSession",
        "diagnostics/stepped_process.py numpy.load",
    },
    "a database that the check of `store.Store.prepare` let pass": {"tracking/relocate.py sqlite3.connect"},
    "a name of the library's own list, with random weights or tensors that `weights` has read": {
        "models/bisenet.py timm.create_model", "models/timm_classifier.py timm.create_model",
        "models/emcad.py timm.create_model",
    },
    "files of data, read by `table.open_table`": {"data/hub.py huggingface_hub.snapshot_download"},
    "a card, whose values are words; `datasets` lists the files that it names": {
        "data/hub.py datasets.load_dataset_builder",
    },
    "model.safetensors alone, read by `weights.read_tensors`": {
        "checkpoint/timm_weights.py huggingface_hub.hf_hub_download"
    },
    "a file of the store, read by the next call": {
        "analysis/saved_rows.py client.download_artifacts",
        "tracking/store.py mlflow.artifacts.download_artifacts",
    },
    "a module of trainkit by a name in its source": {
        *(f"{file} importlib.import_module" for file in (
            "config/validation.py", "data/images/dataset.py", "data/people/sources.py", "data/scenes/sources.py",
            "data/volumes/dataset.py",
            "data/kinds.py",
        )),
    },
    "a package that the command line names: it is trusted": {"config/loader.py importlib.import_module"},
    "torch, by a name in its source": {"tensors.py importlib.import_module"},
}  # fmt: skip
"""Why no payload is laid before a call."""
OTHER_DOORS = {
    "weights.read_centres", "sources.open_source", "evaluations.recognise", "table_files.open_streams",
    "pairs.read_csv", "people_sources.find",
    "recordio.read_index", "volume_sources.open_volumes", "nifti.read_header", "journal.read",
    "launcher._processes_in", "evaluation, packed", "tokens.read_merges",
}  # fmt: skip
"""Doors to calls that others above lead to."""


def reads() -> dict[str, int]:
    """Every such call in the package, as `file call`, and a line of it."""
    found = {}
    for file in sorted((ROOT / "trainkit").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

        def dotted(node: ast.expr, names=names) -> str:
            if isinstance(node, ast.Name):
                return names.get(node.id, node.id)
            return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"

        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                ours = called.startswith("trainkit.") or (called.startswith("?.") and not called.endswith(ENDS))
                if not ours and (called in PARSERS or called.rpartition(".")[2] in ENDS):
                    found[f"{file.relative_to(ROOT / 'trainkit').as_posix()} {called}"] = node.lineno
    return found


def test_every_call_that_reads_a_format_is_in_the_table():
    there = reads()
    behind, known = ({p for places in table for p in places} for table in (DOORS.values(), REASONS.values()))
    # JSON of a run or its store is values and no more, and `a run` looks at what comes of mistakes in it.
    values = {place for place in there if place.endswith((" json.loads", " json.load")) and "data/" not in place}
    new = [f"{place} (line {line})" for place, line in there.items() if place not in behind | known | values]
    assert not new, "say in DOORS by which door payloads reach it, or in REASONS why none has to"
    assert behind <= set(there), "gone from the source"


def test_every_door_of_the_table_is_tried_above():
    tried = {*FILES, *SETS}
    assert set(DOORS) | OTHER_DOORS == tried


def test_the_scan_sees_a_new_reader(tmp_path, monkeypatch):
    (tmp_path / "trainkit").mkdir()
    (tmp_path / "trainkit" / "new.py").write_text(
        "import numpy as np\nfrom pandas import read_feather as r\nnp.load(x); r(x)\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert reads() == {"new.py numpy.load": 3, "new.py pandas.read_feather": 3}
