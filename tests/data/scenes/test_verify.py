"""Verifying sets of scenes: every mistake is named with its count, alone and by a recipe, and a training refuses it."""

import re

import numpy as np
import pytest
import scene_sets
from click.testing import CliRunner
from PIL import Image

from trainkit.cli import main
from trainkit.config import loader
from trainkit.data.scenes import verify
from trainkit.errors import UserError

NAMES = list(scene_sets.NAMES[: scene_sets.CLASSES])

RECIPE = """
name: tiny
task: {{name: segment2d, net: {{name: bisenetv2}}}}
data: {{name: scenes, train: "{train}", evaluate: {{val: "{val}"}}, crop: {crop}, augment: {{scales: {scales}}},
  eval_scales: {evals}{more}}}
optim: {{lr: 0.1}}
train: {{length: 2 steps, batch_size: 2}}
"""

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def root(tmp_path):
    """Images of 24 x 32 pixels: p000 to p005 to train on, p000 to p002 to score."""
    return scene_sets.camvid(tmp_path / "set", (6, 3))


def recipe(root, crop=(16, 24), scales=(1.0, 1.0), names=NAMES, more="", evals=(1.0,), sets=()):
    file = root.parent / "tiny.yaml"
    more = (f", names: {names}" if names else "") + more
    lists = {"crop": list(crop), "scales": list(scales), "evals": list(evals)}
    train, val = sets or (f"{root}#train", f"{root}#val")
    file.write_text(RECIPE.format(train=train, val=val, more=more, **lists))
    return file


def opened(root, **settings):
    """The same sets as a training opens them."""
    return loader.load(recipe(root, **settings)).data.open(0)


def mask(root, name, split="train"):
    """The classes that were drawn."""
    return scene_sets.scene(1000 * (split == "val") + int(name[1:]))[1].copy()


def put_mask(root, name, classes, split="train"):
    scene_sets.put(root / f"{split}annot/{name}.png", np.asarray(classes, np.uint8))


