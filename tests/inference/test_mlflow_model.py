"""Logged models as MLflow has them: loaded by its own functions in a fresh process, they predict what the command does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel
import nifti_sets
import numpy as np
import people_sets
import pytest
import scene_sets
from PIL import Image
from pyarrow import parquet
from runs import ROOT, own_store, stripes
from untrained_runs import Made, made

from trainkit.inference import mlflow_model, predict
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker
from trainkit.training.best import best_weights

CLASSES = ("task.net={model: test_convnext3, args: {patch_size: 2, ls_init_value: 0.5}}", "train.batch_size=4")
FACES = ("data.image_size=32", "evaluations={pairs: {}}", "best=null", "train.batch_size=4")
REID = (
    "data.image_size=[32, 16]", "data.text={length: 12}", "evaluations={val: {}}", "best=null",
    "data.sampler={name: modal_pk, people: 2, each: 5, batches_per_epoch: 4}",
    "train={length: 12 steps, batch_size: 20, micro_batch: 10}",
    "task.net={model: resnet18, args: {layers: [1, 1, 1, 1], channels: [8, 8, 16, 16]}, embedding: 16, "
    "text: {layers: 1, width: 16, heads: 2}, fusion: {name: transformer, layers: 1, heads: 2}}",
)  # fmt: skip
SCENES = (
    "task={name: segment2d, net: {name: bisenetv2, width: 0.125}}", "data.crop=[32, 64]", "data.names=[sky, road, tree, car]",
    "data.size=null", "evaluations={val: {}}", "best=null", "train={length: 40 steps, batch_size: 4}",
)  # fmt: skip
VOLUMES = (
    "data.names=[ball, box]", "data.patch=[8, 16, 16]", "data.patches=4", "task.net={name: unet, filters: [4, 8]}",
    "task.window={overlap: 0.25}", "evaluations={val: {}}", "best=null", "train={length: 30 steps, batch_size: 4}",
)  # fmt: skip


def log(run: Made, scores: dict[str, float] | None = None) -> tuple[str, str]:
    """Log the weights of a run as the end of a run does; return the ids of the model and of the MLflow run."""
    store, weights = Store.locate(), best_weights(run.folder.path)
    tracker = Tracker.start(
        run.folder, store, experiment="models", run_name=run.name, params={}, system_metrics_every=0
    )
    described = mlflow_model.describe(run.recipe, run.folder, weights.name, 7, scores or {})
    assert described is not None
    tracker.model("best", weights, 7, described=described)
    tracker.finish("FINISHED")
    (model_id,) = json.loads((run.folder.path / "models.json").read_text()).values()
    return model_id, str(tracker.run_id)


def fresh(uri: str, where: Path, code: str, *words: str, timeout: float = 250, **more: str) -> str:
    """Run a program in a process of its own, in an empty folder, that knows MLflow's address alone."""
    hidden = ("TRAINKIT_", "PYTHONPATH", "MLFLOW_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    told = {
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    where.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words], cwd=where, env={**kept, **told, **more}, capture_output=True,
        text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ---- Six tasks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory, database):
    """A folder with data of every kind, and a store in it."""
    root = tmp_path_factory.mktemp("models")
    stripes(root / "pictures" / "train", 4, 0)
    stripes(root / "pictures" / "val", 7, 1)
    draw = np.random.default_rng(0)
    for person in ("anna", "ben", "cleo"):
        (root / "faces" / person).mkdir(parents=True)
        for k in range(4):
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "faces" / person / f"{k}.png")
    pairs = [
        f"{a}/{k}.png,{b}/{k + 1}.png,{int(a == b)}" for a in ("anna", "ben") for b in ("anna", "ben") for k in (0, 2)
    ]
    (root / "faces" / "pairs.csv").write_text("\n".join(["path_a,path_b,same", *pairs]) + "\n")
    people_sets.index(root / "people" / "train", 6, (3, 2, 1, 1, 2))
    people_sets.index(root / "people" / "val", ["a", "b", "c"], (3, 2, 1, 1, 2), seed=7)
    scene_sets.camvid(root / "scenes", (6, 3), (40, 72))
    nifti_sets.write_set(root / "volumes" / "train", 3, seed=1)
    nifti_sets.write_set(root / "volumes" / "val", 2, seed=2)
    (root / "store").mkdir()
    with own_store(root / "store", database), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_CACHE", str(root / "cache"))
        yield root


