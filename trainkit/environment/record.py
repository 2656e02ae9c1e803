"""Record the origin of a run: user, state of the source, versions and hardware."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

VERSIONS = "trainkit.versions"
"""Tag with the versions of Python and packages: `torch 2.14.1, timm 1.0.31`."""
_VERSIONS = ("torch", "torchvision", "accelerate", "mlflow", "timm", "datasets", "numpy")
_LABELS = {
    "trainkit.cpu": "processor",
    "trainkit.cores": "cores",
    "trainkit.gpus": "GPUs",
    "trainkit.ram_gb": "memory (GB)",
    "trainkit.world_size": "processes",
    "trainkit.host": "host",
    "mlflow.source.git.commit": "git commit",
    "mlflow.source.git.dirty": "uncommitted changes",
}


def origin() -> dict[str, str]:
    """Return tags for user, source file and state of the source, named as by MLflow. No remote address, no diff."""
    from mlflow.tracking.context.git_context import GitRunContext
    from mlflow.tracking.context.registry import resolve_tags

    resolved = resolve_tags(ignore=[GitRunContext])  # pyright: ignore[reportArgumentType] - MLflow compares with types
    found = {key: str(value) for key, value in resolved.items()}
    tags = {key: value for key, value in found.items() if "://" not in value and "url" not in key.lower()}
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        commit = _git(root, "rev-parse", "HEAD")
        if commit:
            tags["mlflow.source.git.commit"] = commit
            tags["mlflow.source.git.branch"] = _git(root, "rev-parse", "--abbrev-ref", "HEAD") or ""
            dirty = _git(root, "status", "--porcelain", "--untracked-files=no")
            tags["mlflow.source.git.dirty"] = "unknown" if dirty is None else str(bool(dirty)).lower()
    return tags


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def place() -> dict[str, str]:
    """Return tags for versions and hardware."""
    import psutil

    from trainkit.environment.version import __version__

    versions = {"trainkit": __version__, "python": platform.python_version()}
    for package in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    tags = {VERSIONS: ", ".join(f"{name} {version}" for name, version in versions.items())}
    tags["trainkit.host"] = socket.gethostname()
    tags["trainkit.cpu"] = cpu_name()
    tags["trainkit.cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    tags["trainkit.ram_gb"] = f"{psutil.virtual_memory().total / 2**30:.1f}"
    tags["trainkit.world_size"] = os.environ.get("WORLD_SIZE", "1")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        tags["trainkit.gpus"] = ", ".join(names)
    return tags


def described(tags: Mapping[str, str]) -> dict[str, str]:
    """Return hardware and state of the source of a run from its tags, by readable names."""
    found = {label: tags[tag] for tag, label in _LABELS.items() if tags.get(tag)}
    return found | ({"git commit": found["git commit"][:12]} if "git commit" in found else {})


def versions(tags: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of Python and packages by name, from the tags of a run."""
    pairs = (one.rpartition(" ") for one in tags.get(VERSIONS, "").split(", "))
    return {name: version for name, _, version in pairs if name}


@functools.cache
def program(*plugins: str) -> dict[str, str]:
    """Return what all processes of a run must share: digests of the sources of trainkit and plug-ins, torch's version.

    Plug-ins must have been imported. The digests are those of the first call, whatever changes on the disk later.
    """
    sources = {f"source of {package}": _source(package) for package in ("trainkit", *plugins)}
    return {**sources, "torch": metadata.version("torch")}


def _source(package: str) -> str:
    module, digest = sys.modules[package], hashlib.sha256()
    for place in map(Path, getattr(module, "__path__", None) or filter(None, [module.__file__])):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(f"{file.relative_to(place)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def cpu_name() -> str:
    """Return the model of the processor, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
