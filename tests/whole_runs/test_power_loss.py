"""Power cuts: after each there is a whole checkpoint, a journal that reaches it, and nothing that trips a run."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import power_loss
import pytest
import torch
from power_loss import DATA, NAMES, Recording
from runs import PLUGIN, TOY

from tests.checkpoint.test_storage import scratch  # noqa: F401 - a fixture
from trainkit.checkpoint import storage
from trainkit.checkpoint.state_dict import Copies
from trainkit.config.run_request import RunRequest, load
from trainkit.tracking.journal import Journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Silent
from trainkit.tracking.upload import Upload
from trainkit.training.checkpointer import CheckpointWriter
from trainkit.training.run_logger import RunLogger


class Written(Silent):
    """A tracker with a journal and a desired state, and no uploader."""

    def __init__(self, folder: RunFolder):
        self.journal = Journal(folder.journal)
        self.upload = Upload(folder, "id", self.journal)

    def position(self):
        return self.journal.position

    def commit(self):
        self.upload.desired.commit()
        return self.journal.commit()

    def event(self, step, name, data=None):
        self.journal.event(step, name, data)


def lived(home: Path, recording: Recording, steps: int = 5) -> RunFolder:
    """What a run writes, by the parts that write it: three checkpoints, one resume, and what waits for MLflow."""
    folder = Store(home, "").new_run("toy", 0, "abcd")
    recording.mark("began", folder.name)
    try:
        tracker = Written(folder)
        recipe = load(RunRequest(TOY, ("checkpoints={every: 1 steps, keep_last: 2}",), ("toy",)))
        for step in range(1, steps + 1):
            if step == 4:  # as after a kill: a new process goes back to the newest checkpoint
                tracker.journal.close()
                tracker = Written(folder)
                path, _ = storage.newest_valid(folder.checkpoints)
                position = storage.state_of(path)["journal"]
                tracker.upload.acknowledge(min(position, tracker.upload.sent.position))
                kept = {key: value[0] for key, value in tracker.journal.cut_back(position).values.items()}
                recording.mark("times", kept)
            tracker.journal.append(step, {"train/loss": 1 / step, "train/lr": 0.1})
            tracker.upload.desired.set("tag", "step", str(step))
            tracker.upload.desired.set_file("file", "a.txt", {}, "a.txt", lambda out, s=step: out.write_text(f"{s}"))
            tracker.upload.acknowledge(tracker.journal.commit())
            writer = CheckpointWriter(recipe, RunLogger(recipe, folder, tracker, main=True))
            copies = Copies()
            copies.files |= {"model": {"w": torch.full((3,), float(step))}}
            writer.begin(step, copies, {"best": []})
            assert writer.settle() is None
            recording.mark("committed", step)
            tracker.journal.append(step, {"eval/x": float(step)})
        tracker.journal.commit()
        recording.mark("journal", folder.journal.read_bytes())
    finally:
        folder.release()
    return folder


class Client:
    """MLflow, as far as tags and files are concerned."""

    def __init__(self):
        self.took = []

    def log_batch(self, run_id, metrics=(), tags=()):
        self.took += [tag.value for tag in tags]

    def log_artifact(self, run_id, file, folder):
        self.took.append(Path(file).read_text())


def what_is_wrong(home: Path, recording: Recording, n: int) -> str:
    """What breaks the promise in a folder as a power cut left it; empty where nothing does."""
    names = recording.reached(n, "began")
    committed = recording.reached(n, "committed")
    runs = Store(home, "").runs()
    if not names:
        return ""
    folder = RunFolder(home / "runs" / names[0])
    if not committed:
        return "" if all(run.info().name for run in runs) else "a run without a name"
    if [run.name for run in runs] != names:
        return "the run is not found"
    path, _ = storage.newest_valid(folder.checkpoints)
    if path is None:
        return "no checkpoint is whole"
    if (step := storage.state_of(path)["step"]) < max(committed):
        return f"the newest checkpoint is of step {step}, and {max(committed)} was committed"
    if not (storage.read(path).tensors["model"]["w"] == step).all():
        return "other tensors"
    kept = Journal(folder.journal)
    position = storage.state_of(path)["journal"]
    if kept.position < position:
        return f"the journal ends at {kept.position}, the checkpoint is of {position}"
    (whole,) = [value for _, what, value in recording.marks if what == "journal"]
    if folder.journal.read_bytes()[:position] != whole[:position]:
        return "the journal is not the one that was written"
    waiting = Upload(folder, "id", kept)
    waiting.acknowledge(min(position, waiting.sent.position))
    times = kept.cut_back(position).values
    lost = [key for told in recording.reached(n, "times") for key in told if key not in times and key[1] > step]
    if lost:
        return f"the times of {lost} are lost: they would be sent again with others"
    client = Client()
    waiting._try_metrics = waiting.ensure_run = lambda client: None  # it is not asked about metrics
    waiting.run_id = "a run"
    waiting.send(client)
    if waiting.pending() or not set(client.took) <= {str(step) for step in range(9)}:
        return f"what waited for MLflow arrived as {client.took}"
    kept.close()
    return ""


@pytest.fixture
def life(scratch, monkeypatch) -> tuple[Recording, Path]:  # noqa: F811
    """A recording of such a run, and a folder for what power cuts leave of it."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    load(RunRequest(TOY, (), ("toy",)))  # imports are no part of it
    (scratch / "home").mkdir()
    with power_loss.recorded(scratch / "home") as recording:
        lived(scratch / "home", recording)
    return recording, scratch / "cut"


def cuts(recording: Recording, out: Path, seed: int) -> str:
    """Cut the power behind every eighth operation, from where and in a way that a seed says: the first that is wrong.

    96 seeds are all of them in all ways.
    """
    rng = random.Random(seed)
    ways = [(data, names) for data in DATA for names in NAMES]
    data, names = ways[seed % len(ways)]
    for n in range((5 * seed + seed // 12) % 8, len(recording.operations) + 1, 8):
        try:
            power_loss.after(recording, n, out, data, names, rng)
            if wrong := what_is_wrong(out, recording, n):
                return f"behind operation {n} ({recording.operations[n - 1]}), bytes {data}, names {names}: {wrong}"
        finally:
            shutil.rmtree(out, ignore_errors=True)
    return ""


def test_after_a_power_cut_there_is_a_whole_checkpoint_and_all_that_belongs_to_it(trials, life):
    recording, out = life
    assert len(recording.operations) > 150 and len(recording.reached(10**9, "committed")) == 5
    for seed in trials(6, 400):
        assert cuts(recording, out, seed) == ""
