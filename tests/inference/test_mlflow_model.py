"""Logged models as MLflow has them: in a fresh process its own functions predict what the command does."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
import nibabel
import nifti_sets
import numpy as np
import pandas as pd
import people_sets
import pytest
import requests
import scene_sets
from mlflow.exceptions import MlflowException
from PIL import Image
from pyarrow import parquet
from runs import ROOT, own_store, stripes
from runs import run as start
from untrained_runs import Made, made

from trainkit.analysis import promote
from trainkit.config.schema import Promote
from trainkit.data.formats import image_decode
from trainkit.environment.version import __version__
from trainkit.errors import UserError
from trainkit.inference import mlflow_model, predict, predictor
from trainkit.inference.predictor import Predictor
from trainkit.tracking import logged_model
from trainkit.tracking.logged_model import ABOUT
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker
from trainkit.training.best import best_weights

PAGE = (ROOT / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
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
    "task={name: segment2d, net: {name: bisenetv2, width: 0.125}}", "data.crop=[32, 64]",
    "data.names=[sky, road, tree, car]",
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


def fresh(uri: str, where: Path, code: str, *words: str, **more: str) -> str:
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
        text=True,
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


def runs(home: Path, *names: str) -> dict[str, tuple[Made, Path]]:
    """A run of each task, or of those named, and images or volumes that are new to it."""
    pairs = f"{{pairs: {home}/faces/pairs.csv}}"
    face = "{name: mobilefacenet, embedding: 8, width: 0.25}"
    teacher = f"task.teacher={{net: {face}, weights: gone.safetensors}}"
    student = (*FACES, f"task.student={face}", teacher)
    # Task: recipe, training data, evaluation, other words, new samples.
    every = {
        "classify": ("convnext", "pictures/train", f"{{val: {home}/pictures/val}}", CLASSES, "pictures/val"),
        "embed": ("face_teacher", "faces", pairs, (*FACES, f"task.net={face}"), "faces"),
        "adadistill": ("adadistill", "faces", pairs, student, "faces"),
        "reid": ("reid", "people/train", f"{{val: {home}/people/val}}", REID, "people/val/rgb"),
        "segment2d": ("camvid", "scenes", f"{{val: {home}/scenes}}", SCENES, "scenes/val"),
        "segment3d": ("tom500", "volumes/train", f"{{val: {home}/volumes/val}}", VOLUMES, "volumes/val/image"),
    }
    made_runs = {}
    for name in names or every:
        file, train, evaluate, words, source = every[name]
        data = (f"data.train={home}/{train}", f"data.evaluate={evaluate}")
        made_runs[name] = (made(ROOT / "recipes" / f"{file}.yaml", *data, *words), home / source)
    return made_runs


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
    assert len(model.predict(model.input_example)) == 1, name
print("done")
"""


@pytest.mark.slow
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


# ---- From a run to its alias -----------------------------------------------------------------------------------------

CHAMPION = """
import sys
from pathlib import Path
import mlflow, numpy as np, pandas as pd

model = mlflow.pyfunc.load_model("models:/stripes@champion")
out = model.predict(pd.DataFrame({"image": [Path(file).read_bytes() for file in sys.argv[1:]]}))
np.save("probabilities.npy", np.stack(out["probabilities"]))
network = model.get_raw_model()
print(type(network).__name__, network.training, model.metadata.metadata["classes"], *out["class"])
"""


@pytest.fixture
def trained(at):
    """A run of 12 steps, which has logged its models itself."""
    pictures = f"data.train={at}/pictures/train", f"data.evaluate={{val: {at}/pictures/val}}"
    words = (
        "train.length=60 steps",
        "optim.lr=0.003",
        "best={metric: val/top1}",
        "evaluations={val: {every: 6 steps}}",
        "log.system_every=null",
        "log.rows=false",
    )
    ran = start(*pictures, *CLASSES, *words, "checkpoints.every=6 steps", recipe=ROOT / "recipes" / "convnext.yaml")
    assert ran.code == 0
    return ran.folder


