"""Data sets of the Hugging Face hub: downloaded by `fetch` and `data import`, never by a training."""

from __future__ import annotations

import re
from pathlib import Path

from trainkit.errors import UserError

PREFIX = "hf://"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")


def is_hub(path: str | Path) -> bool:
    """Whether a path of a recipe names a data set of the hub, `hf://owner/name` or `hf://owner/name@revision`."""
    return str(path).startswith((PREFIX, "hf:/"))  # a Path has lost one stroke


def download(path: str | Path, *, network: bool = True) -> Path:
    """The folder of the data set's parquet files, downloaded where they are not there yet (into HF_HOME).

    Only parquet files are taken: scripts and archives stay where they are. Without `network` it is found if an earlier
    call brought it. Raises UserError when it cannot be had.
    """
    path = str(path)
    name = path.removeprefix("hf:").lstrip("/")
    if not _NAME.fullmatch(name):
        raise UserError(path, "no name of a data set", f"{PREFIX}owner/name or {PREFIX}owner/name@revision")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision or None,
            allow_patterns=["*.parquet", "**/*.parquet"],
            local_files_only=not network,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if not network:
            raise UserError(path, "is not here yet", remedy="download it with `trainkit fetch RECIPE`") from None
        text = " ".join(str(error).split())[:200]
        raise UserError(path, f"cannot be downloaded ({text})", "a data set of the hub and a network") from None
    return Path(folder)


def is_here(path: str | Path) -> bool:
    """Whether the data set was downloaded."""
    try:
        download(path, network=False)
    except UserError:
        return False
    return True
