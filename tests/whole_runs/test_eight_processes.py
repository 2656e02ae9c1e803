"""Eight processes over gloo: trainings are stopped and resumed there, and score as one process does."""

from __future__ import annotations

from pathlib import Path

import nifti_sets
import people_sets
import pytest
from runs import TOY, Ran, environment, newest, run, start

from tests.whole_runs import test_reid, test_segmentation_3d
from trainkit.config.run_request import RunRequest
from trainkit.inference import evaluate_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("store")]
SHORT = {
    "best": "null",
    "checkpoints": "{every: 2 steps, keep_last: 50}",
    "log": "{every: 1 steps, system_every: null}",
}


def settings(batch_size: int) -> dict[str, str]:
    """Five steps, of the smallest micro-batches that eight processes can make of an update."""
    train = f"{{length: 5 steps, batch_size: {batch_size}, micro_batch: {batch_size // 8}}}"
    return SHORT | {"train": train, "evaluations": "{val: {at_start: true}}"}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Data of each kind, enough for eight processes; fewer volumes to evaluate than processes."""
    root = tmp_path_factory.mktemp("sets")
    nifti_sets.write_set(root / "volumes" / "train", 6, seed=1)
    nifti_sets.write_set(root / "volumes" / "val", 3, seed=2)
    people_sets.index(root / "people" / "train", 18, (3, 2, 1, 1, 2))
    people_sets.index(root / "people" / "val", [f"q{n}" for n in range(4)], (3, 2, 1, 1, 2), seed=1)
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


@pytest.fixture
def words(sets):
    """Recipe, words, and the number of samples that are scored, of a kind."""

    def of(kind: str) -> tuple[Path, list[str], int]:
        if kind == "segment3d":
            return test_segmentation_3d.TOM500, test_segmentation_3d.words(sets / "volumes", **settings(8)), 3
        sampler = "{name: modal_pk, people: 8, each: 5, batches_per_epoch: 8}"  # one block, of a person a process
        shared = {"train": "{length: 5 steps, batch_size: 40}", "data.sampler": sampler}
        return test_reid.REID, test_reid.words(sets / "people", **(settings(40) | shared)), 36

    return of


def launch(recipe, *words, resume: bool = False, stop_at: int | None = None) -> Ran:
    """Train on eight processes; stopped, process 5 alone gets the signal."""
    plan = [{"at": "trainkit.training.trainer.Trainer.step", "call": stop_at, "do": "signal 15", "rank": 5}]
    own = [str(recipe), *words, *(["--resume"] if resume else [])]
    with start(8, *own, plan=plan if stop_at else ()) as started:
        codes = started.wait(900)
        assert codes == [143 if stop_at else 0] * 8, started.stdout + started.stderr
    return Ran(0, newest())


@pytest.mark.parametrize("kind", ["segment3d", "reid"])
def test_a_training_stops_resumes_and_scores_on_eight_processes_as_on_one(words, kind):
    recipe, own, samples = words(kind)
    cut = launch(recipe, *own, stop_at=3)
    assert cut.folder.info().status == "KILLED" and 2 < cut.last.step < 5
    ran = launch(recipe, *own, resume=True)
    assert ran.folder == cut.folder and ran.folder.info().status == "FINISHED" and ran.last.step == 5
    (name,) = (name for name in ran.history.metrics if name.endswith("/unique_samples"))
    assert ran.series(name) == [samples] * 2, "padding of the last batches counts for nothing"
    name = name.split("/")[1]
    scored = {key: points[-1] for key, points in ran.repeatable.items() if key.startswith(f"{name}/")}
    alone = evaluate_run.evaluate(RunRequest(recipe, own), ran.folder.name, log=False)
    assert len(scored) > 2 and scored == {key: (5, value) for key, value in alone.items()}


def test_the_losses_of_eight_processes_are_those_of_one_also_resumed():
    own = ["task.norm=false", "task.dropout=0.0", "train.ema=null", "train.batch_size=16", "train.micro_batch=2"]
    own += ["train.length=8 steps", "log.every=1 steps"]
    one = run(*own)
    launch(TOY, "--plugin", "toy", *own, stop_at=5)
    eight = launch(TOY, "--plugin", "toy", *own, resume=True)
    assert eight.series("train/loss") == pytest.approx(one.series("train/loss"), rel=1e-5)
    assert set(eight.series("eval/val/unique_samples")) == {37.0}
