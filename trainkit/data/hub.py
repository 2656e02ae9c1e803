"""Data sets of the Hugging Face hub: downloaded or streamed by `download` and `data import`, never by a training.

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

from trainkit.data.formats.table_files import File, class_names
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    from datasets import DatasetBuilder

PREFIX = "hf://"
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:/({_PART}))?(?:@({_PART}(?:/{_PART})*))?(?:#(\w[\w.-]*))?")
_CARDS = ("README.md", ".huggingface.yaml")
_KINDS = {"csv": "CSV", "json": "JSON", "webdataset": "webdataset", "imagefolder": "image folder", "parquet": "parquet"}
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
    files: Mapping[str, Sequence[File]]
    """Those of each split."""
    base: str = ""
    """Where they lie on the hub."""
    delimiter: str | None = None
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of each column that is a ClassLabel."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Rows of splits, where the card says them."""


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
    name = parse(path)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    path = whole(path)
    if network and constants.HF_HUB_OFFLINE:
        network = False
    try:
        folder = snapshot_download(
            name.repository,
            repo_type="dataset",
            revision=name.revision,
            allow_patterns=_files(path, name) if network else None,
            local_files_only=not network,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if constants.HF_HUB_OFFLINE:
            raise UserError(
                path, "is not downloaded, and HF_HUB_OFFLINE is set", remedy="unset it to download it"
            ) from None
        if not network:
            raise UserError(path, "is not downloaded", remedy="download it with `trainkit download RECIPE`") from None
        said = " ".join(str(error).split()).partition(". ")[0][:200]
        expected = "a data set of the hub and a network connection"
        raise UserError(path, f"cannot be downloaded ({said})", expected) from None
    return Path(folder)


def _files(path: str, name: HubName) -> list[str]:
    """Return the files of a configuration and the card, as patterns."""
    found = resolve(path, name.repository, name.revision, name.config)
    # hf://datasets/owner/name@revision/file, in which the strokes of a revision are escaped.
    files = (
        str(file).removeprefix(f"{PREFIX}datasets/{name.repository}@") for some in found.files.values() for file in some
    )
    return [*_CARDS, *(glob.escape(file.partition("/")[2]) for file in files)]


def is_here(path: str | Path) -> bool:
    """Return whether the data set was downloaded."""
    try:
        folder = download(path, network=False)
    except UserError:
        return False
    return any(file.is_file() and file.name not in _CARDS for file in folder.rglob("*"))


def resolve(where: str, path: str, revision: str | None = None, config: str | None = None) -> DataFiles:
    """Find the files of a configuration, of a folder or of a repository of the hub, with `datasets`.

    Raises UserError where there are none or several configurations, where the set needs code, and for files outside of
    it, archives and formats that are not read.
    """
    is_folder = os.path.isdir(path)
    with naming(where):
        how = {} if revision is None else {"revision": revision}
        builder = _configured(path, where, config, is_folder and os.path.isdir(os.path.join(path, config or "")), **how)
    module = next((cls.__module__ for cls in type(builder).__mro__ if ".packaged_modules." in cls.__module__), "?")
    kind = module.split(".")[-1]
    if kind not in _KINDS:
        raise UserError(where, f"files of the kind {kind}", f"one of {', '.join(sorted(_KINDS))}")
    root = path if is_folder else f"{PREFIX}datasets/{path}@"
    files: dict[str, list[File]] = {}
    for split, names in (builder.config.data_files or {}).items():
        for name in sorted(map(str, names)):
            if not os.path.normpath(name).startswith(os.path.normpath(root)) or ".." in PurePosixPath(name).parts:
                raise UserError(where, f"its card names {name[:300]}", "files of the set itself")
            if name.endswith(_PACKED) or "zip://" in name:
                raise UserError(name, "an archive", "files as they are", "unpack it")
            files.setdefault(str(split), []).append(Path(name) if is_folder else name)
    if kind == "parquet":
        _refuse_several(where, files)
    told = builder.info
    sizes = {name: split.num_examples for name, split in (told.splits or {}).items() if split.num_examples}
    classes = {} if told.features is None else class_names(told.features.to_dict())
    delimiter = getattr(builder.config, "sep", None)
    return DataFiles(_KINDS[kind], files, str(builder.base_path), delimiter, classes, sizes)


def _refuse_several(where: str, files: Mapping[str, Sequence[File]]) -> None:
    """Raise UserError where the parquet files of a split lie in several folders: those of configurations."""
    for split, some in files.items():
        inner = (PurePosixPath(file).parent for file in some)
        places = sorted({place.parent.name if place.name == split else place.name for place in inner})
        if len(places) > 1:
            found = f"several configurations: {', '.join(places[:8])}"
            raise UserError(where, found, "one", "name it: hf://owner/name/CONFIGURATION")


def _load(path: str, **how: Any) -> DatasetBuilder:
    import datasets

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it raises is told once
    return datasets.load_dataset_builder(path, **how)


def _configured(path: str, where: str, config: str | None, is_folder: bool | None, **how: Any) -> DatasetBuilder:
    """Load a folder or repository: a configuration of its card, else a folder of it by that name."""
    if config is None or not is_folder:
        try:
            return _load(path, name=config, **how)
        except ValueError as error:
            names = re.findall(r"'([^']+)'", str(error).partition("[")[2].partition("]")[0])
            if "onfig" not in str(error) or not (names or config):
                raise
            if config is None or (names and names != ["default"]):
                found = f"no configuration {config!r}" if config else "several configurations"
                example = f"{where.partition('#')[0]}/{names[0]}"
                raise UserError(where, f"{found}: there is {few(names, 10)}"[:500], "one", f"as in {example}") from None
    return _load(path, data_dir=config, **how)


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Turn what `datasets` raises into UserErrors of one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _told(where, error) from None


def _told(where: str, error: Exception) -> UserError:
    text, name = " ".join(str(error).split()), type(error).__name__
    script = re.search(r"scripts are no longer supported, but found (\S+)", text)
    if script:
        remedy = "use its parquet files, if the hub has them: hf://owner/name@refs/convert/parquet"
        return UserError(where, f"needs its own code to be read ({script[1]})", "data files; no code is run", remedy)
    if name == "DatasetNotFoundError":
        found = "requires accepting a form on the hub" if "gated" in text else "is not on the hub, or requires a login"
        return UserError(where, found, "the name of a set", "log in with `hf auth login`, or set HF_TOKEN")
    if name in ("EmptyDatasetError", "DataFilesNotFoundError"):
        return UserError(where, f"no files of data ({text[:200]})", f"one of {', '.join(sorted(_KINDS.values()))}")
    if isinstance(error, ConnectionError):
        return UserError(where, f"cannot be reached ({text[:200]})", "a data set of the hub and a network connection")
    return UserError(where, f"cannot be read ({name}: {text[:300]})", "a set that `datasets` reads")
