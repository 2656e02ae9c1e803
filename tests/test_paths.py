"""Recipes by their names, from any folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runs import ROOT

from trainkit import paths
from trainkit.config.run_request import beside


def test_a_recipe_is_found_by_name_and_one_that_lies_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("convnext", "convnext.yaml", "recipes/convnext.yaml", "recipes/convnext"):
        assert paths.recipe_file(word) == ROOT / "recipes" / "convnext.yaml"
    for word in ("convnexxt", "mine/convnext.yaml", "../recipes/convnext.yaml"):
        assert paths.recipe_file(word) == Path(word)
    Path("convnext.yaml").touch()
    assert paths.recipe_file("convnext.yaml") == Path("convnext.yaml")


def test_what_ships_lies_in_the_package_where_it_is_installed_and_beside_it_in_a_checkout(tmp_path, monkeypatch):
    assert paths.shipped("recipes") == ROOT / "recipes"
    monkeypatch.setattr(paths, "__file__", str(tmp_path / "trainkit" / "paths.py"))
    assert paths.shipped("recipes") == tmp_path / "recipes"
    (tmp_path / "trainkit" / "recipes").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()  # of another package
    assert paths.shipped("recipes") == tmp_path / "trainkit" / "recipes"


def test_a_shipped_recipe_is_called_by_its_name_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert paths.recipe_word(ROOT / "recipes" / "convnext.yaml") == os.path.join("recipes", "convnext.yaml")
    monkeypatch.chdir(tmp_path)
    assert paths.recipe_word(ROOT / "recipes" / "convnext.yaml") == "convnext"
    assert paths.recipe_word(tmp_path / "mine.yaml") == "mine.yaml"


@pytest.mark.parametrize("named", ["face_teacher.yaml", "nosuch.yaml", "../face_teacher.yaml"])
def test_a_recipe_named_in_a_copy_is_the_one_beside_it_or_else_one_that_ships(tmp_path, named):
    ships = ROOT / "recipes" / named
    own = (tmp_path / named).resolve()
    assert beside(tmp_path / "copy.yaml", named) == (ships if named == "face_teacher.yaml" else own)
    if own.parent == tmp_path.resolve():
        own.touch()
        assert beside(tmp_path / "copy.yaml", named) == own
