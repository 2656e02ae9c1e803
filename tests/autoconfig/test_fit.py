"""Recipes that take from data of every kind what follows from it, and then open that data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import organ_volumes
import people_sets
import pytest
import scene_sets
from click.testing import CliRunner
from PIL import Image

from trainkit.autoconfig import fit, new_recipe
from trainkit.autoconfig.fit import Fitted
from trainkit.cli import main
from trainkit.config import loader, run_request
from trainkit.data import pairs_csv
from trainkit.errors import UserError
from trainkit.experiments import recipe_check

pytestmark = pytest.mark.usefixtures("here")
RECIPES = Path(__file__).parents[2] / "recipes"


def fitted(recipe: str, data: str, new: str = "mine.yaml"):
    """The copy of a shipped recipe for other data, and its text."""
    copied = new_recipe.copy(RECIPES / f"{recipe}.yaml", Path(new), data=data)
    text = Path(new).read_text()
    assert recipe_check.check(run_request.RunRequest(Path(new))).count("# to decide: ") == copied.marked, (
        "those of a teacher's too"
    )
    return loader.load(new), text


def _faces(root: Path) -> None:
    for n in range(16):
        people_sets.picture(root / f"p{n // 4}" / f"{n}.png", n, (24, 24))


# What all kinds share


def test_a_value_goes_where_its_key_says_and_what_was_there_can_be_left_out():
    tree = Fitted({"train": {"length": "2 epochs"}, "best": None})
    tree.put("train.schedule.warmup.over", "3 steps", "because")
    tree.put("best.metric", "val/top1")
    tree.drop("train.length", "task.net.model", "stop_when")
    assert tree.tree == {"train": {"schedule": {"warmup": {"over": "3 steps"}}}, "best": {"metric": "val/top1"}}
    assert tree.get("train.schedule.warmup.over") == "3 steps" and tree.get("train.length.over") is None
    assert tree.notes["train", "schedule", "warmup", "over"] == fit.Note("because", False)


def test_evaluations_go_over_to_the_new_sets_and_those_of_others_are_left_out():
    tree = {
        "data": {"evaluate": {"lfw": "a", "cfp": "b"}},
        "evaluations": {
            "lfw": {"every": "1 epoch"},
            "far": {"split": "lfw.flip"},
            "cfp": {},
            "seen": {"split": "train.few"},
        },
        "best": {"metric": "cfp/accuracy"},
    }
    new = Fitted(tree)
    fit.score(new, {"mine": "c", "other": "d"})
    assert new.get("evaluations") == {"mine": {}, "seen": {"split": "train.few"}, "other": {"at_end": True}}
    assert new.get("best.metric") == "mine/accuracy" and new.get("data.evaluate") == {"mine": "c", "other": "d"}
    again = Fitted({"data": {"evaluate": {"lfw": "a"}}, "evaluations": {"lfw": {}, "far": {"split": "lfw.flip"}}})
    fit.score(again, {"val": "c"})
    assert again.get("evaluations") == {"val": {}, "far": {"split": "val.flip"}}
    bare = Fitted({"data": {}})
    fit.score(bare, {"val": "c"})
    assert bare.get("evaluations") == {"val": {"every": "1 epoch"}}


@pytest.mark.parametrize(
    ("count", "block", "batch", "length"),
    [(1000, 1, 64, "300 steps, 15 per epoch"), (100, 1, 8, "240 steps, 12 per epoch: few"), (3, 1, 2, "20 steps")],
)
def test_the_batch_leaves_some_updates_to_an_epoch(count, block, batch, length):
    tree = Fitted({"train": {"length": "20 epochs", "batch_size": 64, "micro_batch": 32}})
    fit.measure(tree, count, block)
    assert tree.get("train.batch_size") == batch and tree.notes["train", "length"].text.startswith(length)
    assert tree.get("train.micro_batch") == (32 if batch == 64 else None)


# Scenes


def test_scenes_with_splits_give_names_to_be_filled_in_and_a_crop_that_fits(here):
    scene_sets.camvid(here / "streets", (12, 4), (64, 96))
    recipe, text = fitted("segment", "streets")
    data = recipe.data
    assert (data.train, data.evaluate) == ("streets#train", {"val": "streets#val"})
    assert data.names == ["class_0", "class_1", "class_2", "class_3"] and "name these values" in text
    assert data.crop == (64, 96) and recipe.best.metric == "val/miou"
    assert {name: e.split for name, e in recipe.evaluations.items()} == {
        "val": None, "scales": "val.msf", "pictures": "val.overlays"
    }  # fmt: skip
    files = sorted((here / "streets" / "train").glob("*.png"))
    pixels = np.stack([np.asarray(Image.open(file), np.float64) for file in files]).reshape(-1, 3) / 255
    assert np.allclose(data.mean, pixels.mean(0), atol=6e-4) and np.allclose(data.std, pixels.std(0), atol=6e-4)
    opened = data.open(0)
    assert opened.meta.classes == 4 and opened.train.size == 12 and "val.msf" in opened.evaluations


def test_scenes_without_splits_are_divided_by_lists_beside_the_recipe(here):
    table = np.asarray([0, 2, 5, 5], np.uint8)
    for n in range(20):
        picture, mask = scene_sets.scene(n, (64, 96), ignored=False)
        scene_sets.put(here / "streets" / "images" / f"a, {n:02d}.png", picture)
        scene_sets.put(here / "streets" / "masks" / f"a, {n:02d}.png", table[mask])
    recipe, text = fitted("segment", "streets")
    data = recipe.data
    assert (data.train, data.evaluate, data.root) == ("mine_train.txt", {"val": "mine_val.txt"}, "streets")
    assert data.names == ["class_0", "class_1", "class_2"] and data.ignore == [1, 3, 4]
    lines = [Path(f"mine_{part}.txt").read_text().splitlines() for part in ("train", "val")]
    assert [len(some) for some in lines] == [16, 4] and len({*lines[0], *lines[1]}) == 20
    assert "# <- a random fifth; keep images that belong together" in text
    opened = data.open(0)
    assert (opened.train.size, opened.evaluations["val"].size, opened.meta.classes) == (16, 4, 3)
    with pytest.raises(UserError, match=r"other_val\.txt: already exists"):
        Path("other_val.txt").write_text("mine")
        fitted("segment", "streets", "other.yaml")
    assert not Path("other.yaml").exists() and not Path("other_train.txt").exists()


def test_masks_that_do_not_fit_are_named_and_pictures_without_one_are_told(here):
    scene_sets.folders(here / "streets", 4, (64, 96), splits=())
    (here / "streets" / "masks" / "p000.png").unlink()
    copied = new_recipe.copy(RECIPES / "segment.yaml", Path("mine.yaml"), data="streets")
    assert "left out: 1 image without a mask: p000.jpg" in copied.seen
    Image.new("L", (48, 32)).save(here / "streets" / "masks" / "p001.png")
    with pytest.raises(UserError, match=r"p001\.png: 48 x 32 pixels, its image 96 x 64"):
        fitted("segment", "streets", "other.yaml")
    for n in (1, 2):
        (here / "streets" / "masks" / f"p{n:03d}.png").unlink()
    with pytest.raises(UserError, match="streets: 1 image; expected 2 or more"):
        fitted("segment", "streets", "other.yaml")


def test_coloured_masks_of_lists_give_a_palette(here):
    scene_sets.listed(here / "streets", (8, 3), (64, 96), colour=True)
    recipe, text = fitted("segment", "streets/train.txt")
    assert recipe.data.train == "streets/train.txt" and recipe.data.evaluate == {"val": "streets/val.txt"}
    assert set(recipe.data.palette.values()) == {(0, 0, 0), *scene_sets.COLOURS[:4]}, "black too: only its owner knows"
    assert recipe.data.names is None and "name these colours; list values without a class in ignore" in text
    assert recipe.data.open(0).meta.classes == 5


def test_small_pictures_are_not_made_smaller_than_can_be_told(here):
    scene_sets.camvid(here / "streets", (8, 3))
    recipe, _ = fitted("camvid", "streets")
    assert recipe.data.augment.scales == (0.67, 1.5) and recipe.data.crop == (16, 32), "images of 24 x 32"
    assert recipe.data.open(0).train.size == 8


def test_large_pictures_are_made_smaller_until_a_crop_shows_half_of_one(here):
    scene_sets.camvid(here / "streets", (3, 2), (300, 400))
    recipe, text = fitted("segment", "streets")
    assert recipe.data.size == (136, 184) and recipe.data.crop == (96, 128) and recipe.data.short_side is None
    assert recipe.data.score_at == "file"
    assert "# <- the median image is 300 x 400: larger crops show more" in text
    assert recipe.data.open(0).train.size == 3
    scene_sets.put(here / "streets" / "train" / "tall.png", np.zeros((600, 200, 3), np.uint8))
    scene_sets.put(here / "streets" / "trainannot" / "tall.png", np.zeros((600, 200), np.uint8))
    recipe, _ = fitted("segment", "streets", "other.yaml")
    assert recipe.data.short_side == 136 and recipe.data.size is None, "of different shapes"


@pytest.mark.parametrize(
    ("recipe", "put", "said"),
    [
        (
            "segment",
            lambda root: scene_sets.folders(root, 12, (64, 96), classes=3),
            "12 images: one of them moves a score by up to 8 %",
        ),
        (
            "hippocampus",
            lambda root: organ_volumes.put_set(root, 4),
            "1 case: one of them moves a score by up to 100 %",
        ),
        ("reid", lambda root: people_sets.index(root, 8), "2 people: one of them moves a score by up to 50 %"),
        ("face_teacher_lfw", _faces, "24 pairs: one of them moves a score by up to 4 %"),
    ],
)
def test_the_command_warns_of_few_samples_to_evaluate(here, caplog, recipe, put, said):
    if recipe == "hippocampus":
        pytest.importorskip("nibabel")
    put(here / "mine")
    done = CliRunner().invoke(main.main, ["cp", recipe, "mine.yaml", "--data", "mine"], catch_exceptions=False)
    assert done.exit_code == 0 and f"data.evaluate.val: {said}" in caplog.text
    caplog.clear()
    CliRunner().invoke(main.main, ["check", "mine.yaml"], catch_exceptions=False)
    assert said in caplog.text


# Volumes


def test_volumes_without_splits_hold_out_a_fold_and_the_patch_fits_the_network(here):
    pytest.importorskip("nibabel")
    organ_volumes.put_set(here / "scans", 4)
    recipe, text = fitted("hippocampus", "scans")
    data = recipe.data
    assert (data.train, data.evaluate, data.fold, data.folds) == ("scans", {"val": "held_out"}, 0, 4)
    assert data.names == ["label 1", "label 2"] and "names of the labels 1 to 2" in text
    assert "# <- for left_right in flips: list pairs of left and right labels in swap" in text
    assert data.patch == (6, 10, 12) and data.spacing is None, "depth is the axis of 4 mm"
    assert "# volumes are 6x10x12 in the median" in text and "voxels of 4x1.5x1 mm" in text
    opened = data.open(0)
    assert (opened.meta.classes, opened.train.size, opened.evaluations["val"].size) == (3, 3 * data.patches, 1)


def test_volumes_of_other_spacings_are_resampled_to_the_median(here):
    pytest.importorskip("nibabel")
    for split, cases in (("train", 3), ("val", 1)):
        for n in range(cases):
            image, labels = organ_volumes.volume(n + (split == "val") * 10, (24, 20, 12))
            organ_volumes.put_case(
                here / "scans" / split, f"p{split}{n}", image, labels, organ_volumes.affine((1.0, 1.5, 2.0 + 2 * n))
            )
    for split in ("train", "val"):
        named = '{"labels": {"background": 0, "left": 1, "right": 2}}'
        (here / "scans" / split / "dataset.json").write_text(named)
    recipe, text = fitted("tom500", "scans")
    data = recipe.data
    assert (data.train, data.evaluate, data.fold) == ("scans#train", {"val": "scans#val"}, None)
    assert data.spacing == (4.0, 1.5, 1.0) and data.names is None
    assert "# <- the median: files have 2x1.5x1 to 6x1.5x1 mm" in text
    assert recipe.data.augment.swap == [("left", "right")] and "# swap: labels that a flip" in text
    levels = fitting_multiple(data.patch, data.spacing, len(recipe.task.net.filters))
    assert all(side % m == 0 for side, m in zip(data.patch, levels, strict=True))
    assert data.patch[0] <= 12 and data.patch[1] <= 20 and data.patch[2] <= 24


def test_channels_of_volumes_and_values_of_labels_are_filled_in(here):
    pytest.importorskip("nibabel")
    for n in range(4):
        image, labels = organ_volumes.volume(n)
        for channel, array in enumerate((image, image**2)):
            organ_volumes.put(here / "scans" / "imagesTr" / f"sub-{n}_{channel:04}.nii.gz", array)
        values = np.asarray([0, 205, 420], np.float32)
        organ_volumes.put(here / "scans" / "labelsTr" / f"sub-{n}.nii.gz", values[labels])
    (here / "scans" / "dataset.json").write_text('{"channel_names": {"0": "T1w", "1": "FLAIR"}}')
    recipe, text = fitted("hippocampus", "scans")
    data = recipe.data
    assert data.train == "scans#train" and data.names is None
    assert data.labels == {"label 205": 205, "label 420": 420}
    assert "# <- label maps hold 205, 420: set their names, in the order of the classes" in text
    opened = data.open(0)
    assert opened.meta.shape == (2, *data.patch) and opened.meta.channels == ("T1w", "FLAIR")
    assert opened.meta.class_names == ("background", "label 205", "label 420")
    (here / "scans" / "imagesTr" / "sub-1_0001.nii.gz").unlink()
    with pytest.raises(UserError, match=r"sub-1_0000\.nii\.gz: 1 channel, others have 2"):
        fitted("hippocampus", "scans", "other.yaml")


def fitting_multiple(patch, spacing, most):
    from trainkit.models.patch_geometry import levels_for

    return levels_for(patch, spacing, most).multiple


# People


def test_people_of_several_modalities_are_held_out_and_drawn_as_many_as_there_are(here):
    people_sets.index(here / "crew", 8)
    recipe, text = fitted("reid", "crew")
    data = recipe.data
    assert (data.train, data.evaluate, data.hold_out) == ("crew", {"val": "held_out"}, 0.25)
    assert (data.sampler.name, data.sampler.people, data.sampler.each) == ("modal_pk", 6, 5)
    assert (recipe.train.batch_size, recipe.train.micro_batch) == (30, 30) and data.side == (16, 8)
    assert recipe.task.sdm is not None and recipe.evaluations["pictures"].split == "val.ranked"
    assert "72 records of 8 people (rgb 24, nir 16, cp 8, sk 8, text 16)" in text
    opened = data.open(0)
    assert opened.meta.classes == 6 and "val.ranked" in opened.evaluations


def test_people_in_colour_alone_are_drawn_without_modalities(here):
    people_sets.index(here / "crew", 8, (4, 0, 0, 0, 0))
    recipe, _ = fitted("reid", "crew")
    assert recipe.data.sampler.name == "pk" and recipe.task.sdm is None and recipe.task.contrast is not None
    assert recipe.data.open(0).meta.modalities == ("rgb",)


def test_a_split_of_an_index_is_used(here):
    rows = [(*row, split) for seed, split in enumerate(("train", "val")) for row in people_sets.index_rows(
        here / "crew", [f"{split}{n}" for n in range(4)], (3, 2, 1, 1, 2), seed)]  # fmt: skip
    people_sets.write_csv(here / "crew" / "people.csv", rows, (*people_sets.COLUMNS, "split"))
    recipe, _ = fitted("reid", "crew/people.csv")
    assert recipe.data.train == "crew/people.csv#train" and recipe.data.evaluate == {"val": "crew/people.csv#val"}
    assert recipe.data.hold_out is None and recipe.data.open(0).meta.classes == 4


def test_photographs_of_people_stand_for_what_is_derived_from_them(here):
    for person in range(5):
        for n in range(4):
            people_sets.picture(here / "crew" / f"p{person}" / f"{n}.png", 10 * person + n, (64, 64))
    recipe, text = fitted("reid_faces", "crew")
    assert recipe.data.train == "derived:crew" and "# <- infrared, pencil, sketch and text are computed" in text
    assert recipe.data.open(0).meta.classes == 3, "two of five are held out"


# Faces


def crowd(root: Path, people_: int, size: tuple[int, int] = (24, 24), seed: int = 0) -> Path:
    for person in range(people_):
        for n in range(4):
            people_sets.picture(root / f"p{seed}{person:02d}" / f"{n}.png", 1000 * seed + 10 * person + n, size)
    return root


def test_faces_and_their_teacher_are_copied_together(here):
    crowd(here / "faces" / "train", 6)
    val = crowd(here / "faces" / "val", 6, seed=1)
    people = {folder.name: [f"{folder.name}/{file.name}" for file in folder.iterdir()] for folder in val.iterdir()}
    (val / "pairs.csv").write_text(pairs_csv.written(pairs_csv.draw(people, "val")))
    recipe, text = fitted("adadistill_lfw", "faces")
    assert recipe.data.train == "faces#train" and recipe.data.evaluate == {"val": "faces/val/pairs.csv"}
    assert recipe.data.image_size == 24 and recipe.best.metric == "val/accuracy" and list(recipe.evaluations) == ["val"]
    assert "recipe: mine_teacher.yaml" in text and recipe.task.teacher.recipe == "mine_teacher.yaml"
    assert "# to decide: mine_teacher.yaml, line " in recipe_check.check(run_request.RunRequest(Path("mine.yaml")))
    teacher = loader.load("mine_teacher.yaml")
    assert teacher.name == "mine_teacher" and teacher.data == recipe.data
    assert recipe.data.open(0).meta.classes == 6
    (here / "faces" / "val" / "pairs.csv").unlink()
    with pytest.raises(
        UserError, match=r"no evaluation data; expected pairs\.csv or \.bin; name the folder of all people"
    ):
        fitted("adadistill_lfw", "faces", "other.yaml")
    assert not list(here.glob("other*"))
