"""Names that others wrote stay inside: what a recipe has written, what a set lists, what a run or a server names."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import json
import logging
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from runs import PLUGIN, TOY

from trainkit import files
from trainkit.autoconfig import download as fetching
from trainkit.checkpoint import storage, verification
from trainkit.config import loader, schema
from trainkit.data import cache, evaluation_sets, sources
from trainkit.data.formats import image_decode
from trainkit.data.people import sources as people_sources
from trainkit.data.scenes import sources as scene_sources
from trainkit.data.volumes import sources as volume_sources
from trainkit.errors import UserError
from trainkit.tracking import run_folder, store, sync, upload
from trainkit.tracking.journal import Journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights

OUTSIDE = [
    "/etc/passwd", "../secret.png", "a/../../secret.png", "..", "../../../../../../etc/passwd", "~/secret.png",
    "~root/secret.png", "file:///etc/passwd", "file://localhost/etc/passwd", "https://x.example/a.png",
    r"\\server\share\a.png", "//server/share/a.png", r"..\secret.png", r"C:\secret.png", "/proc/self/environ",
    "./../secret.png", "a/./../../secret.png", "a\0b.png", "a\nb.png",
]  # fmt: skip
"""Names of what is not in the folder; beside it lies `secret.png`, which could be read."""


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    return path


@pytest.fixture
def root(tmp_path, monkeypatch, cache):
    """A set's folder with an image beside it that nothing inside may name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    picture(tmp_path / "secret.png")
    picture(tmp_path / "set" / "a" / "0.png")
    return tmp_path / "set"


# What lists inside sets name


def _pairs(root: Path, name: str) -> None:
    quoted = name.replace('"', '""')
    (root / "pairs.csv").write_text(f'path_a,path_b,same\na/0.png,"{quoted}",1\n')
    source, _ = evaluation_sets.recognise(root).read()
    for record in source.records():
        image_decode.read(record.data, record.where)


def _scenes(root: Path, name: str) -> None:
    (root / "list.txt").write_text(f"a/0.png,{name}\n")
    found = scene_sources.open_scenes(str(root / "list.txt"))
    assert all(Path(scene.mask).resolve().is_relative_to(root) for scene in found.scenes)


def _people_table(root: Path, name: str) -> None:
    quoted = name.replace('"', '""')
    (root / "index.csv").write_text(f'path,person,modality\na/0.png,1,rgb\n"{quoted}",1,rgb\n')
    people_sources.find(str(root))


def _orbench(root: Path, name: str) -> None:
    entry = {"id": 1, "file_path": name, "captions": ["x"], "split": "train"}
    for part in ("train", "test", "val"):
        (root / f"{part}_annos.json").write_text(json.dumps([entry]))
    people_sources.find(str(root))


def _decathlon(root: Path, name: str) -> None:
    (root / "imagesTr").mkdir(exist_ok=True)
    (root / "labelsTr").mkdir(exist_ok=True)
    told = {"labels": {"0": "background", "1": "a"}, "training": [{"image": name, "label": name}]}
    (root / "dataset.json").write_text(json.dumps(told))
    found = volume_sources.open_volumes(root)
    assert all(case.image.resolve().is_relative_to(root) for case in found.cases)


def _saved(root: Path, name: str) -> None:
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    list(sources.open_source(root).records())


