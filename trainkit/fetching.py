"""Downloading what a recipe names. The only part of trainkit that uses the network."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from trainkit import config
from trainkit.errors import UserError
from trainkit.recipe import Download

_CHUNK = 1 << 20


def fetch(recipe: Path) -> Iterator[str]:
    """Bring the files of `downloads:` and the hub data sets that a recipe names; yields a line for each.

    Raises UserError when a file's SHA-256 is not the one stated; such a file is not kept.
    """
    loaded = config.load(recipe)
    for download in loaded.downloads:
        yield _file(download)
    hub = [path for path in (loaded.data.train, *loaded.data.evaluate.values()) if path.startswith("hf://")]
    for path in hub:
        # Set by the training commands; here the network is what was asked for.
        os.environ["HF_HUB_OFFLINE"] = "0"
        from trainkit.data.hub import download as from_hub

        yield f"{path}: {from_hub(path)}"
    if not loaded.downloads and not hub:
        yield f"{recipe}: names nothing to download"


def _file(download: Download) -> str:
    from trainkit.data.faces import locate

    to = locate(download.to)
    if to.is_file() and _sha256(to) == download.sha256:
        return f"{to}: already there"
    to.parent.mkdir(parents=True, exist_ok=True)
    aside = to.with_name(f".{to.name}.part")
    try:
        with urllib.request.urlopen(download.url, timeout=60) as answer, open(aside, "wb") as out:
            if not answer.url.startswith("https://"):
                raise UserError(download.url, f"leads to {answer.url}", "an https address")
            while chunk := answer.read(_CHUNK):
                out.write(chunk)
        found = _sha256(aside)
        if found != download.sha256:
            raise UserError(download.url, f"SHA-256 {found}", download.sha256, "the file is not kept")
        os.replace(aside, to)
    except (urllib.error.URLError, OSError) as error:
        raise UserError(download.url, f"cannot be downloaded: {error}") from None
    finally:
        aside.unlink(missing_ok=True)
    return f"{to}: downloaded"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
