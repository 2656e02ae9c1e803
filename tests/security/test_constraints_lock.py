"""The versions that are tested, with hashes: what is in constraints.txt is in constraints.lock, and is checked."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib

import pytest
from lock_constraints import BUILDS, LOCK, PINS, plain
from runs import ROOT

ENTRY = re.compile(r"([A-Za-z0-9._-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n")


def locked() -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each package of the lock, by its plain name."""
    text = "".join(line for line in LOCK.read_text().splitlines(keepends=True) if not line.startswith("#"))
    found = {plain(name): (version, hashes.split("sha256:")[1:]) for name, version, hashes in ENTRY.findall(text)}
    assert ENTRY.sub("", text) == "", "nothing but pins and hashes: no address, no option"
    return found


def test_every_pin_is_locked_at_its_version_with_a_hash_and_nothing_else_is():
    pins = {plain(name): version for name, version in (line.split("==") for line in PINS.read_text().split())}
    assert len(pins) > 100
    builds = {plain(re.split("[>=<]", word)[0]) for word in BUILDS}
    assert {name: version for name, (version, _) in locked().items() if name not in builds} == pins
    hashes = [one.strip(" \\\n") for _, several in locked().values() for one in several]
    assert len(set(hashes)) == len(hashes) >= len(pins)


def test_compiled_packages_have_a_wheel_for_each_python():
    assert all(len(locked()[name][1]) == 2 for name in ("torch", "numpy", "pillow", "pyarrow", "pydantic-core"))


def test_what_builds_trainkit_is_locked_too():
    """So that it can be installed without asking for anything that has no hash."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"] == list(BUILDS)


@pytest.mark.slow
def test_an_audit_that_cannot_ask_does_not_pass(tmp_path):
    if importlib.util.find_spec("pip_audit") is None:
        pytest.skip("pip-audit is not installed")
    rule = (ROOT / "Makefile").read_text().partition("AUDIT := ")[2].partition("\n\n")[0]
    target = rule.replace("\\\n", " ").split()[1:]
    assert "--strict" in target and "--disable-pip" in target
    digest = locked()["click"][1][0].strip(" \\\n")
    (tmp_path / "one.lock").write_text(f"no-such-package-of-trainkit==1.0 --hash=sha256:{digest}\n")
    words = [word if word != "constraints.lock" else str(tmp_path / "one.lock") for word in target]
    proxy = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-m", "pip_audit", *words, "--timeout", "10"],
        env={**os.environ, **proxy}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert any(word in done.stderr for word in ("127.0.0.1", "could not be audited", "HTTPSConnection"))