@pytest.fixture
def at(home, monkeypatch):
    """The store of this file in the environment, for MLflow's own functions too."""
    monkeypatch.setenv("TRAINKIT_STORE", str(home / "store"))
    monkeypatch.setenv("TRAINKIT_CACHE", str(home / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Store.locate().uri)
    return home


def recipe(name: str, home: Path, folder: str, evaluate: str, *words: str) -> Made:
    data = (f"data.train={home}/{folder}", f"data.evaluate={evaluate}")
    return made(ROOT / "recipes" / f"{name}.yaml", *data, *words)


def runs(home: Path) -> dict[str, tuple[Made, Path]]:
    """A run of each task, and pictures or volumes that are new to it."""
    pictures = f"{{val: {home}/pictures/val}}"
    pairs = f"{{pairs: {home}/faces/pairs.csv}}"
    face = "{name: mobilefacenet, embedding: 8, width: 0.25}"
    teacher = f"task.teacher={{net: {face}, weights: gone.safetensors}}"
    return {
        "classify": (recipe("convnext", home, "pictures/train", pictures, *CLASSES), home / "pictures" / "val"),
        "embed": (
            recipe("face_teacher", home, "faces", pairs, *FACES, f"task.net={face}"),
            home / "faces",
        ),
        "adadistill": (
            recipe("adadistill", home, "faces", pairs, *FACES, f"task.student={face}", teacher),
            home / "faces",
        ),
        "reid": (
            recipe("reid", home, "people/train", f"{{val: {home}/people/val}}", *REID),
            home / "people" / "val" / "rgb",
        ),
        "segment2d": (
            recipe("camvid", home, "scenes", f"{{val: {home}/scenes}}", *SCENES),
            home / "scenes" / "val",
        ),
        "segment3d": (
            recipe("tom500", home, "volumes/train", f"{{val: {home}/volumes/val}}", *VOLUMES),
            home / "volumes" / "val" / "image",
        ),
    }


PREDICTS = """
import json, sys
from pathlib import Path
import mlflow, numpy as np, pandas as pd

asked = json.loads(Path(sys.argv[1]).read_text())
for name, (uris, files, spacing) in asked.items():
    for k, uri in enumerate(uris):
        model = mlflow.pyfunc.load_model(uri)
        data = files if spacing else [Path(file).read_bytes() for file in files]
        out = model.predict(pd.DataFrame({"image": data}))
        for column in out.columns:
            for row, value in enumerate(out[column]):
                np.save(f"{name}.{k}.{column}.{row}.npy", np.asarray(value))
    assert model.metadata.signature.outputs.input_names() == list(out.columns), name
    example = model.predict(model.input_example)
    assert len(example) == 1 and not [m for m in ("pickle5", "cloudpickle.cloudpickle") if name == m]
print("done", "trainkit.cli" in sys.modules)
"""


def test_six_tasks_predict_in_a_fresh_process_what_the_command_does(at, tmp_path):
    asked, expected = {}, {}
    for name, (run, source) in runs(at).items():
        model_id, run_id = log(run)
        maps = name.startswith("segment")
        out = tmp_path / (name if maps else f"{name}.parquet")
        predict.predict(run.name, source, out)
        if maps:
            found = sorted(out.glob("*.nii.gz" if name == "segment3d" else "*.png"))
            stems = [file.name.partition(".")[0] for file in found]
            files = [next(source.glob(f"{stem}.*")) for stem in stems]
            read = nibabel.load if name == "segment3d" else Image.open
            arrays = [getattr(read(file), "dataobj", None) if name == "segment3d" else read(file) for file in found]
            expected[name] = {"label_map": [np.asarray(array) for array in arrays]}
        else:
            table = parquet.read_table(out)
            columns = [column for column in table.column_names if column not in ("id", "modality")]
            files = [source / id for id in table["id"].to_pylist()]
            expected[name] = {column: [np.asarray(v) for v in table[column].to_pylist()] for column in columns}
        uris = [f"models:/{model_id}"] + ([f"runs:/{run_id}/best"] if name == "classify" else [])
        asked[name] = (uris, [str(file) for file in files], name == "segment3d")
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    assert fresh(Store.locate().uri, tmp_path / "empty", PREDICTS, str(tmp_path / "asked.json")).startswith("done")
    for name, columns in expected.items():
        for k, _ in enumerate(asked[name][0]):
            for column, values in columns.items():
                for row, value in enumerate(values):
                    found = np.load(tmp_path / "empty" / f"{name}.{k}.{column}.{row}.npy")
                    assert np.array_equal(found.astype(value.dtype), value), (name, column, row)
    several = [
        len({array.tobytes() for array in columns.get("embedding", columns.get("label_map"))})
        for columns in expected.values()
    ]
    assert min(several) > 1, "all alike: anything would agree"
