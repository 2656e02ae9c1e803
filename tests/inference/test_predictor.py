"""Predictions of samples in memory: those that `trainkit predict` writes, bit for bit."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet
from runs import ROOT, stripes
from untrained_runs import made

from trainkit.inference import predict
from trainkit.inference.predictor import Predictor

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    stripes(root / "train", 4, 0)
    stripes(root / "val", 7, 1)
    return root


def classes(pictures, *words: str):
    given = (f"data.train={pictures}/train", f"data.evaluate={{val: {pictures}/val}}", "train.batch_size=4")
    net = "task.net={model: test_convnext3, args: {patch_size: 2, ls_init_value: 0.5}}"
    return made(ROOT / "recipes" / "convnext.yaml", *given, net, *words)


def test_pictures_in_memory_have_the_predictions_of_the_command(pictures, tmp_path):
    run = classes(pictures)
    predict.predict(run.name, pictures / "val", tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    model = Predictor.of_run(run.folder)
    files = [pictures / "val" / id for id in table["id"]]
    for form in (
        lambda file: file.read_bytes(),
        lambda file: base64.encodebytes(file.read_bytes()).decode(),
        lambda file: np.asarray(Image.open(file)),
        lambda file: np.asarray(Image.open(file)).tolist(),
    ):
        found = model.predict([form(file) for file in files])
        assert list(found) == ["class", "probability", "probabilities", "embedding"]
        assert found["class"] == table["class"] and len(set(table["probability"])) == 21
        for name in ("probability", "probabilities", "embedding"):
            assert np.array_equal(found[name], np.array(table[name], np.float32)), name
    assert model.classes == ("across", "down", "slanted")
