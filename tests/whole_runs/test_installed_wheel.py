"""The wheel, installed and used in an empty folder: recipes and launch configs are in it, and the commands work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from runs import ROOT

from trainkit.environment.version import __version__

pytestmark = [pytest.mark.slow]
SHORT = (
    "train={length: 4 steps, batch_size: 32}",
    "evaluations={val: {at_end: true}}",
    "best={metric: val/top1}",
    "checkpoints={at_end: true}",
)
SHIPPED = {
    file.relative_to(ROOT).as_posix()
    for name in ("recipes", "accelerate_configs")
    for file in (ROOT / name).glob("*.yaml")
}


def python(*words: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRAINKIT_DATA", "TRAINKIT_STORE")
    }
    return subprocess.run(list(map(str, words)), cwd=cwd, env=env | environment, capture_output=True, text=True)


def succeed(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = python(*words, cwd=cwd, **environment)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """A source distribution of the tree, the wheel of the tree, and the wheel of that source distribution."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("trainkit", "recipes", "accelerate_configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, tree)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    out = tmp_path_factory.mktemp("out")
    succeed(sys.executable, "-c", code, out, cwd=tree)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    wheels = {}
    for name, source in (("tree", tree), ("sdist", unpacked)):
        pip = ("wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", out / name, source)
        succeed(sys.executable, "-m", "pip", *pip, cwd=out)
        (wheels[name],) = (out / name).glob("*.whl")
    return {"sdist": sdist, **wheels}


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory) -> Path:
    """A new environment with the wheel, which sees what the present one has beside trainkit."""
    home = tmp_path_factory.mktemp("environment")
    succeed(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    (packages,) = home.glob("lib/python*/site-packages")
    # Folders that a .pth file names are searched, but the .pth files in them are not read: so the checkout is not seen.
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "present.pth").write_text("".join(f"{path}\n" for path in seen))
    pip = ("--python", home / "bin" / "python", "install", "-q", "--no-deps", "--no-index", built["tree"])
    succeed(sys.executable, "-m", "pip", *pip, cwd=home)
    return home / "bin"


@pytest.fixture
def empty(tmp_path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_the_wheel_and_the_source_distribution_hold_every_recipe_and_launch_config(built):
    with zipfile.ZipFile(built["tree"]) as one, zipfile.ZipFile(built["sdist"]) as other:
        names = set(one.namelist())
        assert names == set(other.namelist()), "the wheel of the source distribution is that of the tree"
        for name in SHIPPED:
            assert one.read(f"trainkit/{name}") == (ROOT / name).read_bytes()
    own = {file.relative_to(ROOT).as_posix() for file in (ROOT / "trainkit").rglob("*.py")}
    assert own <= names and {name.split("/")[0] for name in names} == {"trainkit", f"trainkit-{__version__}.dist-info"}


def test_in_an_empty_folder_recipes_are_listed_shown_copied_and_checked_by_name(environment, empty):
    trainkit = environment / "trainkit"
    code = "import trainkit; print(trainkit.__file__)"
    assert str(environment.parent) in succeed(environment / "python", "-P", "-c", code, cwd=empty)
    listed = succeed(trainkit, "ls", cwd=empty)
    assert {line.split()[0] for line in listed.splitlines()} == {
        Path(n).stem for n in SHIPPED if n.startswith("recipes")
    }
    assert "name: convnext" in succeed(trainkit, "show", "convnext", cwd=empty)
    for command in (("check", "convnext", "--all"), ("check", "adadistill", "--all")):
        assert f"name: {command[1]}" in succeed(trainkit, *command, cwd=empty)
    succeed(trainkit, "run", "recipes/convnext.yaml", "--check", cwd=empty)
    assert "class_names" not in listed and not list(empty.iterdir()), "nothing was made"
    succeed(trainkit, "cp", "adadistill", "mine.yaml", cwd=empty)
    checked = succeed(trainkit, "check", "mine.yaml", "--all", cwd=empty)  # its teacher is still the recipe that ships
    assert "recipe: face_teacher.yaml" in checked
    done = python(trainkit, "run", "convnexxt", cwd=empty)
    assert (
        done.returncode == 2
        and "convnexxt: 1 problem" in done.stderr
        and "did you mean recipes/convnext.yaml?" in done.stderr
    )


def test_in_an_empty_folder_a_shipped_recipe_trains_by_its_name(environment, empty):
    said = succeed(environment / "trainkit", "run", "convnext", *SHORT, cwd=empty)
    (run,) = (empty / "mlruns" / "runs").iterdir()
    assert json.loads((run / "run.json").read_text())["status"] == "FINISHED" and run.name in said
    assert "site-packages" not in said
    configs = succeed(environment / "trainkit", "ls", "--launch-configs", cwd=empty)
    (two,) = (line.split()[0] for line in configs.splitlines() if "cpu_2proc" in line)
    assert yaml.safe_load(Path(two).read_text())["num_processes"] == 2
    launch = ("-m", "accelerate.commands.launch", "--config_file", two, "-m", "trainkit.run", "convnext", *SHORT)
    succeed(environment / "python", *launch, cwd=empty)
    shown = [json.loads(file.read_text()) for file in (empty / "mlruns" / "runs").glob("*/run.json")]
    assert [info["status"] for info in shown] == ["FINISHED"] * 2
    assert {entry.name for entry in empty.iterdir()} == {"mlruns"}
