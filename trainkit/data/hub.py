"""Data sets of the Hugging Face hub: downloaded or streamed by `download` and `data import`, never by a training."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from trainkit.data.formats.arrow_tables import Table
from trainkit.errors import UserError

PREFIX = "hf://"
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:/({_PART}))?(?:@({_PART}(?:/{_PART})*))?(?:#(\w[\w.-]*))?")


@dataclass(frozen=True)
class HubName:
    """The parts of `hf://owner/name/configuration@revision#split`."""

    repository: str
    config: str | None
    revision: str | None
    split: str | None


def is_hub(path: str | Path) -> bool:
    """Return whether a path names a data set of the hub: `hf://owner/name`, with `/configuration`, `@revision` and
    `#split` if wanted.
    """
    return str(path).startswith((PREFIX, "hf:/"))  # a Path has lost one stroke


def _whole(path: str | Path) -> str:
    return PREFIX + str(path).removeprefix("hf:").lstrip("/")


def parse(path: str | Path) -> HubName:
    """Divide the name of a set. Raises UserError where it is none."""
    found = _NAME.fullmatch(_whole(path).removeprefix(PREFIX))
    if found is None:
        expected = f"{PREFIX}owner/name, optionally with /configuration, @revision and #split"
        raise UserError(str(path), "not the name of a data set", expected)
    return HubName(*found.groups())


def open_table(path: str | Path, *, network: bool = False, stream: bool = False) -> tuple[Table, str | None, bool]:
    """Open a set: its table, its split, and whether its files are those of the split.

    With `stream` it is read as it comes and nothing is kept; else it is downloaded with `network`, and must be here
    without. Raises UserError where it cannot be had, has several configurations, no such split, or needs code.
    """
    from trainkit.data.formats import dataset_files

    name = parse(path)
    if stream:
        return dataset_files.open_remote(_whole(path), name.repository, name.revision, name.config, name.split)
    folder = download(path, network=network)
    # Its files are links into the folder beside that of the snapshots.
    return dataset_files.open_table(folder, name.split, name.config, folder.parents[1])


def download(path: str | Path, *, network: bool = True) -> Path:
    """Return the folder of the data set, downloaded where it is not there yet (into HF_HOME).

    Only its card and the files of its configuration are taken. Without `network` it is found if an earlier call brought
    it. Raises UserError when it cannot be had.
    """
    name = parse(path)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    path = _whole(path)
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
    from trainkit.data.formats import dataset_files

    builder = dataset_files.remote_builder(path, name.repository, name.revision, name.config)
    found = dataset_files.files_of(builder, path, f"{PREFIX}datasets/{name.repository}@")
    # hf://datasets/owner/name@revision/file, in which the strokes of a revision are escaped.
    files = (file.removeprefix(f"{PREFIX}datasets/{name.repository}@") for files in found.values() for file in files)
    return [*dataset_files.CARDS, *(glob.escape(file.partition("/")[2]) for file in files)]


def is_here(path: str | Path) -> bool:
    """Return whether the data set was downloaded."""
    from trainkit.data.formats.dataset_files import CARDS

    try:
        folder = download(path, network=False)
    except UserError:
        return False
    return any(file.is_file() and file.name not in CARDS for file in folder.rglob("*"))