@pytest.mark.slow
def test_what_a_run_has_logged_is_promoted_and_loaded_by_its_alias(trained, at, tmp_path, monkeypatch):
    monkeypatch.setattr(promote, "_above_chance_level", lambda candidate: promote.Check("chance", True, "so said"))
    store, made_models = Store.locate(), json.loads((trained.path / "models.json").read_text())
    assert {key.partition("@")[0] for key in made_models} == {"best", "last"}
    model = next(id for key, id in made_models.items() if key.startswith("best@"))
    stored = Path(store.model_file(f"models:/{model}")).parent
    assert sorted(file.name for file in stored.iterdir()) == sorted((*logged_model.FILES, "model.safetensors"))
    about = json.loads((stored / ABOUT).read_text())
    assert about["run"] == trained.name and about["scores"]["val/top1"] > 0.1
    weights_alone = tmp_path / "weights"
    weights_alone.mkdir()
    shutil.copy(stored / "model.safetensors", weights_alone)
    with pytest.raises(UserError, match=r"trainkit\.json: does not exist.*`trainkit export`"):
        Predictor.from_folder(weights_alone)
    decision = promote.promote(store, trained, Promote(name="stripes"))
    assert not decision.refused and decision.version == "1", decision.checks
    files = sorted((at / "pictures" / "val").glob("*/*.png"))
    said = fresh(store.uri, tmp_path / "empty", CHAMPION, *map(str, files)).split()
    assert said[:2] == ["Classifier", "False"]
    predict.predict(trained.name, at / "pictures" / "val", tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert np.array_equal(
        np.load(tmp_path / "empty" / "probabilities.npy"), np.array(table["probabilities"], np.float32)
    )
    assert said[-21:] == table["class"]


# ---- Served ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def classifier(at):
    """A logged model that classifies, and the folder of its files."""
    run, _ = runs(at, "classify")["classify"]
    model_id, _ = log(run, {"val/top1": 0.5})
    return f"models:/{model_id}", Path(Store.locate().model_file(f"models:/{model_id}")).parent, run


@contextlib.contextmanager
def server(uri: str, where: Path) -> Iterator[str]:
    """MLflow's scoring server on the loopback interface; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-P", "-m", "mlflow", "models", "serve", "-m", uri, "--env-manager", "local"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # it starts `uvicorn` by its name
    told = {**os.environ, "PATH": path, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    with (where / "log.txt").open("w") as log_file:
        process = subprocess.Popen(
            [*words, "--host", "127.0.0.1", "--port", str(port)], cwd=where, env=told, stdout=log_file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            with contextlib.suppress(OSError):
                if requests.get(f"{address}/ping", timeout=5).ok:
                    break
            assert process.poll() is None, (where / "log.txt").read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@pytest.mark.slow
def test_a_server_of_mlflow_answers_a_picture_and_says_what_is_wrong(classifier, at, tmp_path):
    uri, _, run = classifier
    file = at / "pictures" / "val" / "down" / "003.png"
    predict.predict(run.name, file, tmp_path / "out.parquet")
    (row,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    text = base64.b64encode(file.read_bytes()).decode()
    with server(uri, tmp_path) as address:

        def ask(**body: object) -> requests.Response:
            return requests.post(f"{address}/invocations", json=body, timeout=240)

        for body in (
            {"dataframe_records": [{"image": text}]},
            {"dataframe_split": {"columns": ["image"], "data": [[text]]}},
            {"inputs": {"image": [text]}},
            {"instances": [{"image": text}]},
        ):
            (answer,) = ask(**body).json()["predictions"]
            assert answer == {key: value for key, value in row.items() if key != "id"}
        # As the page has it.
        written, curl = re.findall(r"^(?:\$ )?(echo .*|curl .*)$", PAGE, re.MULTILINE)
        shutil.copy(file, tmp_path / "a.png")
        command = f"{written}\n{curl.replace('http://127.0.0.1:5001', address)}"
        done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, capture_output=True, text=True)
        assert json.loads(done.stdout)["predictions"] == [answer], done.stderr
        (mirrored,) = ask(dataframe_records=[{"image": text}], params={"mirror": True}).json()["predictions"]
        assert mirrored["probabilities"] != row["probabilities"]
        for body, said in (
            ({"dataframe_records": [{"picture": text}]}, "missing inputs ['image']. Note that there were extra inputs"),
            ({"dataframe_records": [{"image": base64.b64encode(b"<svg>").decode()}]}, "sample 0: cannot be decoded"),
            ({"dataframe_records": [{"image": text}], "params": {"mirror": "so"}}, "mirror"),
        ):
            answer = ask(**body)
            assert answer.status_code == 400 and said in answer.json()["message"], answer.text
        deep = requests.post(
            f"{address}/invocations", "[" * 9999, headers={"Content-Type": "application/json"}, timeout=240
        )
        assert deep.status_code in (400, 500), deep.text
        assert ask(dataframe_records=[{"image": text}]).ok, "and it goes on"
    command = [sys.executable, "-P", "-m", "mlflow", "models", "predict", "-m", uri, "--env-manager", "local"]
    more = ["-t", "json", "-i", str(tmp_path / "request.json"), "-o", str(tmp_path / "answer.json")]
    subprocess.run([*command, *more], cwd=tmp_path, check=True, capture_output=True)
    (answer,) = json.loads((tmp_path / "answer.json").read_text())["predictions"]
    assert answer["probabilities"] == row["probabilities"]


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_what_is_no_sample_is_said_in_one_sentence(classifier, at, monkeypatch):
    uri, _, _ = classifier
    model = mlflow.pyfunc.load_model(uri)
    whole = (at / "pictures" / "val" / "down" / "003.png").read_bytes()

    def refused(*cells: object, **params: object) -> str:
        with pytest.raises(MlflowException) as caught:
            model.predict(pd.DataFrame({"image": pd.Series(cells, dtype=object)}), params or None)
        return str(caught.value)

    assert refused(whole, b"<svg>") == (
        "sample 1: cannot be decoded (not an image of these formats); expected JPEG, PNG, BMP, WEBP, PGM or PPM"
    )
    assert refused("no base64!").startswith("sample 0: text that is not base64: 'no base64!'; expected an encoded file")
    assert refused(whole[:200]).startswith("sample 0: cannot be decoded (")
    assert refused(np.zeros((2, 3, 4, 5), np.uint8)).startswith("sample 0: an array of shape (2, 3, 4, 5); expected")
    assert refused(np.full((8, 8, 3), 0.5)).startswith("sample 0: an array of float64; expected whole numbers from 0")
    assert refused(None).startswith("sample 0: a NoneType; expected an encoded image")
    assert refused() == "predict: no samples; expected one or more; pass at least one sample"
    with pytest.raises(
        MlflowException, match=r"missing inputs \['image'\]. Note that there were extra inputs: \['x'\]"
    ):
        model.predict(pd.DataFrame({"x": [whole]}))

    monkeypatch.setattr(image_decode, "PIXEL_CAP", 500)
    for form in (whole, np.zeros((32, 32, 3), np.uint8)):
        assert refused(form) == "sample 0: 32 x 32 pixels; expected 1 to 500 pixels"
    monkeypatch.setattr(image_decode, "BYTE_CAP", 100)
    assert refused(whole) == f"sample 0: {len(whole):,} bytes; expected at most 100; send a smaller image"


def test_a_request_that_is_wrong_is_answered_by_a_sentence_and_status_400(classifier, at, monkeypatch):
    """The answers that the page lists, by MLflow's own function for requests."""
    import mlflow.pyfunc.scoring_server as server

    monkeypatch.setenv("_MLFLOW_IS_IN_SERVING_ENVIRONMENT", "true")
    model = mlflow.pyfunc.load_model(classifier[0])
    text = base64.b64encode((at / "pictures" / "val" / "down" / "003.png").read_bytes()).decode()
    large = io.BytesIO()
    Image.new("1", (8000, 8000)).save(large, "PNG")
    large = base64.b64encode(large.getvalue()).decode()

    def ask(body: object, kind: str = "application/json") -> object:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return server.invocations(content, kind, model, model.metadata.get_input_schema())

    def refused(body: object, kind: str = "application/json") -> str:
        with pytest.raises(MlflowException) as caught:
            ask(body, kind)
        assert caught.value.get_http_status_code() == 400, caught.value
        message = json.loads(caught.value.serialize_as_json())["message"]
        return message.rpartition("Error: ")[2].strip("'")

    forms = {
        "records": lambda *texts: {"dataframe_records": [{"image": one} for one in texts]},
        "instances": lambda *texts: {"instances": [{"image": one} for one in texts]},
        "split": lambda *texts: {"dataframe_split": {"columns": ["image"], "data": [[one] for one in texts]}},
        "inputs": lambda *texts: {"inputs": {"image": list(texts)}},
    }
    for form in forms.values():
        assert ask(form(text)).status == 200
        assert refused(form(text, "/etc/passwd")).startswith("sample 1: text that is not base64: '/etc/passwd'")
        assert refused(form(text, "PHN2Zz4=")).startswith("sample 1: cannot be decoded (")
        assert refused(form(text, large)).startswith("sample 1: 8000 x 8000 pixels; expected 1 to ")
    assert "missing inputs ['image']" in refused({"dataframe_records": [{"picture": text}]})
    for body in (
        b"",
        b"[]",
        b"7",
        b"\xff\xfe",
        b"{",
        b"null",
        b'"a"',
        b'{"dataframe_records": 3}',
        b'{"inputs": [[]]}',
    ):
        assert refused(body), body
    assert refused(b"image\nx\n", "text/csv").startswith("sample 0: ") and refused(
        b"x", "application/vnd.apache.parquet"
    )


def test_a_model_of_another_format_or_without_its_files_is_refused(classifier, tmp_path, monkeypatch):
    _, stored, _ = classifier
    folder = shutil.copytree(stored, tmp_path / "model")
    about = json.loads((folder / ABOUT).read_text())
    assert mlflow.models.Model.load(str(folder)).metadata["format"] == about["format"] == predictor.FORMAT

    def refused(**changes: object) -> str:
        (folder / ABOUT).write_text(json.dumps({**about, **changes}))
        with pytest.raises(MlflowException) as caught:
            mlflow.pyfunc.load_model(str(folder))
        return str(caught.value).partition(f"{ABOUT}: ")[2]

    assert refused(format=0, made_with={"trainkit": "0.0.9"}) == (
        f"format 0, written by trainkit 0.0.9; expected format 1 of trainkit {__version__}; "
        "install that version of trainkit, or log the model again with this one"
    )
    assert refused(weights="../model.safetensors").startswith("names weights '../model.safetensors'; expected a file")
    assert refused(meta=None).startswith("cannot be read: ")
    (folder / ABOUT).write_text("[")
    with pytest.raises(MlflowException, match=r"trainkit\.json: cannot be read"):
        mlflow.pyfunc.load_model(str(folder))
    (folder / ABOUT).write_text(json.dumps(about))
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(MlflowException, match=r"model\.safetensors: "):
        mlflow.pyfunc.load_model(str(folder))


def test_a_request_names_no_file_of_the_server(home, monkeypatch, tmp_path):
    """Text is a path in a program, and base64 in a request, whatever the form of its body."""
    file = next((home / "volumes" / "val" / "image").iterdir())
    table = pd.DataFrame({"image": [str(file)]})
    assert mlflow_model._samples(table, True, served=False) == [str(file)]
    with pytest.raises(UserError, match="text that is not base64"):
        mlflow_model._samples(table, True, served=True)
    encoded = pd.DataFrame({"image": [base64.b64encode(file.read_bytes())]})
    assert mlflow_model._samples(encoded, True, served=True) == [file.read_bytes()]
