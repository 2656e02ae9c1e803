"""The recipes of the guides, with the settings as shipped, on small made sets that are laid out like theirs."""

import io
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from runs import ROOT, run
from safetensors.torch import save_file

from trainkit.config.loader import load
from trainkit.data import face_alignment
from trainkit.data.formats import recordio
from trainkit.models import face_backbones

pytestmark = [pytest.mark.usefixtures("store", "cache"), pytest.mark.slow]
PEOPLE, EACH, SIDE = 4, 8, 32
PAIRS = ("lfw", "cfp_fp", "cfp_ff", "agedb_30", "calfw", "cplfw", "vgg2_fp")


def picture(person: int, seed: int, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """Noise, and a coloured stripe by which even a network that was not trained tells people apart."""
    pixels = np.random.default_rng(seed).integers(0, 20, (*size, 3))
    pixels[8 * (person % 2) :: 16, :, person % 3] += 200
    pixels[8 * (person % 2) + 1 :: 16, :, person % 3] += 200
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(person: int, seed: int) -> bytes:
    out = io.BytesIO()
    picture(person, seed).save(out, "PNG")
    return out.getvalue()


def records(folder: Path) -> None:
    """`train.rec` and `train.idx`, without a head record."""
    folder.mkdir()
    body, index = b"", ""
    for key in range(PEOPLE * EACH):
        data = struct.pack("<IfQQ", 0, key % PEOPLE, key, 0) + encoded(key % PEOPLE, key)
        index += f"{key}\t{len(body)}\n"
        body += struct.pack("<II", recordio.MAGIC, len(data)) + data + bytes(-len(data) % 4)
    (folder / "train.rec").write_bytes(body)
    (folder / "train.idx").write_text(index)


def templates(folder: Path) -> None:
    """Six templates of two media each: three people, twice."""
    points = " ".join(f"{value:.4f}" for value in (face_alignment.TEMPLATE * SIDE / 112).ravel())
    tables = {
        "face_tid_mid": [f"{i}.png {i // 2} {i}" for i in range(12)],
        "name_5pts_score": [f"{i}.png {points} 1" for i in range(12)],
        "template_pair_label": [f"{a} {b} {int(a % 3 == b % 3)}" for a in range(3) for b in range(3, 6)],
    }
    for inner in ("loose_crop", "meta"):
        (folder / inner).mkdir(parents=True)
    for i in range(12):
        picture(i // 2 % 3, 500 + i).save(folder / "loose_crop" / f"{i}.png")
    for name, lines in tables.items():
        (folder / "meta" / f"{folder.name.lower()}_{name}.txt").write_text("\n".join(lines) + "\n")


def tinyface(folder: Path) -> None:
    for part, names in {"Probe": ["1_1", "2_1"], "Gallery_Match": ["1_2", "2_2"], "Gallery_Distractor": ["3"]}.items():
        (folder / part).mkdir(parents=True)
        for i, name in enumerate(names):
            picture(int(name[0]), 700 + i).save(folder / part / f"{name}.png")


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("TRAINKIT_DATA", str(root))
    return root


def test_distillation_with_adaface_scores_pairs_each_epoch_and_templates_every_fourth(root):
    records(root / "faces_emore")
    for name in PAIRS:
        shown = [encoded(person, 900 + i) for i, person in enumerate((0, 0, 1, 1, 0, 1, 2, 3) * 5)]
        content = (shown, [True, True, False, False] * 5)
        (root / "faces_emore" / f"{name}.bin").write_bytes(pickle.dumps(content))
    for name in ("IJBB", "IJBC"):
        templates(root / "IJB_release" / name)
    tinyface(root / "tinyface" / "Testing_Set")
    file = ROOT / "recipes" / "adadistill_adaface_ms1mv2.yaml"
    small = ("task.teacher.net={name: ir18, embedding: 32, width: 0.125}",
             "task.student={name: mobilefacenet, embedding: 32, width: 0.25}",
             f"data.image_size={SIDE}", "train.batch_size=16", "train.length=5 epochs", "loader.workers=0",
             "train.schedule.at=[2 epochs]", "log={every: 1 steps, system_every: null, baseline: false}")  # fmt: skip
    teacher = face_backbones.build(load(file, small).task.teacher.net, (3, SIDE, SIDE))
    (root / "weights").mkdir()
    save_file(teacher.state_dict(), root / "weights" / "teacher.safetensors")
    ran = run(*small, "task.teacher.weights=weights/teacher.safetensors", recipe=file)
    assert ran.code == 0 and ran.last.step == 10
    steps = {name: [point.step for point in points] for name, points in ran.history.metrics.items()}
    for name in PAIRS:
        assert steps[f"{name}/accuracy"] == [2, 4, 6, 8, 10]
    found = {name.split("/")[0]: at for name, at in steps.items() if name.split("/")[0] in ("ijbb", "ijbc", "tinyface")}
    assert found == {"ijbb": [8, 10], "ijbc": [8, 10], "tinyface": [8, 10]}, "and at the end"
    assert np.isfinite(ran.series("train/loss")).all()


def test_the_eye_recipe_trains_on_a_folder_of_crops_and_halves_its_rate_by_a_plateau(root):
    for part, count in (("train", 32), ("val", 12)):
        for label, name in enumerate(("closed", "open")):
            (root / "eyes" / part / name).mkdir(parents=True)
            for i in range(count):
                picture(label, 100 * (part == "val") + 50 * label + i, (24, 40)).save(
                    root / "eyes" / part / name / f"{i}.png"
                )
    ran = run("train.length=6 epochs", "train.batch_size=32", "train.schedule.warmup.over=1 epoch", "loader.workers=0",
              "train.schedule.min_delta=100", "log={every: 1 steps, system_every: null, baseline: false}",
              recipe=ROOT / "recipes" / "eye_state_ocec.yaml")  # fmt: skip
    assert ran.code == 0 and ran.last.step == 12
    # Nothing improves by 100: of the evaluations after the warm-up the first sets the best, three more wait.
    assert [event.step for event in ran.events("lr_reduced")] == [8]
    assert ran.series("train/lr")[-4:] == pytest.approx([6e-5] * 4)
    assert len(ran.series("separation/ks")) == 1
