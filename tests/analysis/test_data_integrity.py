"""The report on the data of a run: what is found, what follows by the policy, that it is made once, and the verb."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import nifti_sets
import numpy as np
import people_sets as person_sets
import pytest
import scene_sets
from click.testing import CliRunner
from PIL import Image
from runs import ROOT, newest, overrides, run

from trainkit.analysis import data_integrity
from trainkit.cli import main
from trainkit.config import loader
from trainkit.data import leakage
from trainkit.data.faces.dataset import Faces
from trainkit.data.images.dataset import Images
from trainkit.data.leakage import Held
from trainkit.data.people.dataset import People
from trainkit.data.people.pk_sampler import ModalPK
from trainkit.data.people.tokenizer import Captions
from trainkit.data.scenes.dataset import Scenes
from trainkit.data.volumes.dataset import Volumes
from trainkit.errors import EXIT_CODE, UserError
from trainkit.tracking.store import Store

pytestmark = pytest.mark.usefixtures("cache", "store")
SIDE = 32
CONVNEXT = ROOT / "recipes" / "convnext.yaml"


def field(seed: int, side: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """An image of soft coloured blobs; every seed gives another."""
    coarse = np.random.default_rng([11, seed]).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(side[::-1], Image.Resampling.BICUBIC)


def compressed(picture: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=70)
    return Image.open(io.BytesIO(stream.getvalue()))


def classes(root: Path, first: int, each: int = 4, names=("ant", "bee", "cow")) -> Path:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for k in range(each):
            field(first + 100 * number + k).save(root / name / f"{k}.png")
    return root


@pytest.fixture
def clean(tmp_path) -> Path:
    """Twelve images of three classes to train on, and six others to be scored."""
    classes(tmp_path / "set" / "train", 0)
    classes(tmp_path / "set" / "val", 1000, each=2)
    return tmp_path / "set"


@pytest.fixture
def leaking(clean) -> Path:
    """The same, with one image of the training set among those to be scored, compressed anew."""
    compressed(field(101)).save(clean / "val" / "cow" / "again.png")
    return clean


def images(root: Path, **more) -> Images:
    given = {"train": f"{root}/train", "evaluate": {"val": f"{root}/val"}, "image_size": SIDE}
    return Images(**(given | more))


def found(report, where: str, check: str):
    (one,) = (one for one in report.findings if (one.where, one.check) == (where, check))
    return one


def verdicts(report) -> dict[tuple[str, str], str]:
    return {(one.where, one.check): one.verdict for one in report.findings}


VAL = "data.evaluate.val"


# ---- What is found ---------------------------------------------------------------------------------------------------


def test_every_check_of_a_clean_set_is_listed(clean):
    report = data_integrity.of(images(clean).open(0))
    assert report.summary == "clean" and not report.bad and report.sentences() == []
    own = {"unlabelled": "ok", "two classes": "ok"}
    both = {"subjects": "unknown", "copies": "ok", "look-alikes": "ok"}
    expected = {("data.train", check): word for check, word in own.items()}
    assert verdicts(report) == expected | {(VAL, check): word for check, word in (own | both).items()}
    assert found(report, VAL, "look-alikes").of == 6 and found(report, VAL, "copies").of == 6
    assert found(report, "data.train", "unlabelled").said == "0 of 12 images have no class"
    assert {key: (one["samples"], one["looked_at"]) for key, one in report.sets.items()} == {
        "data.train": (12, 12), VAL: (6, 6)
    }  # fmt: skip


def test_a_picture_that_was_compressed_anew_is_found_where_its_content_is_another(leaking):
    report = data_integrity.of(images(leaking).open(0))  # which `leakage: refuse` opens
    assert verdicts(report)[VAL, "copies"] == "ok" and report.summary.startswith("1 leak")
    one = found(report, VAL, "look-alikes")
    assert (one.verdict, one.count, one.of) == ("leak", 1, 7)
    assert one.examples[0].startswith("cow/again.png = bee/1.png (")
    assert "look like one in data.train: cow/again.png = bee/1.png" in one.said
    (sentence, *_) = report.sentences()
    assert sentence.startswith(VAL) and sentence.endswith(
        "its metrics are too optimistic: look at figures/look_alikes.png"
    )
    assert one.places == [[6, 5]]  # of folders in order: ant, ant, bee, bee, cow, cow, cow; four ants, then bee/1


def test_what_is_a_copy_is_not_told_again_as_alike(clean, caplog):
    field(3).save(clean / "val" / "bee" / "copy.bmp")
    with caplog.at_level(logging.WARNING):
        report = data_integrity.of(images(clean, leakage="allow").open(0))
    assert (found(report, VAL, "copies").verdict, found(report, VAL, "copies").count) == ("leak", 1)
    assert found(report, VAL, "look-alikes").verdict == "ok"


def test_mirrored_copies_are_told_as_such(clean):
    field(101).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(clean / "val" / "ant" / "turned.png")
    one = found(data_integrity.of(images(clean).open(0)), VAL, "look-alikes")
    assert (one.verdict, one.count) == ("leak", 1) and one.examples == ["ant/turned.png = bee/1.png (1.000, mirrored)"]


def test_groups_count_unless_every_picture_is_its_own(clean):
    group = r"(\d)\.png"
    report = data_integrity.of(images(clean, group=group, leakage="allow").open(0))
    one = found(report, VAL, "subjects")
    assert (one.verdict, one.count, one.of, one.examples) == ("leak", 2, 2, ["0", "1"])
    held = data_integrity.held(images(clean, group=group, leakage="allow").open(0))
    train, val = (str(held[name][1].packed.path) for name in ("train", "val"))
    for said, verdict in ((None, "leak"), ("each", "unknown")):
        data = images(clean, train=train, evaluate={"val": val}, group=said, leakage="allow")
        assert found(data_integrity.of(data.open(0)), VAL, "subjects").verdict == verdict


def test_pictures_under_two_classes_are_odd(clean):
    field(0).save(clean / "train" / "bee" / "same.png")
    report = data_integrity.of(images(clean).open(0))
    same = found(report, "data.train", "two classes")
    assert (same.verdict, same.count, same.of) == ("odd", 1, 13) and "ant/0.png" in same.examples[0]
    assert report.summary == "1 odd" and not report.bad and report.sentences() == []


def fake(label):
    label = np.asarray(label)
    held = Held(
        prints=np.arange(len(label), dtype=np.uint64), names=lambda places: [f"s{k}" for k in places], label=label
    )
    return SimpleNamespace(name="fake", digest="d", held=lambda: held)


def opened(sample, **scored):
    return SimpleNamespace(train=sample, evaluations=scored)


def test_pictures_of_no_class_are_wrong_where_they_are_trained_on_alone():
    some = fake([0, 0, 0, 1, 1, -1])
    report = data_integrity.of(opened(some, val=some))
    assert found(report, "data.train", "unlabelled").verdict == "wrong"
    assert found(report, VAL, "unlabelled").verdict == "ok"
    assert "1 of 6 images have no class" in found(report, VAL, "unlabelled").said
    assert "1 wrong" in report.summary


def test_ways_of_scoring_a_set_are_one_set_and_the_training_set_is_none():
    some = fake([0])
    report = data_integrity.of(opened(some, **{"val": some, "val.few": some, "train": some, "train.few": some}))
    assert list(report.sets) == ["data.train", VAL]
    assert data_integrity.of(opened(SimpleNamespace(), val=some)) is None
    assert list(data_integrity.of(opened(some, val=SimpleNamespace())).sets) == ["data.train"]


def test_damaged_pictures_are_wrong_and_named_and_looked_at_again(clean, tmp_path, monkeypatch):
    packed = images(clean).open(0).train.packed
    file = packed.path / "rows.arrow"
    whole = file.read_bytes()
    with open(file, "r+b") as out:
        out.seek(packed.span("image", len(packed) - 1)[0])
        out.write(bytes(3 * SIDE * SIDE))
    monkeypatch.setattr("trainkit.data.rows.reader.HASHED_AT_OPEN", 0)
    report = data_integrity.of(images(clean).open(0), tmp_path / "kept")
    one = found(report, "data.train", "damaged")
    assert (one.verdict, one.count, one.of) == ("wrong", 1, 12) and "cow/3.png" in one.said
    assert report.summary == "1 wrong" and report.sets["data.train"]["looked_at"] == 11
    file.write_bytes(whole)
    assert data_integrity.of(images(clean).open(0), tmp_path / "kept").summary == "clean"


# ---- Each kind of data -----------------------------------------------------------------------------------------------


def test_faces_are_compared_by_names_that_are_no_numbers(tmp_path):
    for part, names in (("train", ("anna", "ben", "007")), ("pairs", ("zoe", "ben", "007"))):
        for number, name in enumerate(names):
            (tmp_path / part / name).mkdir(parents=True)
            for k in range(2):
                field(10 * number + k + 500 * (part == "pairs"), (16, 16)).save(tmp_path / part / name / f"{k}.png")
    lines = "path_a,path_b,same\nzoe/0.png,zoe/1.png,1\nben/0.png,007/0.png,0\n"
    (tmp_path / "pairs" / "pairs.csv").write_text(lines)
    data = Faces(train=str(tmp_path / "train"), evaluate={"val": str(tmp_path / "pairs")}, image_size=16)
    report = data_integrity.of(data.open(0))
    one = found(report, VAL, "subjects")
    assert (one.verdict, one.count, one.of, one.examples) == ("leak", 1, 2, ["ben"])
    assert one.said == "1 of its 2 people are in data.train: ben"
    assert verdicts(report)[VAL, "copies"] == "ok" == verdicts(report)["data.train", "two classes"]
    field(1, (16, 16)).save(tmp_path / "pairs" / "zoe" / "0.png")
    assert found(data_integrity.of(data.open(0)), VAL, "copies").examples == ["zoe/0.png = anna/1.png"]


def test_people_are_compared_by_their_pictures_of_every_modality(tmp_path):
    person_sets.index(tmp_path / "train", 4, (3, 2, 1, 1, 2))
    person_sets.index(tmp_path / "val", ["p01", "x"], (3, 2, 1, 1, 2), seed=7)
    data = People(
        train=str(tmp_path / "train"),
        evaluate={"val": str(tmp_path / "val")},
        sampler=ModalPK(people=2, each=5),
        image_size=(16, 8),
        text=Captions(length=12, vocabulary=500),
        leakage="allow",
    )
    report = data_integrity.of(data.open(0))
    one = found(report, VAL, "subjects")
    assert (one.verdict, one.count, one.of) == ("leak", 1, 2) and one.examples == ["p01"]
    assert found(report, "data.train", "unlabelled").of == 28
    assert report.sets["data.train"]["samples"] == 28 == report.sets["data.train"]["looked_at"]
    assert verdicts(report)[VAL, "copies"] == "ok" == verdicts(report)[VAL, "look-alikes"]


def test_scenes_are_compared_by_their_pictures(tmp_path):
    home = scene_sets.camvid(tmp_path / "street")
    names = list(scene_sets.NAMES[: scene_sets.CLASSES])
    data = Scenes(train=f"{home}#train", evaluate={"val": f"{home}#val"}, names=names, crop=(16, 24))
    report = data_integrity.of(data.open(0))
    assert report.sets["data.train"]["samples"] == 6 and report.sets[VAL]["looked_at"] == 3
    assert verdicts(report)[VAL, "look-alikes"] == "ok" and not report.bad


def test_volumes_are_compared_by_patients_and_content_and_not_looked_at(tmp_path):
    for part, cases in {"train": ["p1_1", "p2_2", "p3_3"], "val": ["p2_3", "q_4"]}.items():
        for case in cases:
            nifti_sets.write_case(tmp_path / part, case, int(case[-1]))
    sets = {"train": str(tmp_path / "train"), "evaluate": {"val": str(tmp_path / "val")}}
    data = Volumes(**sets, names=["ball", "box"], patch=(4, 8, 8), patient="(.*)_", leakage="allow")
    report = data_integrity.of(data.open(0))
    assert found(report, VAL, "subjects").said == "1 of its 2 patients are in data.train: p2"
    assert found(report, VAL, "copies").said == "1 of its 2 volumes are in data.train: p2_3 = p3_3"
    assert found(report, VAL, "look-alikes").verdict == "unknown"
    assert report.sets["data.train"]["looked_at"] == 0


# ---- Once ------------------------------------------------------------------------------------------------------------


def test_a_report_is_made_once_for_a_digest_and_again_for_other_data(leaking, tmp_path, monkeypatch):
    first = data_integrity.of(images(leaking).open(0), tmp_path / "kept")

    def never(*_):
        raise AssertionError("made again")

    with monkeypatch.context() as patch:
        patch.setattr(data_integrity, "_examined", never)
        assert data_integrity.of(images(leaking).open(0), tmp_path / "kept") == first
        assert data_integrity.of(images(leaking).open(0), tmp_path / "kept").json() == first.json()
        with pytest.raises(AssertionError, match="made again"):
            data_integrity.of(images(leaking).open(0), tmp_path / "kept", whole=True)
    file = tmp_path / "kept" / f"{first.mark}.json"
    for damage in ("", "[]", "{", '{"mark": 1}', file.read_text().replace(first.mark, "0" * 32)):
        file.write_text(damage)
        assert data_integrity.of(images(leaking).open(0), tmp_path / "kept").findings == first.findings
    (leaking / "val" / "cow" / "again.png").unlink()
    other = data_integrity.of(images(leaking).open(0), tmp_path / "kept")
    assert other.mark != first.mark and not other.bad


def test_pictures_are_looked_at_once_however_the_set_is_divided(clean, tmp_path, monkeypatch):
    def data(seed: int):
        return images(clean, evaluate={}, group=r"(\w+/\d)\.png", hold_out=0.3, split_seed=seed).open(0)

    one = data_integrity.of(data(0), tmp_path / "kept")

    def never(*_):
        raise AssertionError("read again")

    monkeypatch.setattr(leakage, "_cells_of", never)
    other = data_integrity.of(data(1), tmp_path / "kept")
    assert one.mark != other.mark and found(other, "data.evaluate.held_out", "look-alikes").verdict == "ok"


def test_all_pictures_are_looked_at_when_asked_and_that_report_serves_from_then_on(clean, tmp_path, monkeypatch):
    monkeypatch.setattr(leakage, "PICTURES", 5)
    part = data_integrity.of(images(clean).open(0), tmp_path / "kept")
    assert part.sets["data.train"]["looked_at"] == 5 and not part.whole
    assert "(5 of its 12 were compared)" in found(part, VAL, "look-alikes").said
    assert any("--all compares all" in line for line in data_integrity.lines(part))
    whole = data_integrity.of(images(clean).open(0), tmp_path / "kept", whole=True)
    assert whole.sets["data.train"]["looked_at"] == 12 and whole.whole
    assert data_integrity.of(images(clean).open(0), tmp_path / "kept") == whole


# ---- What follows ----------------------------------------------------------------------------------------------------


def words(root: Path, **changes: str) -> list[str]:
    settings = {
        "data": f"{{name: images, train: '{root}/train', evaluate: {{val: '{root}/val'}}, image_size: {SIDE}}}",
        "task.net": "{model: test_convnext3, args: {patch_size: 2}}",
        "train": "{length: 2 steps, batch_size: 4, ema: 0.9}",
        "evaluations": "{val: {every: 2 steps}}",
    }
    return overrides(settings, changes)


def artifact(path: str, tmp_path: Path) -> str:
    client, run_id = Store.locate().client(), newest().info().run_id
    return Path(client.download_artifacts(run_id, path, str(tmp_path))).read_text()


def test_a_run_says_what_it_found_and_keeps_it(leaking, tmp_path, capsys):
    assert run(*words(leaking), recipe=CONVNEXT).code == 0
    assert f"integrity: {VAL}: 1 of 7 images look like one in data.train" in capsys.readouterr().out
    kept = json.loads(artifact("tables/integrity.json", tmp_path))
    assert {one["check"] for one in kept["findings"] if one["verdict"] == "leak"} == {"look-alikes"}
    tags = Store.locate().client().get_run(newest().info().run_id).data.tags
    assert tags["trainkit.integrity"].startswith("1 leak")
    drawn = Store.locate().client().list_artifacts(newest().info().run_id, "figures")
    assert data_integrity.FIGURE in [file.path for file in drawn]


def test_what_looks_the_same_is_drawn_side_by_side(leaking, monkeypatch):
    drawn = []
    monkeypatch.setattr("trainkit.plots.embeddings.sheet", lambda *said: drawn.append(said) or "a figure")
    data = images(leaking).open(0)
    assert data_integrity.pictures(data_integrity.of(data), data) == "a figure"
    ((tiles, captions, _),) = drawn
    assert [tile.shape for tile in tiles] == [(128, 256, 3)] and captions[0].startswith("val: 0.9")
    assert captions[0].endswith("\ncow/again.png\nbee/1.png")
    whole = np.asarray(field(101).resize((128, 128)))
    assert (tiles[0][:, 128:] == whole).all()
    assert 0 < np.abs(tiles[0][:, :128] - whole.astype(int)).mean() < 20  # compressed
    (leaking / "val" / "cow" / "again.png").unlink()
    data = images(leaking).open(0)
    assert data_integrity.pictures(data_integrity.of(data), data) is None


def test_a_run_is_refused_before_it_begins_where_the_policy_says_so(leaking):
    with pytest.raises(UserError, match=r"(?s)refuse stops this run.*look like one in data\.train.*integrity\.policy"):
        run(*words(leaking, integrity__policy="refuse"), recipe=CONVNEXT)
    assert Store.locate().runs() == []


def test_nothing_is_looked_at_where_it_is_off_or_the_data_do_not_say_what_they_hold():
    class Runtime:
        def on_main(self, act):
            act()

    def ensure(policy: str, data):
        recipe = loader.load(CONVNEXT, [f"integrity.policy={policy}"])
        return data_integrity.ensure(recipe, data, Runtime(), Store.locate())

    unknown, known = opened(SimpleNamespace()), opened(fake([0]))
    assert ensure("off", known) is None is ensure("refuse", unknown)
    assert not (Store.locate().home / data_integrity.FOLDER).exists()
    data_integrity.note(None, unknown, tracker=None, say=None)
    assert ensure("refuse", known).summary == "clean"


def test_the_policy_is_no_part_of_what_an_experiment_is():
    every = [loader.load(CONVNEXT, [f"integrity.policy={word}"]) for word in ("warn", "refuse", "off")]
    assert len({loader.digest(recipe) for recipe in every}) == 1


# ---- The verb --------------------------------------------------------------------------------------------------------


def ask(*said: str, code: int = 0) -> str:
    result = CliRunner().invoke(main.main, ["data", "check", *said], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_the_verb_tells_all_and_its_exit_code_the_worst(leaking, tmp_path):
    out = ask(str(CONVNEXT), *words(leaking), "--json", str(tmp_path / "report.json"), code=EXIT_CODE)
    lines = out.splitlines()
    assert any(line.split() == [VAL, "look-alikes", "1", "7", "leak"] for line in lines)
    assert any(line.startswith(f"{VAL}: 1 of 7 images look like one") for line in lines)
    assert lines[-1].startswith(f"{CONVNEXT}: 1 leak")
    kept = json.loads((tmp_path / "report.json").read_text())
    assert kept["mark"] in {file.stem for file in (Store.locate().home / data_integrity.FOLDER).glob("*.json")}
    sheet = tmp_path / "pairs.png"
    assert ask(str(CONVNEXT), *words(leaking), "--images", str(sheet), code=EXIT_CODE).count(str(sheet)) == 1
    assert Image.open(sheet).format == "PNG"
    assert "cannot be written" in ask(str(CONVNEXT), *words(leaking), "--images", str(tmp_path), code=EXIT_CODE)
    field(3).save(leaking / "val" / "bee" / "copy.bmp")  # which a training would refuse to open
    lines = ask(str(CONVNEXT), *words(leaking), "--all", code=EXIT_CODE).splitlines()
    assert any(line.split() == [VAL, "copies", "1", "8", "leak"] for line in lines)
    for file in ("bee/copy.bmp", "cow/again.png"):
        (leaking / "val" / file).unlink()
    assert f"{CONVNEXT}: clean" in ask(str(CONVNEXT), *words(leaking)).splitlines()


def test_the_verb_says_what_it_cannot_look_at(tmp_path):
    from runs import PLUGIN, TOY

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        said = ask(str(TOY), "--plugin", "toy", code=EXIT_CODE)
    assert "data ToyData cannot be checked" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adadistill", "convnext", "eye_state", "reid", "segment", "tom500"])
def test_what_comes_drawn_with_a_recipe_is_clean(name):
    """Nothing that is built in is scored and trained on, nor looks as if it were."""
    recipe = loader.load(ROOT / "recipes" / f"{name}.yaml")
    report = data_integrity.of(recipe.data.open(recipe.seed))
    assert not report.bad, [one.said for one in report.bad]