def ask(*words, code=0):
    done = CliRunner().invoke(main.main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done.output


def test_nothing_is_said_of_sets_that_are_well(root):
    assert verify.verify(root, names=NAMES) == []
    assert verify.verify(f"{root}#val", names=NAMES) == []
    opened(root)


def test_without_a_table_whatever_colours_there_are_count_as_classes_and_that_is_said(tmp_path):
    file = scene_sets.listed(tmp_path / "coloured", (4, 2), colour=True)
    (line,) = verify.verify(file)
    assert line.startswith("warning: ") and "its 5 colours" in line


def test_images_that_a_recipe_makes_too_large_are_told(root):
    with pytest.raises(UserError, match=r"data\.train: 6 of 6 images, of which data\.short_side makes too many"):
        opened(root, more=", short_side: 16384")


def copy(root, split, one, to_split, other, masks=True):
    (root / to_split / f"{other}.png").write_bytes((root / split / f"{one}.png").read_bytes())
    if masks:
        (root / f"{to_split}annot/{other}.png").write_bytes((root / f"{split}annot/{one}.png").read_bytes())


def test_pictures_in_two_splits_are_a_problem_where_they_are_refused(root, caplog):
    copy(root, "train", "p004", "val", "p001", masks=False)
    with pytest.raises(UserError, match="train/test leakage"):
        opened(root)
    with caplog.at_level("WARNING"):
        opened(root, more=", leakage: allow")
    assert "its metrics are too optimistic" in caplog.text
    (found,) = verify.verify(root, names=NAMES)
    assert re.match(r"warning: .*#val: 1 of its 3 images are in .*#train: p001.* = p004", found)
    (found,) = verify.verify(f"{root}#val", names=NAMES, against=[f"{root}#train"])
    assert re.match(r"warning: .*#val: 1 of its 3 images are in .*#train", found)


def test_what_is_odd_is_told_and_no_problem(root):
    copy(root, "train", "p000", "train", "p001")  # the same image and mask
    copy(root, "train", "p002", "train", "p003", masks=False)  # the same image, another mask
    put_mask(root, "p005", np.where(mask(root, "p005") == 3, 0, mask(root, "p005")))
    put_mask(root, "p004", np.full(scene_sets.SIZE, 1))
    found = verify.verify(f"{root}#train", names=NAMES)
    assert len(found) == 2 and all(line.startswith("warning: ") for line in found)
    assert "1 of 6 images have only one class: p004.png (road)" in found[0]
    twice = "2 of 6 images are duplicates, 1 of them with a different mask: p001.png = p000.png, p003.png = p002.png"
    assert twice in found[1]
    # The same of the packed form, which a training has at hand.
    notes = opened(root).notes
    assert all(f"data.train: {line.partition('#train: ')[2]}" in notes for line in found)


def test_classes_without_a_pixel_and_pixels_without_a_class_are_told(root):
    for n in range(6):
        classes = mask(root, f"p{n:03d}")
        classes[(classes == 3) | (np.indices(classes.shape)[0] > 8)] = 255
        put_mask(root, f"p{n:03d}", classes)
    put_mask(root, "p002", np.full(scene_sets.SIZE, 255))
    found = verify.verify(f"{root}#train", names=[*NAMES, "wall"])
    said = "\n".join(found)
    assert "2 of 5 classes have no pixel: car, wall" in said
    assert "1 of 6 images have no labelled pixel: p002.png" in said
    assert re.search(r"7\d\.\d% of the pixels are not labelled", said) and len(found) == 3


@pytest.mark.parametrize(("orientation", "size", "told"), [
    (1, (24, 32), False), (2, (24, 32), True), (3, (24, 32), True), (4, (24, 32), True), (9, (24, 32), False),
    (6, (24, 32), False), (6, (24, 24), True),
])  # fmt: skip
def test_pictures_that_are_turned_without_a_change_of_size_are_told(root, orientation, size, told):
    """A mask may be of the image as stored or as shown; where the sides change places, its size says which."""
    picture, classes = scene_sets.scene(77, size)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = picture.transpose(1, 0, 2) if orientation == 6 else picture
    Image.fromarray(np.ascontiguousarray(turned)).save(root / "train/p002.png", exif=exif)
    put_mask(root, "p002", classes)
    found = verify.verify(f"{root}#train", names=NAMES)
    assert len(found) == told
    for line in found:
        assert re.match(r"warning: .*#train: 1 of 6 images are rotated or mirrored by their EXIF .*: p002\.png$", line)


def test_values_count_as_classes_where_nothing_names_them(root):
    found = verify.verify(root)
    assert len(found) == 2 and all(line.startswith("warning: ") for line in found)
    assert "its 4 values have no class names, so each counts as a class: 0, 1, 2, 3" in found[0]
    with pytest.raises(UserError, match="the values in its masks"):
        opened(root, names=None)


def test_commands_say_how_many_and_end_with_2(root, tmp_path):
    assert f"{root}: 0 problems, 2 to look at" in ask("data", "verify", root)
    put_mask(root, "p002", np.full(scene_sets.SIZE, 200))
    place = f"{root}#train"
    assert f"{place}: 1 problem, 0 to look at" in ask("data", "verify", place, "--names", ",".join(NAMES), code=2)
    assert "2 to 255 are needed" in ask("data", "verify", root, "--names", "one", code=2)
    (tmp_path / "empty").mkdir()
    assert "no manifest.json" in ask("data", "verify", tmp_path / "empty", code=2)


def test_what_a_command_names_begins_here(root, monkeypatch):
    """Paths of a recipe begin at the data root, those of commands where the command is given."""
    monkeypatch.setenv("TRAINKIT_DATA", str(root.parent / "elsewhere"))
    monkeypatch.chdir(root.parent)
    assert verify.holds_scenes("set") and verify.verify("set#train", names=NAMES) == []


def test_only_what_has_a_layout_holds_scenes(root, tmp_path):
    assert verify.holds_scenes(root) and verify.holds_scenes(f"{root}#val")
    (tmp_path / "folder/class").mkdir(parents=True)
    scene_sets.put(tmp_path / "folder/class/a.png", scene_sets.scene()[0])
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/manifest.json").write_text("{}")
    for place in ("folder", "packed", "nothing"):
        assert not verify.holds_scenes(tmp_path / place)
