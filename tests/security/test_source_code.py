"""What no file of the package may do: run what it reads, hide what it is called, or import what it does not need."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainkit"
FILES = sorted(PACKAGE.rglob("*.py"))
TENSOR_READER = "trainkit/checkpoint/safe_load.py"
"""The one file that may call `torch.load`, and only with `weights_only=True`."""
PICKLE_READER = "trainkit/data/formats/insightface_bin.py"
"""The one file that may unpickle, and only by a subclass of `Unpickler` that finds names and objects itself."""

MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "os.system", "os.popen",
    "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp", "shutil.unpack_archive",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all",
    "torch.save", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "runpy.run_path",
    "runpy.run_module",
    "torch.export.load", "torch.utils.cpp_extension.load", "torch.classes.load_library", "torch.ops.load_library",
    "os.execv", "os.execve", "os.execvp", "os.execl", "os.spawnv", "os.spawnl", "os.posix_spawn", "pty.spawn",
    "mlflow.pyfunc.load_model", "mlflow.pytorch.load_model", "mlflow.pytorch.log_model", "datasets.load_dataset",
    "datasets.load_from_disk", "onnx.load", "code.interact", "code.InteractiveInterpreter", "input",
}  # fmt: skip
METHODS = {"extractall", "read_pickle", "to_pickle", "set_safe_globals", "add_safe_globals"}
LOADERS = {"yaml.Loader", "yaml.CLoader", "yaml.FullLoader", "yaml.UnsafeLoader", "yaml.CUnsafeLoader"}
ONLY = {"weights_only": True, "allow_pickle": False, "trust_remote_code": False, "shell": False}
"""Keyword arguments, and the only value that each may have."""
FOR_EVERYBODY = ("/tmp", "/var/tmp", "/dev/shm")


def findings(source: str, name: str) -> list[str]:
    """What a file does that none may do, as `line: what`."""
    tree = ast.parse(source)
    full_names: dict[str, str] = {}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            full_names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            full_names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        else:
            continue
        allowed = {"pickle"} if name == PICKLE_READER and isinstance(node, ast.Import) else set()
        found += [(node.lineno, f"import {m}") for m in modules if m.split(".")[0] in MODULES - allowed]

    def dotted(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return full_names.get(node.id, node.id)
        return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"

    bases = [(base, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    restricted = {
        id(base)
        for base, node in bases
        if {"find_class", "persistent_load"} <= {own.name for own in node.body if isinstance(own, ast.FunctionDef)}
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            what = dotted(node)
            unpickles = what.startswith("pickle.") and not (what == "pickle.Unpickler" and id(node) in restricted)
            loads = what == "torch.load" and name != TENSOR_READER
            if unpickles or loads or what in LOADERS or what in CALLS:
                found.append((node.lineno, what))
            elif isinstance(node, ast.Attribute) and node.attr in METHODS:
                found.append((node.lineno, f".{node.attr}"))
        elif isinstance(node, ast.Call):
            text = node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr)
            if dotted(node.func).startswith("subprocess.") and text:
                found.append((node.lineno, "words of a process that are no list"))
            for keyword in node.keywords:
                allowed = ONLY.get(keyword.arg or "")
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if allowed is not None and value is not allowed:
                    found.append((node.lineno, f"{keyword.arg}={ast.unparse(keyword.value)}"))
            if dotted(node.func) == "torch.load" and "weights_only" not in {k.arg for k in node.keywords}:
                found.append((node.lineno, "torch.load without weights_only"))
        elif isinstance(node, ast.List) and node.elts and dotted(node.elts[0]) == "sys.executable":
            # Without it the current folder, which may be a data set, is searched for every import.
            if not (len(node.elts) > 1 and isinstance(node.elts[1], ast.Constant) and node.elts[1].value == "-P"):
                found.append((node.lineno, "Python started without -P"))
        elif isinstance(node, ast.Assert):
            found.append((node.lineno, "assert, which `python -O` leaves out"))
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append((node.lineno, "a bare except"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(FOR_EVERYBODY):
            found.append((node.lineno, "a name in a folder for everybody, which others can foresee; take tempfile"))
    return [f"{line}: {what}" for line, what in sorted(set(found))]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_file_runs_what_it_reads(file):
    assert findings(file.read_text(encoding="utf-8"), name_of(file)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "import pickle as p", "from pickle import loads", "import joblib.numpy_pickle", "import dill",
        "import torch; torch.load(f, weights_only=True)", "import torch as t; t.load(f)", "f(weights_only=flag)",
        "from torch import load; load(f)", "import torch; read = torch.load", "f(weights_only=False)", "eval(t)",
        "np.load(f, allow_pickle=True)", "np.load(f, allow_pickle=not x)", "import yaml; yaml.load(t)",
        "import yaml; yaml.load(t, Loader=yaml.SafeLoader)", "from yaml import UnsafeLoader; UnsafeLoader(t)",
        "import yaml; yaml.parse(t, Loader=yaml.FullLoader)", "exec(t)", "f = eval", "__import__(t)",
        "compile(t, '', 'exec')", "import os; os.system(t)", "run(t, shell=True)", "run(t, shell=0)",
        "archive.extractall()", "import shutil; shutil.unpack_archive(t)", "f(trust_remote_code=True)",
        "import tempfile; tempfile.mktemp()", "from tempfile import mktemp as m; m()", "pd.read_pickle(t)",
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'x'])", "assert x",
        "import subprocess as s; s.run('ls')", "import sys; words = [sys.executable, '-m', 'x', *more]",
        "import subprocess, sys; subprocess.Popen([sys.executable])", "import os; os.execv(p, w)",
        "import onnx; onnx.load(f)",
        "try:\n    f()\nexcept:\n    pass", "import mlflow; mlflow.pyfunc.load_model(u)", "input()",
        "import torch; torch.save(x, f)", "import builtins; builtins.eval(t)", "def f():\n    import pickle",
        "open('/tmp/trainkit', 'w')", "f('/dev/shm')",
    ],
)  # fmt: skip
def test_the_gate_sees_what_it_is_for(line):
    assert findings(line, "trainkit/training/trainer.py")


@pytest.mark.parametrize(
    "line",
    [
        "import subprocess, sys; subprocess.run([sys.executable, '-P', '-m', 'x'])",
        "import subprocess; subprocess.run(['git', 'x'])", "import subprocess; subprocess.run(words)",
        "net.eval()", "torch.compile(net)", "import re; re.compile('x')", "import pickletools", "run([x], shell=False)",
        "np.load(f, allow_pickle=False)", "import yaml; yaml.safe_load(t)", "yaml.parse(t, Loader=yaml.SafeLoader)",
        "import safetensors.torch; safetensors.torch.load(b)", "cursor.execute(q)", "tempfile.mkdtemp()",
        "class Speed:\n    compile: str = 'off'",
    ],
)  # fmt: skip
def test_the_gate_lets_pass_what_only_sounds_alike(line):
    assert findings(line, "trainkit/training/trainer.py") == []


def test_the_reader_of_tensors_may_load_under_restriction_only():
    assert findings("import torch; torch.load(f, weights_only=True)", TENSOR_READER) == []
    assert findings("import torch; torch.load(f)", TENSOR_READER)
    assert findings("import torch; torch.load(f, weights_only=False)", TENSOR_READER)


def test_the_reader_of_pickles_may_subclass_an_unpickler_that_finds_nothing_by_itself():
    methods = (
        "    def find_class(self, module, name):\n        raise E\n    def persistent_load(self, p):\n        raise E\n"
    )
    sound = f"import pickle\nclass Own(pickle.Unpickler):\n{methods}"
    assert findings(sound, PICKLE_READER) == []
    assert findings(sound, TENSOR_READER)
    for other in (
        "import pickle; pickle.loads(b)", "import pickle; pickle.Unpickler(f).load()", "from pickle import Unpickler",
        "import pickle as p; p.load(f)", "import pickle\nread = pickle.load", sound.replace("find_class", "found"),
        sound.replace("persistent_load", "other"), sound.replace("Unpickler", "_Unpickler"), "import dill",
    ):  # fmt: skip
        assert findings(other, PICKLE_READER), other


def dependencies() -> set[str]:
    """Top-level modules of the packages that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def plain(requirement: str) -> str:
        return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")

    named = {plain(requirement) for requirement in project["dependencies"]}
    return {
        module
        for module, packages in packages_distributions().items()
        if named & {package.lower().replace("_", "-") for package in packages} and module.isidentifier()
    }


def test_no_module_bears_the_name_of_another():
    """With the script's folder first on the path, `trainkit/random.py` would be what torch imports as `random`."""
    taken = set(sys.stdlib_module_names) | dependencies()
    assert {"random", "torch", "datasets", "yaml", "PIL"} <= taken
    names = {path.stem if path.suffix else path.name for path in [*FILES, *filter(Path.is_dir, PACKAGE.rglob("*"))]}
    assert names & taken == set()


def test_no_file_is_a_drawer_for_everything():
    drawers = {"utils", "util", "common", "helpers", "helper", "base", "core", "manager", "misc"}
    assert [name_of(file) for file in FILES if drawers & set(file.relative_to(PACKAGE).with_suffix("").parts)] == []


def imported_by(modules: list[str]) -> set[str]:
    """Top-level modules that are loaded once a fresh interpreter has imported `modules`."""
    code = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(*{module.split(".")[0] for module in sys.modules})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *modules], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
def test_no_module_imports_tracking_models_figures_or_datasets_before_they_are_needed():
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in FILES]
    loaded = imported_by([module for module in modules if module != "trainkit.run"])  # the script itself
    assert "torch" in loaded
    assert loaded & {"mlflow", "timm", "matplotlib", "datasets"} == set()
