"""Find timm's pretrained weights, which only `trainkit download` downloads, never a training run."""

from __future__ import annotations

from pathlib import Path

from trainkit.errors import UserError

PREFIX = "timm:"
_BY_FILE = "task.net.weights=FILE.safetensors"


def find(word: str, *, network: bool = False, recipe: str = "RECIPE") -> Path:
    """Return the safetensors file behind `timm:NAME.TAG`, in the cache of the Hugging Face hub.

    Without `network` only the cache is used; `recipe` is named in the error message. Raises UserError if there are no
    such weights, or they are unavailable.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name = word.removeprefix(PREFIX)
    repository = _repository(name)
    try:
        return Path(hf_hub_download(repository, "model.safetensors", local_files_only=not network))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if not network:
            remedy = f"run `trainkit download {recipe}`, or use a file: {_BY_FILE}"
            raise UserError(f"pretrained weights of {name}", "not downloaded yet", remedy=remedy) from None
        text = " ".join(str(error).split())[:200]
        found, remedy = f"download failed ({text})", f"check the connection, or use a file: {_BY_FILE}"
        raise UserError(f"pretrained weights of {name}", found, remedy=remedy) from None


def is_here(word: str) -> bool:
    """Return True if the weights were downloaded. Raises UserError for a name that does not exist."""
    _repository(word.removeprefix(PREFIX))
    try:
        find(word)
    except UserError:
        return False
    return True


def _repository(name: str) -> str:
    import difflib

    import timm

    known = timm.list_pretrained()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        found = f"timm {timm.__version__} has no pretrained weights {name!r}"
        raise UserError("task.net.model", found, ", ".join(near) or "a name of timm.list_pretrained()")
    found = timm.get_pretrained_cfg(name)
    repository = found.hf_hub_id if found is not None else None
    if not repository:
        remedy = "download its file by hand and set weights to its path"
        raise UserError("task.net.model", f"the weights {name!r} are not on the hub", remedy=remedy)
    return repository
