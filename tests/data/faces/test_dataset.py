import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from trainkit.data import evaluation_sets, hub, import_images, sources
from trainkit.data.cache import cache_root
from trainkit.data.faces.dataset import Faces, _mirrored
from trainkit.data.storage import image_store
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError
from trainkit.interfaces import Data

REAL = Path(__file__).parents[4] / "shared" / "data" / "faces_lfw112"
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real faces are not beside this checkout")
SIZE = 8


def picture(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def people(root: Path, counts: dict[str, int] | None = None, size: int = SIZE) -> Path:
    for i, (person, count) in enumerate((counts or {"anna": 3, "ben": 4, "cleo": 5}).items()):
        (root / person).mkdir(parents=True)
        for k in range(count):
            Image.fromarray(picture(100 * i + k, size)).save(root / person / f"{k}.png")
    return root


def csv_of(root: Path, lines: list[str]) -> Path:
    (root / "pairs.csv").write_text("\n".join(["path_a,path_b,same", *lines]) + "\n")
    return root / "pairs.csv"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINKIT_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def faces(tmp_path) -> Faces:
    root = people(tmp_path / "people")
    pairs = csv_of(root, ["anna/0.png,anna/1.png,1", "anna/0.png,ben/0.png,0", "cleo/0.png,ben/0.png,false"])
    return Faces(train=str(root), image_size=SIZE, evaluate={"few": str(pairs)})


def test_a_folder_of_identities_opens_as_what_it_holds(faces):
    assert isinstance(faces, Data)
    opened = faces.open(seed=0)
    assert opened.meta.classes == 3 and opened.meta.class_names == ("anna", "ben", "cleo")
    assert opened.meta.shape == (3, SIZE, SIZE)
    batch = opened.evaluations["few"].fetch(np.arange(4), 0)
    assert batch["image"].shape == (4, 3, SIZE, SIZE) and batch["image"].dtype == torch.uint8
    # Rows of an evaluation stand in the order in which pairs.csv first names them.
    for row, seed in enumerate([0, 1, 100, 200]):
        assert (batch["image"][row].permute(1, 2, 0).numpy() == picture(seed)).all()
    protocol = opened.evaluations["few"].protocol
    assert protocol.first.tolist() == [0, 0, 3] and protocol.second.tolist() == [1, 2, 2]
    assert protocol.same.tolist() == [True, False, False]
    assert opened.evaluations["few"].size == 4  # six mentions of four images


def test_training_pictures_are_the_files_and_mirrored_where_view_says_so(faces):
    train = faces.open(seed=5).train
    batch = train.fetch(np.arange(train.size)[::-1], epoch=2)
    seeds = [0, 1, 2, 100, 101, 102, 103, 200, 201, 202, 203, 204]
    assert batch["index"].tolist() == list(range(11, -1, -1))
    assert set(batch["view"].tolist()) == {0, 1}
    finished = train.on_device(batch)
    for image, label, index, view in zip(*(finished[key] for key in ("image", "label", "index", "view")), strict=True):
        expected = picture(seeds[int(index)])
        if view:
            expected = expected[:, ::-1]
        assert (((image + 1) * 127.5).round().permute(1, 2, 0).numpy() == expected).all()
        assert int(label) == seeds[int(index)] // 100
    again = train.on_device(batch)["image"]
    assert torch.equal(again, finished["image"]), "the batch that was given is left as it was"


@pytest.mark.parametrize("width", [1, 5, 8, 24])
def test_pictures_are_mirrored_without_waiting_for_a_device(width):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 4, width), dtype=np.uint8))
    views = torch.tensor([0, 1, 1, 0, 0, 1])
    before = images.clone()
    for image, mirrored, view in zip(images, _mirrored(images, views), views.tolist(), strict=True):
        assert (mirrored.numpy() == (image.numpy()[..., ::-1] if view else image.numpy())).all()
    assert torch.equal(images, before)
    assert torch.equal(_mirrored(images, torch.zeros(6, dtype=torch.int64)), images)
    # Tensors without values: whatever waits for one is an error.
    assert _mirrored(images.to("meta"), views.to("meta")).shape == images.shape


