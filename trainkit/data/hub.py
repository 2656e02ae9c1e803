"""Data sets of the Hugging Face hub: downloaded by `fetch` and `data import`, never by a training."""

from __future__ import annotations

import re
from pathlib import Path

from trainkit.errors import UserError

PREFIX = "hf://"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")


def is_hub(path: str) -> bool:
    """Whether a path of a recipe names a data set of the hub, `hf://owner/name` or `hf://owner/name@revision`."""
    return path.startswith(PREFIX)


def download(path: str) -> Path:
    """The folder of the data set's parquet files, downloaded where they are not there yet (into HF_HOME).

    Only parquet files are taken: scripts and archives stay where they are. Raises UserError without a network.
    """
    name = path.removeprefix(PREFIX)
    if not _NAME.fullmatch(name):
        raise UserError(path, "no name of a data set", f"{PREFIX}owner/name or {PREFIX}owner/name@revision")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    repository, _, revision = name.partition("@")
    try:
        folder = snapshot_download(
            repository, repo_type="dataset", revision=revision or None, allow_patterns=["*.parquet", "**/*.parquet"]
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(path, f"cannot be downloaded ({text})", "a data set of the hub and a network") from None
    return Path(folder)
