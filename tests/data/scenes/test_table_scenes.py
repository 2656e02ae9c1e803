"""Scenes in parquet files, saved sets and those of the hub: which rows and columns are read, and in what order."""

from __future__ import annotations

import threading

import pytest
import scene_sets
from PIL import Image

from trainkit.data import hub
from trainkit.data.scenes import mask_store, table_scenes
from trainkit.data.scenes.label_maps import numbered
from trainkit.data.scenes.sources import open_scenes
from trainkit.errors import UserError

LABELS = numbered(scene_sets.NAMES[: scene_sets.CLASSES])


def test_a_table_is_read_row_by_row(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for n in range(40):
        picture, mask = scene_sets.scene(n)
        name = f"{n}.png" if n % 2 else None
        rows.append({"split": "val" if n % 4 == 0 else "train", "image_path": name, "pixels": 3})
        rows[-1] |= {"image": scene_sets.encoded(picture), "mask": {"bytes": scene_sets.encoded(mask), "path": "x"}}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    # What `part` is asked for counts where the table has a column of splits, too.
    for text, part in ((f"{tmp_path}/a.parquet#val", "train"), (f"{tmp_path}/a.parquet", "val")):
        source = open_scenes(text, part)
        assert source.where == f"{tmp_path}/a.parquet#val" and len(source) == 10
        assert source.ids() == [f"row {n}" for n in range(0, 40, 4)]
    source = open_scenes(f"{tmp_path}/a.parquet")
    assert len(source) == 30 and source.ids()[:3] == ["1.png", "row 2", "3.png"]
    # In any order, and from several threads at once.
    for place in (5, 6, 2, -1, 29, 0):
        row = [n for n in range(40) if n % 4][place]
        assert (scene_sets.classes_of(source.scenes[place], LABELS) == scene_sets.scene(row)[1]).all()
    assert [scene.id for scene in source.scenes[3:6]] == source.ids()[3:6]
    with pytest.raises(IndexError):
        source.scenes[30]
    found: dict[int, str] = {}
    work = [
        threading.Thread(target=lambda n=n: found.update({k: source.scenes[k].id for k in range(n, 12, 3)}))
        for n in range(3)
    ]
    [thread.start() for thread in work]
    [thread.join() for thread in work]
    assert [found[k] for k in range(12)] == source.ids()[:12]
    assert source.scenes[0].where == f"{tmp_path}/a.parquet, row 1 (1.png)"


def test_empty_cells_are_mistakes_of_their_rows(tmp_path, cache):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"image": scene_sets.encoded(p), "mask": scene_sets.encoded(m)} for p, m in map(scene_sets.scene, range(4))]
    rows[1]["mask"], rows[2]["image"] = None, None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_scenes(f"{tmp_path}/a.parquet")
    with pytest.raises(UserError, match=r"(?s)2 masks that .*row 1, its mask: cannot be .*row 2: 0 bytes"):
        mask_store.pack_masks_once(source, LABELS)
    paths = [{"image": {"bytes": rows[0]["image"], "path": "x"}, "mask": {"bytes": None, "path": "x"}}] * 2
    paths.append({"image": paths[0]["image"], "mask": {"bytes": rows[0]["mask"], "path": "x"}})
    pq.write_table(pa.Table.from_pylist(paths), tmp_path / "b.parquet")
    source = open_scenes(f"{tmp_path}/b.parquet")
    for place in (0, 1):
        with pytest.raises(UserError, match="row 0, column mask: no image, only a path"):
            source.scenes[place]


def test_columns_of_tables(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    picture, mask = (scene_sets.encoded(pixels) for pixels in scene_sets.scene())
    for name, row, said in (
        ("a", {"image": picture}, "mask in one of annotation"),
        ("b", {"image": picture, "label": 3}, "mask in one of annotation"),
        ("c", {"mask": mask}, "image in one of image"),
    ):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
        with pytest.raises(UserError, match=said):
            open_scenes(f"{tmp_path}/{name}.parquet")
    for column in table_scenes.MASK_COLUMNS:
        source = open_scenes(f"{scene_sets.parquet(tmp_path / column, (1, 1), column=column)}#val")
        assert (scene_sets.classes_of(source.scenes[0], LABELS) == scene_sets.scene(1000)[1]).all()
    # A table of training alone is not taken for one to score.
    (tmp_path / "mask" / "data" / "val-00000-of-00001.parquet").unlink()
    with pytest.raises(UserError, match="no split 'val'"):
        open_scenes(str(tmp_path / "mask"), "val")


def test_saved_sets_and_those_of_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [scene_sets.scene(n) for n in range(3)]
    columns = {"image": [Image.fromarray(p) for p, _ in rows], "annotation": [Image.fromarray(m) for _, m in rows]}
    features = datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()})
    made = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": made, "validation": made.select([2])}).save_to_disk(tmp_path / "saved")
    for text, part, count in (("#train", "train", 3), ("", "val", 1), ("#validation", "train", 1)):
        source = open_scenes(f"{tmp_path / 'saved'}{text}", part)
        assert source.kind == "datasets folder" and len(source) == count
    assert (scene_sets.classes_of(source.scenes[0], LABELS) == rows[2][1]).all()
    place = scene_sets.parquet(tmp_path / "hub")
    monkeypatch.setattr(hub, "download", lambda path, network: place)
    assert open_scenes("hf://owner/name#val").where == f"{place}#val"
    assert len(open_scenes("hf://owner/name", "val")) == 3 and len(open_scenes("hf://owner/name")) == 6
