"""A copied recipe: valid, without the old figures, and marked where the data is named; or fitted to other data."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import scene_sets
from click.testing import CliRunner
from PIL import Image
from runs import stripes

from trainkit.autoconfig import new_recipe
from trainkit.cli import main
from trainkit.config import loader, run_request, yaml_reader
from trainkit.data import hub
from trainkit.errors import UserError
from trainkit.experiments import recipe_check
from trainkit.tracking.store import Store

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def shipped(name: str) -> Path:
    (path,) = (path for path in RECIPES if path.stem == name)
    return path


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_copy_means_what_the_recipe_means_and_every_place_of_the_data_is_marked(recipe, tmp_path):
    for other in RECIPES:  # those that a recipe names are looked up beside it
        (tmp_path / other.name).write_bytes(other.read_bytes())
    marked = new_recipe.copy(recipe, tmp_path / "mine.yaml").marked
    text = (tmp_path / "mine.yaml").read_text()
    assert loader.dump(loader.load(tmp_path / "mine.yaml")) == loader.dump(loader.load(recipe))
    lines = [line for line in text.splitlines() if line.endswith(new_recipe.MARK)]
    assert len(lines) == marked == text.count(new_recipe.MARK)
    keys = {line.split(":")[0].strip() for line in lines}
    assert {"name", "train"} <= keys and keys & {"image_size", "patch", "crop"}
    assert ("class_weights" in keys) == ("class_weights:" in recipe.read_text()), "of the classes, so of the data"
    assert ("best" in keys) == ("best:" in recipe.read_text())
    assert not keys & {"optim", "length", "batch_size", "schedule", "net", "student", "margin"}
    assert text.startswith(f"# Copied from {recipe.name}.\n")
    assert "# paper" not in text and "arXiv" not in text, "its figures were measured on other data"


def test_the_line_marked_in_data_is_not_the_name_of_its_kind(tmp_path):
    new_recipe.copy(RECIPES[0], tmp_path / "mine.yaml")
    lines = (tmp_path / "mine.yaml").read_text().splitlines()
    assert "  name: faces" in lines and "  train: sample  # <- change" in lines
    assert "    recipe: face_teacher.yaml  # <- change" in lines, "a teacher of the old people"


def test_nothing_is_written_over_and_no_folder_is_made(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    with pytest.raises(UserError, match="already exists; name another file"):
        new_recipe.copy(RECIPES[0], tmp_path / "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    with pytest.raises(UserError, match="no such folder"):
        new_recipe.copy(RECIPES[0], tmp_path / "deep" / "mine.yaml")
    (tmp_path / "broken.yaml").write_text("name: x\n")
    with pytest.raises(UserError, match=r"broken\.yaml"):
        new_recipe.copy(tmp_path / "broken.yaml", tmp_path / "new.yaml")
    assert not (tmp_path / "new.yaml").exists() and not (tmp_path / "deep").exists()


def test_the_headline_and_the_header_of_a_recipe(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("# A recipe.\n#\n# paper   none\nname: r\n# not of the header\n")
    assert loader.headline(file) == "A recipe"
    assert loader.header(file) == "# A recipe.\n#\n# paper   none\n"
    file.write_text("name: r\n")
    assert loader.header(file) == ""
    for recipe in RECIPES:
        assert len(loader.headline(recipe)) > 20


# What `check` says of marked lines


def test_check_says_of_each_marked_line_what_its_key_means(tmp_path):
    new_recipe.copy(shipped("camvid"), tmp_path / "mine.yaml")
    said = new_recipe.open_lines(tmp_path / "mine.yaml", loader.load(tmp_path / "mine.yaml"))
    lines = (tmp_path / "mine.yaml").read_text().split("\n")
    assert len(said) == sum(new_recipe.MARK in line for line in lines)
    for sentence in said:
        number, _, rest = sentence.removeprefix("line ").partition(", ")
        key = rest.split(":")[0].split(".")[-1]
        assert lines[int(number) - 1].strip().startswith(f"{key}:"), sentence
    assert any("data.size: Height and width to which images and masks are resized" in sentence for sentence in said)
    assert any("task.objective.class_weights: " in sentence and "class" in sentence.split(": ")[1] for sentence in said)


def test_check_repeats_what_a_mark_says_and_a_recipe_without_marks_is_not_explained(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(shipped("convnext").read_text())
    assert "to decide" not in recipe_check.check(run_request.RunRequest(mine))
    mine.write_text(mine.read_text().replace("image_size: 32\n", "image_size: 32  # <- 64 sees more.\n"))
    (line,) = [line for line in recipe_check.check(run_request.RunRequest(mine)).splitlines() if "to decide" in line]
    number = 1 + next(n for n, text in enumerate(mine.read_text().split("\n")) if "image_size" in text)
    assert line == (
        f"# to decide: line {number}, data.image_size: 64 sees more; Side of an image in pixels, or [height, width]"
    )


# Other data


def fitted(recipe: str, data: str, new: str = "mine.yaml"):
    """The copy of a shipped recipe for other data, and what was made of it."""
    copied = new_recipe.copy(shipped(recipe), Path(new), data=data)
    return loader.load(new), copied


def test_pictures_of_classes_without_splits_are_held_out_and_measured(here):
    stripes(here / "patterns", 40, 1, (48, 60))
    recipe, copied = fitted("convnext", "patterns")
    data = recipe.data
    assert (recipe.name, data.train, data.evaluate) == ("mine", "patterns", {"val": "held_out"})
    assert (data.hold_out, data.group) == (0.2, "each") and data.image_size == 32
    files = sorted((here / "patterns").glob("*/*.png"))
    # What is seen is the middle square of each image, made smaller: the mean stays, the noise is averaged.
    whole = np.stack([np.asarray(Image.open(file), np.float64)[:, 6:54] for file in files]) / 255
    small = [Image.open(file).resize((32, 32), Image.Resampling.BICUBIC, box=(6, 0, 54, 48)) for file in files]
    pixels = np.stack([np.asarray(one, np.float64) for one in small]).reshape(-1, 3) / 255
    assert np.allclose(data.mean, pixels.mean(0), atol=6e-4) and np.allclose(
        data.mean, whole.mean((0, 1, 2)), atol=3e-3
    )
    assert np.allclose(data.std, pixels.std(0), atol=6e-4)
    assert recipe.best.metric == "val/ema/top1" and list(recipe.evaluations) == ["val"]
    assert recipe.train.batch_size == 8, "96 images to train on: 12 updates an epoch, and 3 of the recipe's 32"
    text = Path("mine.yaml").read_text()
    assert "patterns: 120 images of 3 classes (across, down, slanted), 40 each, 48 x 60 px" in text
    assert "  length: 20 epochs  # <- 240 steps, 12 per epoch: few" in text
    assert copied.marked == text.count(new_recipe.SIGN) == 4
    assert "  batch_size: 8  # <- 32 would give an epoch of 96 samples 3 steps; optim.lr was tuned for 32\n" in text
    assert "optim: {name: adamw, lr: 3e-3, weight_decay: 0.05, decay_1d: false}\n" in text, "as it was written"
    assert "# 1e-6, as published" in text and "arXiv" not in text, "comments of what stays; no header"


def test_a_fitted_recipe_opens_its_data_and_check_explains_what_is_left(here):
    stripes(here / "patterns", 12, 1, (48, 60))
    recipe, copied = fitted("convnext", "patterns")
    opened = recipe.data.open(recipe.seed)
    assert opened.meta.classes == 3 and opened.train.size == 30 and opened.evaluations["val"].size == 6
    said = [
        line
        for line in recipe_check.check(run_request.RunRequest(Path("mine.yaml"))).splitlines()
        if line.startswith("# ")
    ]
    assert len(said) == copied.marked
    assert any("data.group: do several images share" in line for line in said)


def test_splits_that_are_there_are_used_and_a_test_set_is_scored_at_the_end(here):
    for seed, split in enumerate(("train", "val", "test")):
        stripes(here / "patterns" / split, 12, seed)
    recipe, _ = fitted("convnext_cifar10", "patterns")
    assert recipe.data.train == "patterns#train" and recipe.data.hold_out is None
    assert recipe.data.evaluate == {"val": "patterns#val", "test": "patterns#test"}
    assert recipe.evaluations["val"].every is not None and recipe.evaluations["test"].every is None
    warm = recipe.train.schedule.warmup.over
    assert (warm.unit, warm.amount < 0.25 * 13 * 9) == ("steps", True), "400 steps would be more than the training"
    opened = recipe.data.open(0)
    assert {"val", "test"} <= set(opened.evaluations) and opened.train.size == 36


def test_splits_may_be_capitalised_and_those_that_do_not_fit_are_refused(here):
    for seed, split in enumerate(("Train", "Valid")):
        stripes(here / "patterns" / split, 12, seed)
    recipe, _ = fitted("convnext", "patterns")
    assert (recipe.data.train, recipe.data.evaluate) == ("patterns#Train", {"val": "patterns#Valid"})
    recipe.data.open(0)
    (here / "patterns" / "Valid" / "down").rename(here / "patterns" / "Valid" / "up")
    assert refused("convnext", "patterns") == (
        "patterns#Valid: classes that are not in the training set: up; expected those of patterns#Train"
    )
    (here / "patterns" / "Valid" / "up").rename(here / "patterns" / "Train" / "test")
    assert fitted("convnext", "patterns/Train", "other.yaml")[0].data.train == "patterns/Train", "a class called test"
    shutil.rmtree(here / "patterns" / "Valid")
    (here / "patterns" / "Valid").mkdir()
    assert "patterns/Valid: no images" in refused("convnext", "patterns")


def test_a_test_set_alone_is_scored_under_its_name_and_that_is_to_be_decided(here):
    for seed, split in enumerate(("train", "test")):
        stripes(here / "patterns" / split, 12, seed)
    recipe, _ = fitted("convnext", "patterns")
    assert recipe.data.evaluate == {"test": "patterns#test"} and recipe.best.metric == "test/ema/top1"
    assert list(recipe.evaluations) == ["test"]
    assert "# <- the test set also selects the best checkpoint" in Path("mine.yaml").read_text()
    fitted("convnext_cifar10", "patterns", "other.yaml")
    assert "# <- the test set" not in Path("other.yaml").read_text(), "nothing is chosen in a recipe without `best`"


def test_whole_classes_are_held_out_where_other_classes_are_scored(here):
    for seed, alphabet in enumerate(("greek", "runes")):
        stripes(here / "letters" / alphabet, 6, seed)
    recipe, _ = fitted("omniglot", "letters")
    assert recipe.data.open_set and recipe.data.hold_out == 0.34 and recipe.best.metric == "val/map_at_r"
    opened = recipe.data.open(recipe.seed)
    held = opened.evaluations["val"]
    assert len(held.names) == 2 and not set(held.names) & set(opened.meta.class_names)


def test_classes_that_were_trained_are_scored_by_retrieval_where_the_recipe_wanted_others(here):
    for seed, split in enumerate(("train", "val")):
        stripes(here / "patterns" / split, 12, seed)
    recipe, _ = fitted("omniglot", "patterns")
    assert not recipe.data.open_set and recipe.evaluations["val"].split == "val.retrieval"
    assert "val.retrieval" in recipe.data.open(0).evaluations


def test_uneven_classes_sizes_and_metrics_of_two_classes_are_seen(here):
    stripes(here / "patterns", 40, 1, (24, 24))
    for file in sorted((here / "patterns" / "down").glob("*.png"))[4:]:
        file.unlink()
    recipe, _ = fitted("eye_state", "patterns")
    assert recipe.best.metric == "val/ema/f1_macro"
    assert set(recipe.evaluations) == {"val", "separation", "separation_train", "pictures"}
    assert recipe.evaluations["pictures"].split == "val.inspection" and recipe.data.sampling == "balanced"
    fitted("convnext", "patterns", "other.yaml")
    other = Path("other.yaml").read_text()
    assert "  sampling: uniform  # <- 4 to 40 images per class" in other
    assert "  image_size: [16, 32]" not in other


def test_paths_begin_at_the_data_root_and_what_is_not_there_is_said(here, monkeypatch):
    stripes(here / "sets" / "patterns", 6, 1)
    monkeypatch.setenv("TRAINKIT_DATA", str(here / "sets"))
    assert fitted("convnext", "sets/patterns", "a.yaml")[0].data.train == "patterns"
    assert fitted("convnext", "patterns", "b.yaml")[0].data.train == "patterns", "from the data root as well"
    monkeypatch.setenv("TRAINKIT_DATA", str(here / "nowhere"))
    assert fitted("convnext", "sets/patterns", "c.yaml")[0].data.train == str(here / "sets" / "patterns")
    with pytest.raises(UserError, match="does not exist; expected a folder, a file or hf://owner/name"):
        fitted("convnext", "me/set", "d.yaml")
    assert not Path("d.yaml").exists()


def refused(recipe: str, data: str) -> str:
    """Why a copy for this data is refused; nothing is written then."""
    with pytest.raises(UserError) as caught:
        new_recipe.copy(shipped(recipe), Path("refused.yaml"), data=data)
    assert not list(Path().glob("refused*"))
    return str(caught.value)


def test_data_that_a_recipe_cannot_learn_from_is_refused_before_anything_is_written(here):
    stripes(here / "patterns", 4, 1)
    for name in ("down", "slanted"):
        (here / "patterns" / name).rename(here / name)
    said = refused("convnext", "patterns")
    assert "images of 1 class (across); expected two or more class folders" in said
    (here / "patterns" / "other").mkdir()
    (here / "patterns" / "other" / "a.gif").write_bytes(b"")
    said = refused("convnext", "patterns")
    assert "(across); 1 folder without images: other; 1 file (1 .gif) that are not images" in said
    (here / "patterns" / "across" / "000.png").write_bytes(b"no picture")
    (here / "down").rename(here / "patterns" / "down")
    assert "patterns/across/000.png: " in refused("convnext", "patterns")
    (here / "loose").mkdir()
    assert refused("convnext", "loose").startswith(f"{here}/loose: no images; expected images in <class>/<image>")
    (here / "patterns" / "other").rename(here / "loose" / "other")
    assert "loose: no images, only 1 file (1 .gif)" in refused("convnext", "loose")
    (here / "loose" / "a.png").write_bytes(b"")
    assert "loose: 1 image, in no folder of a class; expected" in refused("convnext", "loose")
    assert "a built-in set" in refused("convnext", "sample:objects")
    assert refused("convnext", "").startswith("--data: nothing; expected a folder")
    assert "a folder: volumes are read from files" in refused("hippocampus", "hf://me/set")


@pytest.mark.parametrize("recipe", ["convnext", "face_teacher_lfw", "reid", "segment", "hippocampus"])
def test_data_of_another_kind_is_refused_with_the_recipes_that_are_for_it(recipe, here):
    stripes(here / "mixed", 4, 1)
    (here / "mixed" / "down" / "a.nii.gz").write_bytes(b"")
    scene_sets.camvid(here / "streets", (2, 1))
    if recipe != "hippocampus":
        assert refused(recipe, "mixed").startswith(f"{here}/mixed/down/a.nii.gz: a volume (NIfTI); expected ")
    if recipe != "segment":
        assert "holds images with masks" in refused(recipe, "streets")
        assert refused(recipe, "streets").endswith("; copy segment or camvid instead")


def test_files_that_are_not_read_are_told(here):
    stripes(here / "patterns", 8, 1)
    for name in ("a.gif", "b.gif", "c.jxl", "notes.txt", ".hidden.gif"):
        (here / "patterns" / "down" / name).write_bytes(b"")
    _, copied = fitted("convnext", "patterns")
    assert copied.seen[1] == "left out: 3 files (2 .gif, 1 .jxl) that are not images"


def test_all_damaged_images_are_named_at_once_and_splits_without_train_with_what_to_do(here):
    stripes(here / "patterns", 12, 0)
    for name in ("across/000.png", "down/003.png"):
        (here / "patterns" / name).write_bytes(b"no image")
    said = refused("convnext", "patterns")
    assert "2 of 36 images are unusable:" in said and "across/000.png: " in said and "down/003.png: " in said
    stripes(here / "only" / "test", 4, 1)
    assert "run it with --data only/test, of which a part is held out" in refused("convnext", "only")
    stripes(here / "only", 4, 2)
    assert "mkdir only/train && mv only/across only/down only/slanted only/train" in refused("convnext", "only")


def test_the_command_prints_what_to_decide_and_leaves_no_recipe_whose_data_does_not_open(here):
    stripes(here / "patterns", 12, 0)
    done = CliRunner().invoke(main.main, ["cp", "convnext", "mine.yaml", "--data", "patterns"])
    assert done.exit_code == 0 and "\n  data.group: do several images share a person or a video?" in done.output
    for split in ("train", "val"):
        stripes(here / "twice" / split, 4, 5)
    done = CliRunner().invoke(main.main, ["cp", "convnext", "other.yaml", "--data", "twice"])
    assert done.exit_code == 2 and "leakage" in done.output and not Path("other.yaml").exists()


def test_the_blocks_that_are_written_read_back_whatever_is_in_them(here):
    stripes(here / "it's #1: a, [b]", 6, 1)
    recipe, _ = fitted("convnext", "it's #1: a, [b]")
    assert recipe.data.train == "it's #1: a, [b]"
    tree = yaml_reader.read(Path("mine.yaml").read_text()).tree
    assert tree["data"]["train"] == "it's #1: a, [b]"


def test_the_recipe_of_a_run_is_copied_without_its_defaults(here):
    run = Store.locate().new_run("convnext", 0, "abc123")
    run.recipe.write_text(loader.dump(loader.load(shipped("convnext"))))
    run.release()
    said = CliRunner().invoke(main.main, ["cp", run.name, "mine.yaml"])
    assert said.exit_code == 0, said.output
    text = Path("mine.yaml").read_text()
    assert text.startswith(f"# Copied from run {run.name}.\n#\n") and "null" not in text and "seed" not in text
    assert loader.load("mine.yaml") == loader.load(shipped("convnext"))
    stripes(here / "patterns", 12, 1)
    said = CliRunner().invoke(main.main, ["cp", run.name, "other.yaml", "--data", "patterns"])
    assert said.exit_code == 0 and said.output.startswith("patterns: 36 images of 3 classes"), said.output
    other = loader.load("other.yaml")
    assert other.data.evaluate == {"val": "held_out"} and other.evaluations["val"].split is None
    assert other.best.metric == "val/ema/top1" and other.data.open(0).meta.classes == 3


def test_what_was_asked_of_the_old_scores_is_left_out_or_marked(here):
    asked = "stop_when: {metric: val/top1, patience: 3}\n"
    Path("asked.yaml").write_text(shipped("convnext").read_text() + asked)
    stripes(here / "patterns", 12, 1)
    new_recipe.copy(Path("asked.yaml"), Path("mine.yaml"), data="patterns")
    mine = loader.load("mine.yaml")
    assert mine.stop_when is None
    new_recipe.copy(Path("asked.yaml"), Path("other.yaml"))
    last = Path("other.yaml").read_text().rstrip().splitlines()[-1]
    assert last.endswith(new_recipe.MARK), last


def test_a_word_that_is_neither_a_recipe_nor_a_run_is_answered_with_the_nearest_recipe(here):
    said = CliRunner().invoke(main.main, ["cp", "convnet", "mine.yaml"])
    assert said.exit_code == 2
    assert "'convnet': neither a recipe nor a run; trainkit ls lists recipes" in said.output


def test_classes_may_be_called_anything_that_a_folder_may(here):
    stripes(here / "patterns", 6, 1)
    for old, new in (("across", "a  b # <- c"), ("down", "- 'x': \"y\""), ("slanted", "blüte {x: [1]")):
        (here / "patterns" / old).rename(here / "patterns" / new)
    recipe, copied = fitted("convnext", "patterns")
    assert recipe.name == "mine" and copied.seen[0].count("blüte") == 1
    assert len(new_recipe.open_lines(Path("mine.yaml"), recipe)) >= 3


def test_sets_of_the_hub_are_looked_at_by_their_splits(here, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    home = here / "snapshot" / "data"
    home.mkdir(parents=True)
    for seed, (split, count) in enumerate((("train", 30), ("test", 12))):
        rng = np.random.default_rng(seed)
        rows = []
        for n in range(count):
            stream = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(stream, "PNG")
            rows.append({"image": {"bytes": stream.getvalue(), "path": None}, "label": n % 3})
        pq.write_table(pa.Table.from_pylist(rows), home / f"{split}-00000-of-00001.parquet")
    asked = []

    def download(path, *, network=True):
        asked.append((str(path).split("#")[0], network))
        return home.parent

    monkeypatch.setattr(hub, "download", download)
    recipe, _ = fitted("convnext", "hf://me/dots")
    assert set(asked) == {("hf://me/dots", True)}
    assert recipe.data.train == "hf://me/dots#train" and recipe.data.evaluate == {"test": "hf://me/dots#test"}
    assert "hf://me/dots#train: 30 images of 3 classes (0, 1, 2), 10 each, 32 x 32 px" in Path("mine.yaml").read_text()
    asked.clear()
    opened = recipe.data.open(0)
    assert opened.train.size == 30 and not any(network for _, network in asked), "a training uses no network"
