"""The versions that are required, tested, and locked with hashes agree, and the page on security names them."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

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


def declared() -> list[str]:
    """Every requirement of pyproject.toml but those of developers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [word for name, words in project["optional-dependencies"].items() if name != "dev" for word in words]
    return project["dependencies"] + extras


def imported() -> set[str]:
    """Names of the packages that any file of trainkit imports, at its top or within a function."""
    names = set()
    for file in (ROOT / "trainkit").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"trainkit", "__future__"}


def test_every_package_that_is_imported_is_declared():
    known = {plain(re.split(r"[\[<>=]", word)[0]) for word in declared()}
    parts = {"pydantic_core": "pydantic", "triton": "torch"}  # pinned by it; installed with it where it has a GPU
    owners = metadata.packages_distributions()
    missing = {name: owners.get(name) for name in imported() if parts.get(name, "") not in known}
    # What an extra brings need not be installed; its name is then the one that is imported.
    missing = {name: found for name, found in missing.items() if not set(map(plain, found or (name,))) & known}
    assert len(imported()) > 20 and not missing


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def test_the_versions_of_the_page_on_security_are_required_and_pinned():
    rows = re.findall(r"^\| `([a-z]+)` \| ([0-9.]+) \| .+ \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    pins = dict(line.lower().split("==") for line in PINS.read_text().split())
    assert len(rows) > 5
    for package, oldest in rows:
        asked = {
            word.partition(">=")[2].split(",")[0] for word in declared() if word.lower().startswith(f"{package}>=")
        }
        assert asked == {oldest} and numbers(pins[package]) >= numbers(oldest)


def test_the_tests_that_the_page_names_are_there():
    named = set(re.findall(r"`([a-z_/]*test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    assert len(named) > 10 and not [name for name in named if not (ROOT / "tests" / f"{name}.py").is_file()]


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
