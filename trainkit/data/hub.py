"""Data sets of the Hugging Face hub: downloaded by `download` and `data import`, never by a training.

`datasets` finds the files of a set's configuration and splits, here or on the hub, and the names of its classes. What
it would do beside that is left out: files elsewhere than in the set, archives that it would unpack, formats that are no
tables of images.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from trainkit.data.formats.table_files import class_names
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    from datasets import DatasetBuilder

PREFIX = "hf://"
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:/({_PART}))?(?:@({_PART}(?:/{_PART})*))?(?:#(\w[\w.-]*))?")
_CARDS = ("README.md", ".huggingface.yaml")
_KINDS = {"csv": "CSV", "json": "JSON", "webdataset": "webdataset", "imagefolder": "image folder", "parquet": "parquet"}
_CONFIGURATION = "name it: hf://owner/name/CONFIGURATION"
_PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst", ".lz4", ".7z")


@dataclass(frozen=True)
class HubName:
    """The parts of `hf://owner/name/configuration@revision#split`."""

    repository: str
    config: str | None
    revision: str | None
    split: str | None


@dataclass(frozen=True)
class DataFiles:
    """Files of a set of images."""

    kind: str
    """Their form: CSV, JSON, parquet, webdataset or image folder."""
    files: Mapping[str, Sequence[Path]]
    """Those of each split."""
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of each column that is a ClassLabel."""


def is_hub(path: str | Path) -> bool:
    """Return whether a path names a data set of the hub: `hf://owner/name`, with `/configuration`, `@revision` and
    `#split` if wanted.
    """
    return str(path).startswith((PREFIX, "hf:/"))  # a Path has lost one stroke


def whole(path: str | Path) -> str:
    """Return the name of a set as it was before a Path took one of its strokes."""
    return PREFIX + str(path).removeprefix("hf:").lstrip("/")


def parse(path: str | Path) -> HubName:
    """Divide the name of a set. Raises UserError where it is none."""
    found = _NAME.fullmatch(whole(path).removeprefix(PREFIX))
    if found is None:
        expected = f"{PREFIX}owner/name, optionally with /configuration, @revision and #split"
        raise UserError(str(path), "not the name of a data set", expected)
    return HubName(*found.groups())


def download(path: str | Path, *, network: bool = True) -> Path:
    """Return the folder of the data set, downloaded where it is not there yet (into HF_HOME).

    Only its card and the files of its configuration are taken. Without `network` it is found if an earlier call brought
    it. Raises UserError when it cannot be had.
    """
    name, where = parse(path), whole(path)
    from huggingface_hub import constants, snapshot_download

    network = network and not constants.HF_HUB_OFFLINE
    try:
        folder = snapshot_download(
            name.repository,
            repo_type="dataset",
            revision=name.revision,
            allow_patterns=_patterns(name, where) if network else None,
            local_files_only=not network,
        )
    except (ValueError, OSError) as error:  # of which those of huggingface_hub are
        said = " ".join(str(error).split())[:200] if network else "not here, and the network is not used"
        remedy = "download it with `trainkit download RECIPE`, without HF_HUB_OFFLINE"
        raise UserError(where, f"is not downloaded ({said})", "a data set of the hub", remedy) from None
    return Path(folder)


def _patterns(name: HubName, where: str) -> list[str]:
    """Return the files of a configuration and the card, as patterns."""
    with _naming(where):
        builder = _builder(name.repository, name.config, revision=name.revision)
    _check_kind(builder, where)
    # hf://datasets/owner/name@revision/file, in which the strokes of a revision are escaped.
    root = f"{PREFIX}datasets/{name.repository}@"
    files = (file.removeprefix(root).partition("/")[2] for _, file in _data_files(builder, where, root))
    return [*_CARDS, *map(glob.escape, files)]


def is_here(path: str | Path) -> bool:
    """Return whether the data set was downloaded."""
    try:
        folder = download(path, network=False)
    except UserError:
        return False
    return any(file.is_file() and file.name not in _CARDS for file in folder.rglob("*"))


def resolve(folder: Path, config: str | None) -> DataFiles:
    """Find the files of a configuration of a set that was downloaded.

    Raises UserError where there are none or several configurations, where the set needs code, and for files outside of
    it, archives and formats that are not read.
    """
    where = str(folder)
    with _naming(where):
        builder = _builder(where, config)
    kind = _check_kind(builder, where)
    files: dict[str, list[Path]] = {}
    for split, name in _data_files(builder, where, where):
        files.setdefault(split, []).append(Path(name))
    for some in files.values() if kind == "parquet" else ():
        if len(places := sorted({file.parent.name for file in some})) > 1:
            raise UserError(where, f"several configurations: {few(places)}", "one", _CONFIGURATION)
    features = builder.info.features
    return DataFiles(_KINDS[kind], files, {} if features is None else class_names(features.to_dict()))


def _check_kind(builder: DatasetBuilder, where: str) -> str:
    module = next((cls.__module__ for cls in type(builder).__mro__ if ".packaged_modules." in cls.__module__), "?")
    kind = module.split(".")[-1]
    if kind not in _KINDS:
        raise UserError(where, f"files of the kind {kind}", f"one of {', '.join(sorted(_KINDS))}")
    return kind


def _data_files(builder: DatasetBuilder, where: str, root: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a configuration with their splits. Raises UserError for those that lie elsewhere."""
    for split, names in (builder.config.data_files or {}).items():
        for name in sorted(map(str, names)):
            if not os.path.normpath(name).startswith(os.path.normpath(root)) or ".." in PurePosixPath(name).parts:
                raise UserError(where, f"its card names {name[:300]}", "files of the set itself")
            if name.endswith(_PACKED) or "zip://" in name:
                raise UserError(name, "an archive", "files as they are", "unpack it")
            yield str(split), name


def _builder(path: str, config: str | None, **how: Any) -> DatasetBuilder:
    """Load a folder or repository: a configuration of its card, else a folder of it by that name."""
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it raises is told once
    if config is None or not os.path.isdir(os.path.join(path, config)):
        try:
            return datasets.load_dataset_builder(path, name=config, **how)
        except ValueError:
            if config is None:
                raise
    return datasets.load_dataset_builder(path, data_dir=config, **how)


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Turn what `datasets` raises into UserErrors of one sentence."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        expected = f"one configuration of {', '.join(sorted(_KINDS))}, read without code of its own"
        remedy = f"{_CONFIGURATION}; where it needs a login, `hf auth login`"
        raise UserError(where, f"cannot be read ({said})", expected, remedy) from None
