"""Libraries with known holes are refused before anything of them is imported, by every verb."""

from __future__ import annotations

import ast
import re
import sys
import time
import tomllib
from importlib import metadata

import pytest
from click.testing import CliRunner
from lock_constraints import plain
from runs import ROOT, TOY, Ran, all_same, newest, spawn

from trainkit.cli import main, train
from trainkit.environment import min_versions
from trainkit.errors import UserError

BELOW = {
    "torch": "2.10.0+cu128", "pillow": "12.2.0", "mlflow": "3.17.1", "datasets": "5.1.0", "pyarrow": "23.0.0",
    "filelock": "3.20.0", "monai": "1.5.1",
}  # fmt: skip
"""The last version below each minimum."""


@pytest.fixture
def installed(monkeypatch):
    """What is installed: change it by name; None is not there."""
    changed: dict[str, str | None] = {}
    real = metadata.version

    def version(package):
        found = changed.get(package, real(package) if package != "monai" else "1.6.1")
        if found is None:
            raise metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(metadata, "version", version)
    return changed


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [word for name, words in project["optional-dependencies"].items() if name != "dev" for word in words]
    declared = {plain(re.split(r"[\[<>=]", word)[0]) for word in project["dependencies"] + extras}
    parts = {"pydantic_core": "pydantic", "triton": "torch"}  # pinned by it; installed with it where it has a GPU
    owners = metadata.packages_distributions()
    missing = {name: owners.get(name) for name in imported() if parts.get(name, "") not in declared}
    # What an extra brings need not be installed; its name is then the one that is imported.
    missing = {name: found for name, found in missing.items() if not set(map(plain, found or (name,))) & declared}
    assert len(imported()) > 25 and not missing


def test_what_is_installed_here_is_taken_and_asking_takes_milliseconds():
    min_versions.check()
    began = time.process_time()
    for _ in range(10):
        min_versions.check()
    assert time.process_time() - began < 10 * 0.15  # 0.012 s each here


@pytest.mark.parametrize("package", BELOW)
def test_a_version_below_a_floor_is_refused_with_what_is_needed_and_why(installed, package):
    (floor,) = (floor for floor in min_versions.MINIMUMS if floor.package == package)
    installed[package] = BELOW[package]
    with pytest.raises(UserError) as refused:
        min_versions.check()
    said = str(refused.value)
    assert f"{package} is {BELOW[package]}, {floor.version} or newer is required ({floor.why})" in said
    assert f'pip install "{package}>={floor.version}"' in said
    installed[package] = f"{floor.version}+cpu"
    min_versions.check()


def test_all_that_is_too_old_is_said_at_once(installed):
    installed.update(BELOW, torch=None)
    with pytest.raises(UserError) as refused:
        min_versions.check()
    assert "torch is not installed" in str(refused.value)
    assert all(
        f"{package} is {version}" in str(refused.value) for package, version in BELOW.items() if package != "torch"
    )
    assert str(refused.value).count(">=") == len(BELOW)


def test_an_old_version_may_be_allowed_and_a_missing_package_not(installed, monkeypatch, capsys):
    installed["pillow"] = BELOW["pillow"]
    with pytest.raises(UserError, match="or set TRAINKIT_ALLOW_UNSAFE_VERSIONS=1 to continue at your own risk"):
        min_versions.check()
    monkeypatch.setenv("TRAINKIT_ALLOW_UNSAFE_VERSIONS", "1")
    min_versions.check()
    assert capsys.readouterr().err.startswith("warning: pillow is 12.2.0, 13 or newer is required (")
    installed["mlflow"] = None
    with pytest.raises(UserError, match="mlflow is not installed"):
        min_versions.check()


