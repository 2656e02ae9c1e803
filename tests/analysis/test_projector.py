"""What is written for TensorBoard's projector is read back, as TensorBoard reads it."""

import csv

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from trainkit.analysis import projector
from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker


def columns(size=5, dimensions=3, side=4, absent=()):
    """Rows of an inspection; samples in `absent` are not on the map."""
    rng = np.random.default_rng(size)
    small = [np.full((side, side, 3), 10 * k, np.uint8).tobytes() for k in range(size)]
    return {
        "id": [f"crops/{k}.png" for k in range(size)],
        "label": ["open", "closed", None, "open\tor\nclosed", "open"][:size],
        "prediction": ["open"] * size,
        "probability": rng.uniform(size=size),
        "outlier_distance": rng.normal(size=size),
        "hard": [k == 1 for k in range(size)],
        "embedding": [None if k in absent else rng.normal(size=dimensions).astype(np.float32) for k in range(size)],
        "thumbnail": [None if k in absent else small[k] for k in range(size)],
    }


def read(folder):
    lines = (folder / "tensors.tsv").read_text().splitlines()
    with open(folder / "metadata.tsv", newline="") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    return np.array([[float(word) for word in line.split("\t")] for line in lines]), table


def config_of(out):
    """The configuration, parsed by protobuf with the message types of TensorBoard's projector."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = descriptor_pb2.FileDescriptorProto(name="projector.proto", package="tb", syntax="proto3")
    kinds = {
        "Sprite": [("image_path", 1, 9, 1), ("single_image_dim", 2, 13, 3)],
        "Embedding": [
            ("tensor_name", 1, 9, 1),
            ("metadata_path", 2, 9, 1),
            ("bookmarks_path", 3, 9, 1),
            ("tensor_shape", 4, 13, 3),
            ("sprite", 5, "Sprite", 1),
            ("tensor_path", 6, 9, 1),
        ],
        "Config": [("model_checkpoint_path", 1, 9, 1), ("embeddings", 2, "Embedding", 3)],
    }
    for name, fields in kinds.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label in fields:
            about = {"type": kind} if isinstance(kind, int) else {"type": 11, "type_name": f".tb.{kind}"}
            message.field.add(name=field, number=number, label=label, **about)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    config = message_factory.GetMessageClass(pool.FindMessageTypeByName("tb.Config"))()
    return text_format.Parse((out / "projector_config.pbtxt").read_text(), config)


def test_each_sample_has_its_line_in_every_file_and_its_tile_in_the_sprite(tmp_path):
    given = columns(absent=[2])
    (done,) = projector.write({"val.inspection": given}, tmp_path)
    assert (done.samples, done.dimensions) == (4, 3)
    tensors, table = read(tmp_path / "val.inspection")
    kept = [0, 1, 3, 4]
    np.testing.assert_allclose(tensors, [given["embedding"][k] for k in kept], rtol=1e-6)
    assert [line["id"] for line in table] == [given["id"][k] for k in kept]
    assert [line["label"] for line in table] == ["open", "closed", "open or closed", "open"]
    assert [line["hard"] for line in table] == ["False", "True", "False", "False"]
    assert [float(line["probability"]) for line in table] == pytest.approx([given["probability"][k] for k in kept])
    sprite = np.asarray(Image.open(tmp_path / "val.inspection" / "sprite.png"))
    assert sprite.shape == (8, 8, 3)
    tiles = [sprite[top : top + 4, left : left + 4] for top in (0, 4) for left in (0, 4)]
    assert [tile.min() for tile in tiles] == [tile.max() for tile in tiles] == [0, 10, 30, 40]


def test_the_configuration_is_what_tensorboard_reads(tmp_path):
    tables = {"val.inspection": columns(5), "train.inspection": {**columns(2), "thumbnail": [None, None]}}
    projector.write(tables, tmp_path)
    first, second = config_of(tmp_path).embeddings
    assert (first.tensor_name, first.tensor_shape) == ("val.inspection", [5, 3])
    assert (first.sprite.image_path, first.sprite.single_image_dim) == ("val.inspection/sprite.png", [4, 4])
    assert second.tensor_name == "train.inspection" and not second.sprite.image_path
    for info in (first, second):
        assert (tmp_path / info.tensor_path).is_file() and (tmp_path / info.metadata_path).is_file()
    assert (tmp_path / first.sprite.image_path).is_file()
    side = Image.open(tmp_path / first.sprite.image_path).size
    assert side == (12, 12)  # five tiles in a square of three by three


def finished(tables):
    folder = Store.locate().new_run("eyes", 0, "a1b2c3d4")
    given = {"experiment": "eyes", "run_name": folder.name, "params": {}, "system_metrics_every": 0}
    tracker = Tracker.start(folder, Store.locate(), **given)
    for path, table in tables.items():
        tracker.table(path, table)
    tracker.finish("FINISHED")
    return folder.name


def test_the_verb_takes_the_rows_of_the_end_and_leaves_other_rows_alone(store, tmp_path):
    run = finished(
        {
            "rows/val.inspection_best.parquet": columns(3),
            "rows/val.inspection_final.parquet": columns(5),
            "rows/train.inspection_best.parquet": columns(4),
            "rows/val_final.parquet": {"label": ["open"], "prediction": ["open"]},
        }
    )
    out = tmp_path / "out"
    done = CliRunner().invoke(main.main, ["projector", run, str(out)])
    assert done.exit_code == 0, done.output
    assert f"{out}/val.inspection: 5 embeddings of 3 dimensions" in done.output
    assert f"tensorboard --logdir {out}" in done.output
    assert sorted(path.name for path in out.iterdir()) == [
        "projector_config.pbtxt",
        "train.inspection",
        "val.inspection",
    ]
    assert [len(read(out / name)[0]) for name in ("train.inspection", "val.inspection")] == [4, 5]


def test_a_run_without_inspections_is_told_what_to_do(store, tmp_path):
    run = finished({"rows/val_final.parquet": {"label": ["open"]}})
    with pytest.raises(UserError, match=r"no saved rows of an inspection.*NAME\.inspection"):
        projector.export(Store.locate(), run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="nosuchrun"):
        projector.export(Store.locate(), "nosuchrun", tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_named(store, tmp_path):
    run = finished({"rows/val.inspection_final.parquet": columns(3)})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be written"):
        projector.export(Store.locate(), run, tmp_path / "file")