def _dictionary(root: Path, name: str) -> None:
    (root / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    list(sources.open_source(f"{root}#{name}").records())


def _packed(root: Path, name: str) -> None:
    (root / "manifest.json").write_text(
        json.dumps({"format": "trainkit-packed", "version": 1, "files": {name: {"bytes": 1, "sha256": "0" * 64}}})
    )
    sources.open_source(root)


def _checkpoint(root: Path, name: str) -> None:
    folder = storage.write(root / "run", 1, {"model": {}}, {"best": []}, "a: 1\n")
    files = {n: verification.fingerprint(folder / n) for n in os.listdir(folder) if n != storage.MANIFEST}
    (folder / storage.MANIFEST).write_bytes(verification.encoded_manifest({**files, name: (0, "0" * 64)}))
    storage.read(folder)


LISTS = {
    "pairs.csv": _pairs, "list of scenes": _scenes, "index of people": _people_table, "annotations": _orbench,
    "dataset.json": _decathlon, "state.json": _saved, "dataset_dict.json": _dictionary, "manifest.json": _packed,
    "MANIFEST.json": _checkpoint,
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", LISTS)
def test_what_a_list_in_a_set_names_outside_of_it_is_refused(root, kind, name, monkeypatch):
    opened = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: opened.append(self.resolve()) or real(self))
    with pytest.raises(UserError):
        LISTS[kind](root, name)
    assert [path for path in opened if not path.is_relative_to(root.parent / "set")] == []


def test_the_same_lists_take_what_is_inside(root):
    picture(root / "b" / "0.png")
    for kind in ("pairs.csv", "index of people", "list of scenes"):
        LISTS[kind](root, "b/0.png")


def _templates(root: Path, name: str) -> None:
    (root / "x_face_tid_mid.txt").write_text(f"a/0.png 1 1\n{name} 2 1\n")
    (root / "x_template_pair_label.txt").write_text("1 2 1\n")
    evaluation_sets.recognise(root).read()


LINKED = {kind: LISTS[kind] for kind in ("pairs.csv", "list of scenes", "index of people")}
LINKED |= {"templates": _templates}


@pytest.mark.parametrize("name", ["b.png", "c/1_secret.png", "c/../c/1_secret.png"])
@pytest.mark.parametrize("kind", LINKED)
def test_no_list_leads_outside_by_a_link(root, kind, name):
    picture(root.parent / "1_secret.png")
    (root / "b.png").symlink_to(root.parent / "1_secret.png")
    (root / "c").symlink_to(root.parent)
    with pytest.raises(UserError, match=r"a path inside|a link out of|a plain path below|path outside of the root"):
        LINKED[kind](root, name)


@pytest.mark.parametrize("kind", ["pairs.csv", "list of scenes", "index of people"])
def test_links_within_a_set_are_followed(root, kind):
    picture(root / "b" / "0.png")
    (root / "c").symlink_to("b")
    (root / "d.png").symlink_to("b/0.png")
    for name in ("c/0.png", "d.png"):
        LINKED[kind](root, name)


def test_a_folder_of_a_known_layout_may_be_a_link(root):
    """Whoever laid out the set made it: only what a list names has to lie in the set itself."""
    (root / "elsewhere").mkdir()
    picture(root / "elsewhere" / "0002_c1s1_000451_03.jpg")
    (root / "set").mkdir()
    (root / "set" / "bounding_box_train").symlink_to(root / "elsewhere")
    (record,) = people_sources.find(str(root / "set")).every
    assert record.id == "bounding_box_train/0002_c1s1_000451_03.jpg"


# What a recipe has written


HASH = hashlib.sha256(b"weights").hexdigest()


def download(to: str) -> schema.Download:
    return schema.Download(url="https://x.example/a", sha256=HASH, to=to)


@pytest.fixture
def web(monkeypatch, tmp_path):
    """Answers every address with `weights`."""
    import io
    import urllib.request

    asked = []

    def answer(*words, **more):
        asked.append(words)
        return io.BytesIO(b"weights")

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", answer)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path / "data"))
    return asked


@pytest.mark.parametrize(
    "to",
    [
        *(name for name in OUTSIDE),
        *(
            "",
            "x/",
            " a.pth",
            "a.pth ",
            "a//b.pth",
            "./a.pth",
            "a/./b.pth",
            ".hidden.pth",
            ".ssh/a.pub",
            "a/.git/x.cfg",
        ),
        *("torch.py", "torch/__init__.py", "torch.pyc", "torch.so", "TORCH.PY", "x.pyd", "GNUmakefile", "a\tb.pth"),
        *(f"json{suffix}" for suffix in importlib.machinery.all_suffixes()),
    ],
)
def test_a_download_goes_nowhere_but_below_the_data_and_is_no_code(to):
    with pytest.raises(ValueError, match=r"^to is "):
        download(to)


def test_a_download_is_put_below_the_data_and_through_no_link(web, tmp_path):
    data = tmp_path / "data"
    assert fetching._file(download("a/teacher v1.0+x.pth")) == f"{data}/a/teacher v1.0+x.pth: downloaded"
    (data / "out").symlink_to(tmp_path)
    (data / "a" / "loose.pth").symlink_to(tmp_path / "not there.pth")
    (data / "a" / "up.pth").symlink_to("../../up.pth")
    asked = len(web)
    for to in ("out/x.pth", "out/deep/x.pth", "a/loose.pth", "a/up.pth"):
        with pytest.raises(UserError, match=f"leads to .*; expected a place below {data}"):
            fetching._file(download(to))
    (data / "a" / "round.pth").symlink_to("nowhere.pth")
    with pytest.raises(UserError, match="exists with different content"):
        fetching._file(download("a/round.pth"))
    assert len(web) == asked and sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_a_link_that_waits_under_the_name_of_the_unfinished_file_is_not_written_through(web, tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(fetching.uuid, "uuid4", lambda: SimpleNamespace(hex="known"))
    (tmp_path / "data" / ".a.pth.known").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="cannot be downloaded"):
        fetching._file(download("a.pth"))
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["LFW", "a b", "a/b", "..", "../x", "~x", "ä", "a\\b"])
def test_the_name_of_an_evaluation_can_stand_in_that_of_a_metric_and_of_a_file(name, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    text = TOY.read_text().replace("evaluations: {val:", f"evaluations: {{{json.dumps(name)}:")
    with pytest.raises(loader.ConfigError, match="evaluations"):
        loader.parse(schema.Recipe, text.replace("best: {metric: val/accuracy}", ""), "x.yaml",
                     tables=loader.with_plugins(schema.TABLES, ["toy"]))  # fmt: skip


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "~", "a/b", ".", "..", "a b", "x" * 0])
def test_the_name_of_a_recipe_is_no_path(name, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    with pytest.raises(loader.ConfigError, match="name"):
        loader.load(TOY, [f"name={json.dumps(name)}"], ["toy"])


def test_what_an_experiment_is_called_names_a_folder_in_the_store(store):
    from trainkit.tracking import mlflow_experiment

    home = Store.locate()
    client = home.client()
    for name in ("../../out", "..", ".", "/etc", "~/x", "a/../../b", "file:///etc", r"\\server\x"):
        mlflow_experiment.prepared(client, home, name, "", None, True)
        place = Path(client.get_experiment_by_name(name).artifact_location.removeprefix("file://"))
        assert place.parent == home.artifacts and place.name not in ("", ".", ".."), name


# What runs, checkpoints and servers name


@pytest.mark.parametrize("word", ["..", ".", "../..", "../../x", "/etc", "~", "a/../..", "", "run.json/.."])
def test_a_run_is_found_among_the_runs_alone(store, word):
    (store / "runs" / "toy-s0").mkdir(parents=True)
    about = json.dumps({"name": "x", "recipe": "x", "recipe_hash": "x", "seed": 0, "started": 0.0})
    (store / "run.json").write_text(about)
    (store.parent / "run.json").write_text(about)
    with pytest.raises(UserError, match="not in"):
        Store.locate().find(word)


def test_the_best_weights_of_a_run_lie_in_its_checkpoints(tmp_path):
    for name in ("../../secret", "/etc/x", "", ".."):
        best = {"step": 1, "value": 1.0, "weights": name}
        storage.write(tmp_path / "checkpoints", 1, {"model": {}}, {"best": [best]}, "a: 1\n")
        with pytest.raises(UserError, match="model or ema"):
            best_weights(tmp_path)


@pytest.mark.parametrize("how", ["absolute", "upwards", "link", "folder"])
def test_a_run_that_was_laid_into_the_store_sends_no_file_of_this_machine(tmp_path, caplog, how):
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    folder = RunFolder(tmp_path / "run")
    at = "files/1"
    (folder.path / at).mkdir(parents=True)
    name = {"absolute": str(secret), "upwards": "../../../id_rsa"}.get(how, "id_rsa")
    if how == "link":
        (folder.path / at / "id_rsa").symlink_to(secret)
    if how == "folder":
        (folder.path / at).rmdir()
        (folder.path / at).symlink_to(tmp_path)
    line = {"kind": "file", "key": "id_rsa", "value": {"at": at, "file": name}}
    (folder.path / "desired.jsonl").write_text(json.dumps(line) + "\n")
    sent = []
    client = SimpleNamespace(log_artifact=lambda run, file, folder: sent.append(Path(file).read_text()))
    about = run_folder.RunInfo("run", "faces", "aa", 0, 0.0, "FINISHED", run_id="id")
    (folder.path / "run.json").write_text(json.dumps(asdict(about)))
    made = upload.Upload(folder, store.Store(tmp_path, "http://server.example"), Journal(folder.journal))
    with caplog.at_level(logging.WARNING):
        made.send(client)
    assert sent == [] and "not beside it; left out" in caplog.text and secret.read_text() == "secret"
    made.desired.set_file("file", "own", {}, "own", lambda out: out.write_text("own"))
    made.send(client)
    assert sent == ["own"]


def _laid(home: Path, **about: object) -> RunFolder:
    folder = RunFolder(home / "runs" / "faces-s0")
    folder.path.mkdir(parents=True)
    told = run_folder.RunInfo("$(touch owned)", "faces", "aa", 0, 0.0, "FINISHED", run_id="id", unsent=True)
    (folder.path / "run.json").write_text(json.dumps(asdict(replace(told, **about))))
    folder.journal.write_text('{"t": 1, "step": 1, "m": {}}\n')
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "files",
        "desired.jsonl",
        "journal.jsonl",
        "sent.json",
        ".run.json.new",
        "checkpoints",
        ".lock",
        "models.json",
    ],
)
def test_a_run_that_was_laid_into_the_store_writes_cuts_and_deletes_nothing_outside_of_its_folder(tmp_path, name):
    # As any training does with what others have left: it looks for what each has to upload, and writes how far it came.
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_rsa").write_text("key")
    (home / ".profile").write_text("first\nsecond, without an end")
    folder = _laid(tmp_path / "store")
    (folder.path / name).unlink(missing_ok=True)
    (folder.path / name).symlink_to(home if name in ("files", "checkpoints") else home / ".profile")
    place = store.Store(tmp_path / "store", "http://server.example")
    ended = SimpleNamespace(info=SimpleNamespace(status="FINISHED", lifecycle_stage="active"))
    assert place.unsent() == [folder]
    with pytest.raises(UserError, match=f"{name}: is a link to '{home}.*; expected a file or folder of the run"):
        folder.claim()
        try:
            sync.send_left(folder, place, SimpleNamespace(get_run=lambda run: ended))
        finally:
            folder.release()
    assert (home / ".ssh" / "id_rsa").read_text() == "key"
    assert (home / ".profile").read_text() == "first\nsecond, without an end"


