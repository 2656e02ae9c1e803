"""Data sets of the Hugging Face hub: downloaded by `fetch` and `data import`, never by a training."""

from __future__ import annotations

import re
from pathlib import Path

from trainkit.errors import UserError

PREFIX = "hf://"
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?(?:#(\w[\w.-]*))?")


def is_hub(path: str | Path) -> bool:
    """Return whether a path names a data set of the hub: `hf://owner/name`, with `@revision` and `#split` if wanted."""
    return str(path).startswith((PREFIX, "hf:/"))  # a Path has lost one stroke


def split(path: str | Path) -> str | None:
    """Return the split that a path names, `test` of `hf://owner/name#test`."""
    return _parts(path)[2]


def download(path: str | Path, *, network: bool = True) -> Path:
    """Return the folder of the data set's parquet files, downloaded where they are not there yet (into HF_HOME).

    Only parquet files are taken: scripts and archives stay where they are. Without `network` it is found if an earlier
    call brought it. Raises UserError when it cannot be had.
    """
    repository, revision, _ = _parts(path)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    path = str(path)
    try:
        folder = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=["*.parquet", "**/*.parquet"],
            local_files_only=not network,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if not network:
            raise UserError(path, "is not here yet", remedy="download it with `trainkit download RECIPE`") from None
        said = " ".join(str(error).split()).partition(". ")[0][:200]
        text = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else said
        raise UserError(path, f"cannot be downloaded ({text})", "a data set of the hub and a network") from None
    return Path(folder)


def tables(path: str | Path, *, network: bool = True) -> Path:
    """Find the folder within the download that holds the parquet files: itself, its `data`, or its only configuration.

    Raises UserError when it cannot be had, or when it has several configurations.
    """
    folder = download(path, network=network)
    places = sorted({file.parent for file in folder.rglob("*.parquet")})
    for place in (folder, folder / "data"):
        if place in places:
            return place
    if len(places) > 1:
        names = ", ".join(place.relative_to(folder).as_posix() for place in places[:8])
        raise UserError(str(path), f"several configurations: {names}", "one", f"name its folder below {folder}")
    return places[0] if places else folder


def is_here(path: str | Path) -> bool:
    """Return whether the data set was downloaded."""
    try:
        download(path, network=False)
    except UserError:
        return False
    return True


def _parts(path: str | Path) -> tuple[str, str | None, str | None]:
    found = _NAME.fullmatch(str(path).removeprefix("hf:").lstrip("/"))
    if found is None:
        expected = f"{PREFIX}owner/name, with @revision and #split where wanted"
        raise UserError(str(path), "no name of a data set", expected)
    return found.group(1), found.group(2), found.group(3)
