"""Write constraints.lock: the versions of constraints.txt with the SHA-256 of their wheels, as the index states them.

    make lock

For Linux on x86_64 and each Python that trainkit is tested with. Wheels alone: to install from source runs code of the
package. What builds trainkit itself is among them. Nothing is downloaded but what the index says of a file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS, LOCK = ROOT / "constraints.txt", ROOT / "constraints.lock"
PYTHONS = ("3.11", "3.12")
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)) + tuple(
    f"manylinux{old}_x86_64" for old in (2014, 2010, 1)
)
BUILDS = ("setuptools>=77",)
"""What builds trainkit, which is in no other requirement; pyproject.toml says so too."""
HEADER = """\
# The versions of constraints.txt with the SHA-256 of their wheels for Linux x86_64 and Python 3.11 and 3.12.
# Written by `make lock`; SECURITY.md says how to install from it.
"""


def hashes(python: str) -> dict[str, tuple[str, str, str]]:
    """Name as it is pinned, version and SHA-256 of each package's wheel, by its plain name."""
    with tempfile.TemporaryDirectory() as aside:
        report = Path(aside) / "report.json"
        # The settings of this machine (`--isolated`) must not choose another index, whose files may be others.
        words = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--no-deps"]
        words += ["--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--implementation", "cp"]
        words += ["--python-version", python, "--target", str(Path(aside) / "no"), "--report", str(report)]
        words += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([*words, "-r", str(PINS), *BUILDS], check=True)
        found = {}
        for one in json.loads(report.read_text())["install"]:
            name, version = one["metadata"]["name"], one["metadata"]["version"]
            digest = one["download_info"]["archive_info"]["hashes"]["sha256"]
            found[plain(name)] = (name, version, digest)
    return found


def plain(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Ask for each Python, and write what all have."""
    each = [hashes(python) for python in PYTHONS]
    lines = [HEADER]
    for name in sorted(each[0]):
        of_all = [found[name] for found in each]
        title, version, _ = of_all[0]
        digests = sorted({digest for _, _, digest in of_all})
        lines.append(f"{title}=={version} \\\n" + " \\\n".join(f"    --hash=sha256:{d}" for d in digests) + "\n")
    LOCK.write_text("".join(lines))
    print(f"{LOCK.name}: {len(lines) - 1} packages")


if __name__ == "__main__":
    main()