def test_mirroring_depends_on_seed_epoch_and_sample_alone(faces):
    train = faces.open(seed=5).train
    rows = np.arange(train.size)
    whole = train.fetch(rows, 3)["view"]
    alone = torch.cat([train.fetch(rows[i : i + 1], 3)["view"] for i in rows])
    assert (whole == alone).all()
    epochs = torch.stack([train.fetch(rows, epoch)["view"] for epoch in range(40)]).float()
    assert (epochs.std(0) > 0).all(), "each image is seen both ways"
    assert abs(epochs.mean() - 0.5) < 0.08
    assert not (faces.open(seed=6).train.fetch(rows, 3)["view"] == whole).all()


@pytest.fixture
def started(faces, tmp_path, monkeypatch) -> Path:
    """The folder in which a command is started, with nothing in the environment that names a place for packed sets."""
    monkeypatch.delenv("TRAINKIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "started").mkdir()
    monkeypatch.chdir(tmp_path / "started")
    return tmp_path / "started"


def test_packing_leaves_nothing_in_the_folder_of_the_start_and_a_private_cache(faces, started, tmp_path):
    before = os.umask(0)
    try:
        faces.open(0)
    finally:
        os.umask(before)
    kept = tmp_path / "xdg" / "trainkit" / "packed"
    assert not any(started.iterdir()) and any(image_store.is_packed(made) for made in kept.iterdir())
    assert kept.stat().st_mode & 0o777 == 0o700


def test_packed_sets_lie_beside_data_that_was_named_and_can_be_written(started, tmp_path, monkeypatch):
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("TRAINKIT_DATA", str(root))
    assert cache_root() == root / ".trainkit-packed"
    root.chmod(0o555)
    assert cache_root() == tmp_path / "xdg" / "trainkit" / "packed"
    root.chmod(0o755)
    (root / ".trainkit-packed").mkdir(mode=0o555)  # somebody else's
    assert cache_root() == tmp_path / "xdg" / "trainkit" / "packed"


def test_a_user_without_a_home_is_told_to_name_a_place_for_packed_sets(faces, started, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(
        Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    with pytest.raises(UserError, match="no home folder; set HOME, XDG_CACHE_HOME or TRAINKIT_CACHE"):
        faces.open(0)


def test_what_is_missing_is_said_without_failing(tmp_path):
    faces = Faces(train=str(tmp_path / "no"), evaluate={"lfw": str(tmp_path / "lfw.bin"), "own": "sample"})
    assert [line.split(":")[0] for line in faces.missing()] == ["data.train", "data.evaluate.lfw"]
    assert Faces(train="sample").missing() == []
    assert "download" in Faces(train="hf://owner/name").missing()[0]
    with pytest.raises(UserError, match="download"):
        Faces(train="hf://owner/name").open(0)


def test_a_packed_set_is_opened_where_it_lies_and_packed_again_for_another_size(tmp_path, cache):
    root = people(tmp_path / "people", size=16)
    report = import_images.import_faces(root, tmp_path / "packed", image_size=16)
    opened = Faces(train=str(tmp_path / "packed"), image_size=16).open(0)
    assert opened.meta.digest == report.digest and not cache.exists()
    small = Faces(train=str(tmp_path / "packed"), image_size=8).open(0)
    direct = Faces(train=str(root), image_size=8).open(0)
    assert small.meta.class_names == direct.meta.class_names
    assert (small.train.packed.fetch(np.arange(12)) == direct.train.packed.fetch(np.arange(12))).all()


def test_training_and_evaluation_sets_are_not_taken_for_each_other(tmp_path, faces):
    import_images.import_faces(faces.train, tmp_path / "t", image_size=SIZE)
    import_images.import_evaluation(faces.evaluate["few"], tmp_path / "e", image_size=SIZE)
    assert Faces(train=str(tmp_path / "t"), image_size=SIZE, evaluate={"e": str(tmp_path / "e")}).open(0)
    with pytest.raises(UserError, match="evaluation"):
        Faces(train=str(tmp_path / "e"), image_size=SIZE).open(0)
    with pytest.raises(UserError, match="train"):
        Faces(train=str(tmp_path / "t"), image_size=SIZE, evaluate={"e": str(tmp_path / "t")}).open(0)


def test_a_training_takes_from_the_hub_only_what_fetch_has_brought(tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked, here = [], []

    def snapshot_download(name, **options):
        asked.append((name, options))
        if options["local_files_only"] and not here:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing")
        here.append(name)
        return str(snapshot)

    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    saved_set(tmp_path, monkeypatch, ["zoe", "adam"], [0, 1, 1])
    (tmp_path / "set.parquet").rename(snapshot / "train.parquet")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_patterns", lambda name, where: ["train.parquet"])
    faces = Faces(train="hf://some/faces@v1", image_size=SIZE)
    assert "download" in faces.missing()[0]
    with pytest.raises(UserError, match="download"):
        faces.open(0)
    assert all(options["local_files_only"] for _, options in asked)
    hub.download(faces.train)
    name, options = asked[-1]
    assert (name, options["revision"], options["repo_type"]) == ("some/faces", "v1", "dataset")
    assert all(pattern.endswith(".parquet") for pattern in options["allow_patterns"])
    assert faces.missing() == [] and faces.open(0).meta.class_names == ("zoe", "adam")
    with pytest.raises(UserError, match="not the name of a data set"):
        hub.download("hf://../../x")


def test_an_evaluation_set_is_taken_whole_or_not_at_all(tmp_path, faces):
    with pytest.raises(UserError, match="skipped"):
        import_images.import_evaluation(faces.evaluate["few"], tmp_path / "e", image_size=SIZE, damaged="skip")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["anna/0.png,anna/1.png"], "line 2"),
        (["anna/0.png,anna/1.png,1", "anna/0.png,anna/1.png,maybe"], "line 3"),
        (["../../etc/passwd,anna/1.png,1"], "inside"),
        (["/etc/passwd,anna/1.png,1"], "inside"),
        (["anna/0.png,,1"], "inside"),
        ([], "no pairs"),
        (["anna/0.png,anna/nobody.png,1"], "nobody.png"),
    ],
)
def test_a_bad_line_of_pairs_is_named(tmp_path, lines, words):
    file = csv_of(people(tmp_path / "p"), lines)
    with pytest.raises(UserError, match=words):
        import_images.import_evaluation(file, tmp_path / "out", image_size=SIZE)


def test_pairs_that_would_count_for_more_or_less_than_one_are_named_at_once(tmp_path):
    good = ["anna/0.png,anna/1.png,1", "anna/0.png,ben/0.png,0"]
    bad = ["ben/0.png,anna/0.png,0", "anna/1.png,anna/1.png,1", "./anna/0.png,anna/1.png,0", good[0]]
    file = csv_of(people(tmp_path / "p"), good + bad)
    with pytest.raises(UserError) as error:
        evaluation_sets.recognise(file)
    assert str(error.value).splitlines() == [
        f"{file}: 4 pairs of one image, or duplicates:",
        "  line 4: ben/0.png with anna/0.png, a duplicate of line 3",
        "  line 5: anna/1.png with itself",
        "  line 6: ./anna/0.png with anna/1.png, a duplicate of line 2",
        "  line 7: anna/0.png with anna/1.png, a duplicate of line 2",
        "expected each pair of two images once, in either order; remove these lines",
    ]


def test_a_pipe_that_pairs_name_is_not_waited_for(tmp_path):
    root = people(tmp_path / "p")
    os.mkfifo(root / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png.*: a named pipe; expected an image file"):
        import_images.import_evaluation(csv_of(root, ["anna/0.png,pipe.png,1"]), tmp_path / "out", image_size=SIZE)


def saved_set(tmp_path: Path, monkeypatch, names: list[str] | None, labels: list) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    files = [tmp_path / f"{i}.png" for i in range(len(labels))]
    for i, file in enumerate(files):
        Image.fromarray(picture(i)).save(file)
    kind = (
        datasets.ClassLabel(names=names)
        if names
        else datasets.Value("string" if isinstance(labels[0], str) else "int64")
    )
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    rows = {"image": [{"bytes": file.read_bytes(), "path": None} for file in files], "label": labels}
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict(rows, features)
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    data.to_parquet(tmp_path / "set.parquet")
    return tmp_path


@pytest.mark.parametrize("form", ["saved", "splits", "set.parquet"])
@pytest.mark.parametrize(
    ("names", "labels", "expected", "numbers"),
    [
        (["zoe", "adam"], [0, 1, 1], ("zoe", "adam"), [0, 1, 1]),
        (None, [40, 7, 40], ("7", "40"), [1, 0, 1]),
        (None, ["b", "a", "b"], ("a", "b"), [1, 0, 1]),
    ],
    ids=["ClassLabel", "gaps", "text"],
)
def test_sets_of_hugging_face_keep_pictures_and_labels(tmp_path, monkeypatch, form, names, labels, expected, numbers):
    source = sources.open_source(saved_set(tmp_path, monkeypatch, names, labels) / form)
    report = import_images.import_faces(source, tmp_path / "out", image_size=SIZE)
    data = Packed(tmp_path / "out")
    assert data.class_names == expected and data.labels.tolist() == numbers
    assert any("renumbered" in note for note in report.notes) == (labels[0] == 40)
    for row, pixels in enumerate(data.fetch(np.arange(3))):
        assert (pixels.transpose(1, 2, 0) == picture(row)).all()


def test_what_is_no_data_set_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "empty" / "person").mkdir(parents=True)
    for path in (tmp_path / "x.txt", tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(UserError, match=path.name):
            sources.open_source(path)
        with pytest.raises(UserError, match=path.name):
            evaluation_sets.recognise(path)


@real
@pytest.mark.slow
def test_real_faces_pack_to_their_own_pixels(tmp_path):
    opened = Faces(train=str(REAL / "train"), evaluate={"lfw": str(REAL / "verification")}).open(0)
    assert opened.meta.classes == 298 and opened.train.size == 3493
    assert opened.evaluations["lfw"].size == 1097 and len(opened.evaluations["lfw"].protocol) == 600
    ids = opened.train.packed.ids()
    for row in (0, 1000, 3492):
        pixels = np.asarray(Image.open(REAL / "train" / ids[row]))
        assert (opened.train.packed.fetch(np.asarray([row]))[0].transpose(1, 2, 0) == pixels).all()
        assert opened.meta.class_names[opened.train.packed.labels[row]] == ids[row].split("/")[0]


@pytest.mark.slow
def test_processes_that_start_together_pack_once(faces, cache):
    import subprocess
    import sys

    program = (
        "import sys; from trainkit.data.faces.dataset import Faces;"
        f"print(Faces(train=sys.argv[1], image_size={SIZE}).open(0).meta.digest)"
    )
    command = [sys.executable, "-c", program, faces.train]
    root = Path(__file__).parents[3]
    started = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    digests = {process.communicate()[0].strip() for process in started}
    assert digests == {Faces(train=faces.train, image_size=SIZE).open(0).meta.digest}
    assert len(list(cache.glob("*/manifest.json"))) == 1
    assert not [path for path in cache.iterdir() if "partial" in path.name]