def test_without_that_wall_it_deletes_the_hidden_folders_of_whatever_it_names(tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "_refuse_links", lambda self: None)
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    folder = _laid(tmp_path / "store")
    (folder.path / "files").symlink_to(tmp_path / "home")
    folder.claim()
    try:
        upload.Upload(folder, store.Store(tmp_path, "http://server.example"), Journal(folder.journal))
    finally:
        folder.release()
    assert list((tmp_path / "home").iterdir()) == []


def test_a_file_is_not_written_aside_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".about.json.new").symlink_to(tmp_path / "mine")
    with contextlib.suppress(OSError):
        files.write_aside(tmp_path / "about.json", "theirs")
    assert (tmp_path / "mine").read_text() == "mine"


ODD = [
    *({"started": odd} for odd in ("x", None, [1], math.nan, math.inf, 10**400)), {"pid": "1"}, {"seed": {}},
    {"status": ["FINISHED"]}, {"host": 5}, {"experiment": {"a": 1}}, {"varies": 5}, {"varies": [1]}, {"name": None},
]  # fmt: skip


@pytest.mark.parametrize("about", [*ODD, "pipe", "link"], ids=str)
def test_a_run_that_was_laid_into_the_store_keeps_no_command_from_the_others(tmp_path, caplog, about):
    home, good = store.Store(tmp_path, "http://server.example"), _laid(tmp_path)
    file = tmp_path / "runs" / "evil" / "run.json"
    file.parent.mkdir()
    if about == "pipe":
        os.mkfifo(file)  # whoever reads it waits
    elif about == "link":
        file.symlink_to("/dev/zero")  # and here reads for ever
    else:
        file.write_text(json.dumps({**asdict(good.info()), **about}))
    assert home.runs() == home.unsent() == [good] and home.abandoned() == []
    assert "evil/run.json: cannot be read" in caplog.text
    assert home.newest_unfinished("faces") is None and home.find("faces") == good
    with pytest.raises(UserError, match="not in"):
        home.find("evil")


@pytest.mark.parametrize("name", [".gitignore", "key.lock"])
def test_a_cache_that_came_with_a_set_is_not_written_through(tmp_path, name):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).symlink_to(tmp_path / "mine")
    with contextlib.suppress(UserError):
        cache.make_once(tmp_path / "cache" / "key", Path.is_dir, lambda _: None, "packing")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("word", ["../../x", "/etc/x", "..", "", ".hidden", "a/b"])
def test_a_server_cannot_choose_where_a_model_is_downloaded_to(word):
    with pytest.raises(UserError, match="calls that model"):
        store._plain_id(word, "models:/x", "https://server.example")
    assert store._plain_id("m-0a1b", "models:/x", "") == "m-0a1b"
