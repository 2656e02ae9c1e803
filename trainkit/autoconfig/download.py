"""Downloading what a recipe names: `trainkit download`.

Files are fetched here and not by torch.hub, which waits for a silent server for ever and follows a redirect to http.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainkit.autoconfig import archive
from trainkit.checkpoint import timm_weights
from trainkit.config import loader
from trainkit.config.downloads import Download
from trainkit.config.schema import Recipe
from trainkit.errors import UserError
from trainkit.files import sha256

_CHUNK = 1 << 20
_SECONDS = 60
"""How long a server may be silent."""


def download(recipe: Path, plugins: Sequence[str] = ()) -> Iterator[str]:
    """Bring what a recipe, and those it trains first, name: `downloads:`, `hf://` data sets, pretrained weights.

    Yields a line for each. Raises UserError when a file's SHA-256 is not the one stated; such a file is not kept.
    """
    from trainkit.data.split import named_sets

    files: dict[tuple[str, str], Download] = {}
    sets: dict[str, None] = {}
    nets: dict[str, None] = {}
    for loaded in _with_needed(recipe.resolve(), plugins, set()):
        files |= {(file.sha256, file.to): file for file in loaded.downloads}
        sets |= dict.fromkeys(path for path in named_sets(loaded.data).values() if path.startswith("hf://"))
        words = (source.weights or "" for source in loaded.task.required_weights().values())
        nets |= dict.fromkeys(word for word in words if word.startswith(timm_weights.PREFIX))
    for file in files.values():
        yield from _file_and_content(file)
    for path in sets:
        yield _set(path)
    yield from map(weights, nets)
    if not files and not sets and not nets:
        yield f"{recipe}: no downloads listed"


def weights(word: str) -> str:
    """Download the weights behind `timm:NAME.TAG`; a line that says where they are. Raises UserError."""
    _refuse_offline(word, timm_weights.is_here(word))
    return f"{word}: {timm_weights.find(word, network=True)}"


def _with_needed(path: Path, plugins: Sequence[str], seen: set[Path]) -> Iterator[Recipe]:
    """A recipe, and those that make the weights it needs."""
    seen.add(path)
    loaded = loader.load(path, (), tuple(plugins))
    yield loaded
    for source in loaded.task.required_weights().values():
        if source.recipe is not None and (other := (path.parent / source.recipe).resolve()) not in seen:
            yield from _with_needed(other, plugins, seen)


def _set(path: str) -> str:
    from trainkit.data import hub

    _refuse_offline(path, hub.is_here(path))
    return f"{path}: {hub.download(path)}"


def _refuse_offline(what: str, here: bool) -> None:
    from huggingface_hub import constants

    # The library reads the variable once, when it is imported: to unset it here would come too late.
    if constants.HF_HUB_OFFLINE and not here:
        raise UserError(what, "cannot be downloaded while HF_HUB_OFFLINE is set", remedy="unset it for this command")


def _file_and_content(wanted: Download) -> Iterator[str]:
    """Bring a file and unpack it where that is asked for; lines about it. A set that is there needs no archive."""
    folder = _place(wanted.unpack) if wanted.unpack is not None else None
    if folder is not None and os.path.lexists(folder):
        yield f"{folder}: already there"
        return
    yield _file(wanted)
    if folder is not None:
        yield f"{folder}: {archive.unpack(_place(wanted.to), folder):,} files unpacked"


def _place(path: str) -> Path:
    """Locate what a recipe names below the data. Raises UserError where a link on the way leads elsewhere."""
    from trainkit.paths import data_root, locate

    to = locate(path)
    root = data_root().resolve()
    if not to.resolve().is_relative_to(root):
        raise UserError(str(to), f"leads to {to.resolve()}", f"a place below {root}", "remove the link in its path")
    return to


def _file(wanted: Download) -> str:
    to = _place(wanted.to)
    if os.path.lexists(to):
        if to.is_file() and sha256(to) == wanted.sha256:
            return f"{to}: already there"
        raise UserError(str(to), "exists with different content", f"SHA-256 {wanted.sha256}", "move it away")
    # A name that nobody could know before, and made anew: a link that waits there is not written through.
    aside = to.with_name(f".{to.name}.{uuid.uuid4().hex}")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with _opener().open(wanted.url, timeout=_SECONDS) as answer, open(aside, "xb") as out:
            while chunk := answer.read(_CHUNK):
                out.write(chunk)
        found = sha256(aside)
        if found != wanted.sha256:
            raise UserError(wanted.url, f"SHA-256 {found}", wanted.sha256, "the file was deleted")
        os.replace(aside, to)
    except (OSError, http.client.HTTPException) as error:  # what urllib raises is an OSError
        raise UserError(wanted.url, f"cannot be downloaded: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return f"{to}: downloaded"


class _Secure(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to another https address, and asks no other."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Refuse before the other address is asked."""
        if not newurl.lower().startswith("https://"):
            raise UserError(req.full_url, f"leads to {newurl}", "an https address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Secure)
