"""The layout: layers import downwards, libraries are imported where they belong, and no file or package outgrows."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import numpy as np
import pytest
from runs import ROOT
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

PACKAGE = ROOT / "trainkit"
FILES = sorted(PACKAGE.rglob("*.py"))
TOP = {
    "__init__", "api", "errors", "evaluation_protocols", "files", "interfaces", "paths", "redact", "rng",
    "run", "tensors", "terminal",
}  # fmt: skip
HOMES = {"accelerate": {"distributed"}, "click": {"cli"}, "matplotlib": {"plots"},
         "mlflow": {"tracking", "analysis", "inference"}}  # fmt: skip
STRAYS = {("mlflow", "environment/record.py"), ("click", "terminal.py")}
"""The tags that MLflow's own client would set; colours and progress bars."""
MOST_LINES, LONGEST_FUNCTION = 600, 60


def run_linter(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_a_layer_imports_only_layers_below_it():
    done = run_linter(ROOT)
    assert done.returncode == 0, done.stdout[-3000:]


def test_an_import_upwards_is_found(tmp_path):
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for file in FILES:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    with (tmp_path / "trainkit" / "losses" / "margin.py").open("a") as file:
        file.write("\n\nif TYPE_CHECKING:\n    from trainkit.training.plan import Plan  # noqa\n")
    done = run_linter(tmp_path)
    assert done.returncode == 1 and "trainkit.losses.margin -> trainkit.training.plan" in done.stdout


def imports(tree: ast.Module) -> Iterator[str]:
    """Names of the packages that a file imports when it runs."""
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_libraries_are_imported_in_the_packages_that_stand_for_them():
    found = {
        (name, file.relative_to(PACKAGE).as_posix())
        for file in FILES
        for name in imports(ast.parse(file.read_text()))
        if name in HOMES and file.relative_to(PACKAGE).parts[0] not in HOMES[name]
    }
    assert len(FILES) > 200 and found == STRAYS


def patches(tree: ast.Module) -> Iterator[str]:
    """Assignments to attributes of modules and classes of MLflow, torch and Accelerate."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(one.asname or one.name).split(".")[0]: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {one.asname or one.name: node.module for one in node.names}
    theirs = {name for name, module in names.items() if module.split(".")[0] in ("mlflow", "torch", "accelerate")}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            targets = [ast.Attribute(node.args[0], "any")]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target).split(".")[0] in theirs:
                yield ast.unparse(target)


def test_nothing_of_the_libraries_is_patched():
    found = {text for file in FILES for text in patches(ast.parse(file.read_text()))}
    settings = {"cuda.matmul.allow_tf32", "cudnn.allow_tf32", "cudnn.benchmark"}
    assert found == {f"torch.backends.{name}" for name in settings}, "settings that torch documents, and nothing else"
    code = "import torch\nfrom mlflow import server\nserver.app = 1\nsetattr(torch.nn, 'Linear', 2)"
    assert list(patches(ast.parse(code))) == ["server.app", "torch.nn.any"]


def test_nothing_new_lies_at_the_top():
    assert {file.stem for file in PACKAGE.glob("*.py")} == TOP


OF_NO_PACKAGE = {"benchmarks", "docs", "golden", "gpu", "plugin", "recipes", "security", "support", "whole_runs"}
"""Folders of tests that stand for no package."""


def test_tests_lie_where_what_they_test_lies():
    tests = ROOT / "tests"
    folders = {file.parent.relative_to(tests).as_posix() for file in tests.rglob("*.py")}
    packages = {file.parent.relative_to(PACKAGE).as_posix() for file in FILES}
    assert {folder for folder in folders if folder.split("/")[0] not in OF_NO_PACKAGE} <= packages
    flat = {file.stem for file in tests.glob("*.py")}
    assert flat <= {"conftest", "test_architecture", *(f"test_{name}" for name in TOP)}


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda path: path.name)
def test_a_package_has_no_more_than_25_files(folder):
    assert len(list(folder.glob("*.py"))) <= 25


def test_a_file_has_at_most_600_lines_and_a_function_at_most_60():
    long = {file.relative_to(PACKAGE).as_posix(): len(file.read_text().splitlines()) for file in FILES}
    assert not {name: lines for name, lines in long.items() if lines > MOST_LINES}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{file}: {node.name}"


def test_a_docstring_begins_with_what_is_done():
    """Verb and object first: "Return ...", "Read ..."; a noun for a class."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                first = text.split()[0].strip(",.:")
                assert first not in ("What", "Whether", "Who", "Which"), f"{file}: {text.splitlines()[0]}"


@pytest.mark.slow
def test_the_types_are_those_that_are_written():
    words = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] >= len(FILES) > 200
    assert not [one for one in found["generalDiagnostics"] if one["severity"] == "error"], done.stdout[:3000]


def test_packages_define_nothing_in_their_init():
    for file in PACKAGE.glob("*/**/__init__.py"):
        body = ast.parse(file.read_text()).body
        assert len(body) == 1 and ast.get_docstring(ast.parse(file.read_text())), file


def test_only_the_top_init_offers_the_python_interface_and_nothing_imports_it():
    graph = grimp.build_graph("trainkit", cache_dir=None)
    assert graph.find_modules_that_directly_import("trainkit.api") == {"trainkit"}
    assert not graph.find_modules_that_directly_import("trainkit")


def test_no_files_import_each_other():
    graph = grimp.build_graph("trainkit", cache_dir=None)
    names = sorted(graph.modules)
    place = {name: k for k, name in enumerate(names)}
    pairs = [(place[a], place[b]) for a in names for b in graph.find_modules_directly_imported_by(a)]
    matrix = coo_array((np.ones(len(pairs)), tuple(np.array(pairs).T)), shape=(len(names),) * 2)
    _, group = connected_components(matrix, directed=True, connection="strong")
    groups = [{name for name, own in zip(names, group, strict=True) if own == k} for k in np.unique(group)]
    assert not [some for some in groups if len(some) > 1]
