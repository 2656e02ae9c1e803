"""Refuse library versions with known vulnerabilities, such as code execution from a file.

Versions are read from the metadata of packages alone, so that nothing unsafe is imported first: 10 ms. All other
requirements are ranges in pyproject.toml, which the installer checks. With `TRAINKIT_ALLOW_UNSAFE_VERSIONS=1` an old
version is a warning: where you own all files, recipes and users, a vulnerability may matter less than your environment.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass

from trainkit.errors import UserError

ALLOW = "TRAINKIT_ALLOW_UNSAFE_VERSIONS"
PYTHON = (3, 11, 1)
"""Before it any user of a machine could have a `forkserver` run code (CVE-2022-42919); a recipe may ask for one."""


@dataclass(frozen=True)
class Minimum:
    """The oldest version of a package without a known vulnerability that matters here."""

    package: str
    version: str
    why: str
    """Vulnerabilities of older versions."""
    optional: bool = False
    """It may be absent."""


MINIMUMS = (
    Minimum("torch", "2.11", "code execution from a `.pth` despite weights_only (CVE-2025-32434), memory corruption "
          "from one (CVE-2026-24747), code execution from a `.pt2` (CVE-2026-4538)"),
    Minimum("pillow", "13", "heap overflows from a JPEG file (CVE-2026-112403, CVE-2026-112398)"),
    Minimum("mlflow", "3.17.2", "arbitrary file read through the server (CVE-2026-116690), request forgery "
          "(CVE-2026-115886), path traversal out of a store (CVE-2026-53995)"),
    Minimum("datasets", "5.2", "code execution from a pickled table (CVE-2026-57845)"),
    Minimum("pyarrow", "23.0.1", "use after free from an Arrow file (CVE-2026-25087)"),
    Minimum("filelock", "3.20.1", "truncation of a file through a symbolic link at the lock path (CVE-2025-68146)"),
    Minimum("monai", "1.5.2", "code execution from a checkpoint (CVE-2025-58756)", optional=True),
)  # fmt: skip
"""Held equal to pyproject.toml and to SECURITY.md by tests/environment/test_min_versions.py."""


def check() -> None:
    """Raise UserError that names every package that is too old, before any of them is imported."""
    if sys.version_info[:3] < PYTHON:
        found = ".".join(map(str, sys.version_info[:3]))
        raise UserError(
            "Python", found, f"{'.'.join(map(str, PYTHON))} or newer", "create an environment with a newer Python"
        )
    from importlib import metadata

    def installed(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    problems, wanted, missing = [], [], []
    for minimum in MINIMUMS:
        found = installed(minimum.package)
        if found is None and minimum.optional:
            continue
        if found is None or _release(found) < _release(minimum.version):
            older = f"is {found}" if found is not None else "is not installed"
            missing += [] if found is not None else [minimum.package]
            problems.append(f"{minimum.package} {older}, {minimum.version} or newer is required ({minimum.why})")
            wanted.append(f'"{minimum.package}>={minimum.version}"')
    if problems and os.environ.get(ALLOW) == "1" and not missing:
        print(f"warning: {'; '.join(problems)}; continuing because {ALLOW}=1", file=sys.stderr, flush=True)
    elif problems:
        remedy = f"pip install {' '.join(wanted)}" + (
            "" if missing else f", or set {ALLOW}=1 to continue at your own risk"
        )
        raise UserError("installed packages", "; ".join(problems), remedy=remedy)


def _release(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13): a nightly build counts as its release, and 2.11.0 is 2.11."""
    digits = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in digits[0].split(".")] if digits else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