def test_what_is_optional_may_be_absent_and_nothing_else(installed):
    installed["monai"] = None
    min_versions.check()
    for floor in min_versions.MINIMUMS:
        installed[floor.package] = None
        if not floor.optional:
            with pytest.raises(UserError, match=f"{floor.package} is not installed"):
                min_versions.check()
        installed.pop(floor.package)


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 11, 0)])
def test_an_older_python_is_said_in_a_sentence(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", (*version, "final", 0))
    with pytest.raises(UserError, match=rf"Python: {'.'.join(map(str, version))}; expected 3\.11\.1 or newer"):
        min_versions.check()


def test_an_older_python_comes_as_far_as_saying_so():
    """What the commands import before they ask is read by Python 3.9, and takes nothing of the standard library that
    came later."""
    files = [
        ROOT / "trainkit" / name
        for name in (
            "__init__.py",
            "cli/main.py",
            "run.py",
            "cli/options.py",
            "environment/min_versions.py",
            "errors.py",
            "redact.py",
        )
    ]
    for file in [*files, *(ROOT / "trainkit" / "cli").glob("*.py")]:
        tree = ast.parse(file.read_text(), feature_version=(3, 9))
        at_once = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in at_once for alias in node.names}
        assert not names & {"Self", "StrEnum", "tomllib", "override", "batched"}, file
        texts = [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not [text for text in texts if re.search(r"[\w)\]][*+?]\+", text)], (
            f"{file}: possessive repeats are of 3.11"
        )


# Every verb


def verbs(group=main.main, before=()):
    """Words of every verb."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*before, name))
        else:
            yield (*before, name)


@pytest.mark.parametrize("words", list(verbs()), ids=" ".join)
def test_every_verb_refuses_in_one_sentence_and_with_exit_code_2(installed, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    installed["pillow"] = "12.2.0"
    done = CliRunner().invoke(main.main, [*words, "x", "y"])
    assert done.exit_code == 2 and done.output.startswith("error: installed packages: pillow is 12.2.0"), done.output
    assert done.output.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_command_behind_the_launcher_refuses_too_and_help_goes_on(installed):
    installed["torch"] = "2.10.0"
    done = CliRunner().invoke(train.run, ["recipes/adadistill.yaml"])
    assert done.exit_code == 2 and "torch is 2.10.0" in done.output
    assert CliRunner().invoke(main.main, ["--help"]).exit_code == 0
    assert CliRunner().invoke(train.run, ["--help"]).exit_code == 0


# One table


def test_pyproject_asks_for_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    asked = {}
    for line in lines:
        found = re.match(r"([A-Za-z0-9_-]+)>=([0-9.]+)(,|$)", line)
        if found:
            asked.setdefault(found[1].lower(), set()).add(found[2])
    for floor in min_versions.MINIMUMS:
        assert asked[floor.package] == {floor.version}
    assert project["requires-python"] == ">=" + ".".join(map(str, min_versions.PYTHON))


def test_the_pinned_versions_are_above_the_floors():
    pins = dict(line.lower().split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for floor in min_versions.MINIMUMS:
        assert min_versions._release(pins[floor.package]) >= min_versions._release(floor.version)


def test_the_page_on_security_has_the_same_table():
    page = (ROOT / "SECURITY.md").read_text()
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `([a-z]+)` \| ([0-9.]+) \| (.+) \|$", page, re.MULTILINE)}
    assert rows == {floor.package: (floor.version, floor.why) for floor in min_versions.MINIMUMS}


def test_the_tests_that_the_page_names_are_there():
    named = set(re.findall(r"`([a-z_/]*test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    assert len(named) > 10 and not [name for name in named if not (ROOT / "tests" / f"{name}.py").is_file()]


# Other surroundings


@pytest.mark.slow
def test_a_run_is_the_same_in_another_locale_encoding_and_time_zone(store, tmp_path):
    """Texts of a recipe that no ASCII holds, where the system's encoding is ASCII, and a day that is another."""
    recipe = tmp_path / "é中.yaml"
    recipe.write_text("# Kreuzentropie für é中\n" + TOY.read_text(), encoding="utf-8")
    surroundings = {
        "LC_ALL": "C",
        "LANG": "C",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "ascii",
        "TZ": "Pacific/Kiritimati",
    }
    done = spawn(1, str(recipe), "--plugin", "toy", "train.length=4 steps", TRAINKIT_STORE=str(store), **surroundings)
    assert done.returncode == 0, done.stderr
    first = Ran(0, newest())
    done = spawn(1, str(TOY), "--plugin", "toy", "train.length=4 steps", TRAINKIT_STORE=str(store))
    assert done.returncode == 0, done.stderr
    second = Ran(0, newest())
    assert first.folder.name != second.folder.name and all_same(first, second)
    assert first.repeatable == second.repeatable
