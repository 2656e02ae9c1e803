"""Trainings on two machines, which are network namespaces of this one: started, one cut off, gone on with the other."""

from __future__ import annotations

import time
from pathlib import Path

import nodes as machines
import pytest
from runs import PLUGIN, ROOT, TOY, Ran, newest

from trainkit.tracking.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("store")]
WORDS = [str(ROOT / "trainkit" / "run.py"), str(TOY), "--plugin", "toy", "log.every=1 steps", "task.norm=false"]
PLACE = {"PYTHONPATH": f"{PLUGIN}:{ROOT}", "ACCELERATE_USE_CPU": "true"}
LONG = ["checkpoints={every: 2 steps, keep_last: 1}", "train.length=100k steps", "evaluations={}", "best=null"]
PATIENCE = 600


def until_saved(job, said, after: int = 0) -> None:
    """Wait for a checkpoint of the newest run."""
    end = time.monotonic() + PATIENCE
    while not any(int(p.name.split("-")[1]) > after for p in checkpoints()):
        assert job.poll() is None and time.monotonic() < end, said.read_text()
        time.sleep(0.2)


def checkpoints() -> list[Path]:
    return [file.parent for file in Store.locate().home.glob("runs/*/checkpoints/step-*/MANIFEST.json")]


def launch(nodes, folder, *words: str):
    """The training beneath a launcher on each node; what they print."""
    said = [folder / f"node{number}.txt" for number in range(len(nodes))]
    jobs = [
        node.start(*machines.torchrun(nodes, number), *WORDS, *words, said=said[number], **PLACE)
        for number, node in enumerate(nodes)
    ]
    return jobs, said


def test_a_machine_that_is_cut_off_ends_the_run_and_the_other_goes_on_with_it(tmp_path):
    if reason := machines.cannot():
        pytest.skip(reason)
    with machines.nodes(2) as both:
        jobs, said = launch(both, tmp_path, *LONG)
        until_saved(jobs[0], said[0])
        both[1].kill()
        assert jobs[0].wait(PATIENCE) != 0, said[0].read_text()
        cut = newest()
        assert cut.info().status != "FINISHED" and Ran(1, cut).last.state["machine"]["processes"] == 2
        (job,), (said_again,) = launch(both[:1], tmp_path, *LONG, "--resume", "--elastic")
        until_saved(job, said_again, after=Ran(1, cut).last.step)
        both[0].kill()
        assert newest() == cut and Ran(1, cut).last.state["machine"]["processes"] == 1


def test_two_machines_train_together(tmp_path):
    if reason := machines.cannot():
        pytest.skip(reason)
    with machines.nodes(2) as both:
        jobs, said = launch(both, tmp_path)
        assert [job.wait(PATIENCE) for job in jobs] == [0, 0], said[0].read_text() + said[1].read_text()
        assert "2 processes x" in said[0].read_text() and newest().info().status == "FINISHED"
