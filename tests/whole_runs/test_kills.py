"""Killed at a random moment and resumed, a run ends with the bits and the history of one that was left alone."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fault_injection import Fault, environment, struck
from run_invariants import account, unlike, unsound
from runs import PLUGIN, ROOT, TOY, own_store, start

from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

SYSTEM = ["os.open", "os.write", "os.fsync", "os.rename", "os.replace", "os.unlink", "os.rmdir", "os.mkdir"]
PHASES: dict[str, dict[str, Any]] = {
    "opening": {
        "at": [
            "trainkit.config.run_request.load",
            "trainkit.tracking.store.Store.prepare",
            "trainkit.analysis.data_integrity.ensure",
            "trainkit.tracking.store.Store.new_run",
            "trainkit.tracking.mlflow_experiment.prepared",
            "mlflow.tracking.MlflowClient.create_run",
            "trainkit.tracking.store.write_aside",
            "trainkit.tracking.desired_state.DesiredState.set",
        ]
    },
    "steps": {
        "at": ["trainkit.distributed.runtime.Runtime.backward", "trainkit.training.run_logger.RunLogger.progress"]
    },
    "saving": {"at": ["trainkit.checkpoint.state_dict.Copies.make", *SYSTEM], "thread": "trainkit-checkpoint"},
    "evaluating": {
        "at": [
            "trainkit.training.evaluator.evaluate",
            "trainkit.training.best.enter",
            "trainkit.training.run_logger.RunLogger.scored",
        ]
    },
    "telling": {
        "at": [
            "mlflow.tracking.MlflowClient.log_batch",
            "mlflow.tracking.MlflowClient.log_artifact",
            "mlflow.tracking.MlflowClient.set_terminated",
            *SYSTEM,
        ],
        "thread": "trainkit-uploader",
    },
    "ending": {
        "at": [
            "trainkit.analysis.run_summary.write",
            "trainkit.tracking.tracker.Tracker.finish",
            "trainkit.tracking.tracker.Tracker.model",
        ]
    },
    "leaving": {"at": ["trainkit.tracking.store.RunFolder.release", "threading._shutdown", "atexit._run_exitfuncs"]},
}
"""Moments of a run, by the functions whose calls are counted."""
FORKED = (
    "opening", "saving", "steps", "telling", "evaluating", "saving", "opening", "saving", "steps", "ending",
    "saving", "telling", "leaving", "saving", "steps",
)  # fmt: skip
"""In which phase each trial of 15 is killed."""
FEW = 2
"""Trials of the default tests; the slow ones make one of each phase that is left, and another of a save."""
FULL = "OSError 28"
"""What a full disk does."""
IMPORTS = 3000
"""A new process that trains looks for 4,100 modules."""
WORDS = ("checkpoints={every: 2 steps, keep_last: 2}", "log.every=2 steps", "train.length=3 epochs")


@dataclass
class Job:
    """A recipe with its settings, what it came to when nothing happened, and how often each moment came."""

    words: Sequence[str]
    whole: Mapping[str, Any]
    moments: Mapping[str, int]


@contextmanager
def fresh(home: Path, database: Path) -> Iterator[Path]:
    """An empty store in a folder, which is gone afterwards."""
    home.mkdir(parents=True)
    with own_store(home, database):
        yield home
    shutil.rmtree(home)


def ran(words: Sequence[str], plan: Sequence[Fault] = (), notes: Path | None = None) -> int:
    """Run a recipe in a fork, going on with what was interrupted: its exit code."""
    with start(1, *words, "--resume-or-start", plan=plan, notes=notes) as process:
        (code,) = process.wait(600)
        # Without the checkpoint with which it was to end, a run has failed; it says why.
        full = any(fault["do"] == FULL for fault in plan)
        said = next((line for line in reversed(process.stderr.splitlines()) if line.startswith("error: ")), "")
        refused = code == 2 and full and "No space left on device" in said
        if code not in (0, 143, -signal.SIGKILL) and not refused:
            raise AssertionError(f"exit code {code}\n{process.stdout}\n{process.stderr}")
        return code


def job(words: Sequence[str], home: Path, database: Path) -> Job:
    """Run a recipe undisturbed."""
    notes = home.with_suffix(".notes")
    with fresh(home, database):
        assert ran(words, [{**moment, "do": "note", "name": name} for name, moment in PHASES.items()], notes) == 0
        folder = Store.locate().runs()[-1]
        assert not unsound(folder)
        return Job(words, account(folder), {note["name"]: note["call"] for note in struck(notes)})


def trainings() -> list[RunFolder]:
    """Runs of the job, oldest first; not those that score it."""
    return [folder for folder in Store.locate().runs() if not folder.info().evaluates]


def finished() -> RunFolder:
    """The run that has finished; there is one."""
    (done,) = [folder for folder in trainings() if folder.info().status == "FINISHED"]
    return done


def expect_whole(job: Job) -> None:
    """Raise AssertionError unless the store holds what an undisturbed run leaves."""
    folder = finished()
    there, wrong = account(folder), unsound(folder)
    names = unlike(job.whole, there)
    wrong += [f"{name}: {difference(job.whole.get(name), there.get(name))}" for name in names[:6]]
    wrong += [f"not equal: {', '.join(names)}"] if names else []
    assert not wrong, "\n".join(wrong)


def difference(one: object, other: object) -> str:
    """Say in what two values of an account differ; of lists of lists the innermost members that one alone has."""
    while isinstance(one, list | tuple) and isinstance(other, list | tuple):
        ours, theirs = ([member for member in a if member not in b] for a, b in ((one, other), (other, one)))
        if len(ours) != 1 or len(theirs) != 1:
            return f"{ours!r:.300} is {theirs!r:.300}"
        (one,), (other,) = ours, theirs
    return f"{one!r:.300} is {other!r:.300}"


def killed_once(job: Job, phase: str, rng: random.Random, home: Path, database: Path) -> None:
    """One trial: killed in a phase, resumed."""
    call, after = rng.randint(1, job.moments[phase]), rng.random() < 0.5
    while True:
        with fresh(home, database):
            plan, notes = [{**PHASES[phase], "call": call, "do": "kill", "after": after}], home.with_suffix(".notes")
            notes.unlink(missing_ok=True)
            print(f"{phase}: killed {'after' if after else 'at'} call {call} of {job.moments[phase]}", flush=True)
            if ran(job.words, plan, notes) == 0:  # threads take turns as they like: there were fewer calls this time
                assert not struck(notes) and call > 1
                call //= 2
                continue
            assert len(struck(notes)) == 1
            go_on(job)
            expect_whole(job)
            return


def go_on(job: Job) -> None:
    """Start what was killed once more."""
    assert ran(job.words) == 0


def ended() -> bool:
    """Whether the newest run of the job says that it has finished."""
    return trainings()[-1:] != [] and trainings()[-1].info().status == "FINISHED"


def killed_often(job: Job, rng: random.Random, home: Path, database: Path, plans: Iterator[Sequence[Fault]]) -> int:
    """One trial: a fault in each process as long as there are plans, then none; returns how many there were."""
    notes, lives = home.with_suffix(".notes"), 0
    with fresh(home, database):
        for plan in plans:
            lives += 1
            print(plan, flush=True)
            code = ran(job.words, plan, notes)
            if code == 0 or ended():
                break
        go_on(job)
        expect_whole(job)
        return lives


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, database: Path) -> Job:
    return job([str(TOY), "--plugin", "toy", *WORDS], tmp_path_factory.mktemp("toy") / "store", database)


@pytest.mark.timeout(1800)
def test_killed_at_a_random_moment_and_resumed_a_run_ends_as_if_nothing_had_been(toy, trials, tmp_path, database):
    for seed in trials(FEW, 150):
        killed_once(toy, FORKED[seed % len(FORKED)], random.Random(f"K3 {seed}"), tmp_path / str(seed), database)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, 4, 7, 9, 12])
def test_killed_at_other_moments_too(toy, seed, tmp_path, database):
    killed_once(toy, FORKED[seed], random.Random(f"K3 {seed}"), tmp_path / "store", database)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_process_of_its_own_is_killed_and_resumed_and_one_beneath_accelerate_launch(toy, trials, tmp_path, database):
    command = [sys.executable, str(ROOT / "tests" / "support" / "fault_injection.py")]
    config = ["--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml")]
    beneath = [sys.executable, "-m", "accelerate.commands.launch", *config, *command[1:]]
    kinds = ((command, "import"), (beneath, "steps"), (command, "import"), (beneath, "saving"), (beneath, "import"))
    moments = {**PHASES, "import": {"at": "import"}}

    def alone(line: Sequence[str], plan: Sequence[Fault], notes: Path) -> int:
        given = {**os.environ, "PYTHONPATH": str(PLUGIN), "ACCELERATE_USE_CPU": "true", **environment(plan, notes)}
        words = [*line, *toy.words, "--resume-or-start"]
        return subprocess.run(words, env=given, cwd=tmp_path, capture_output=True, text=True).returncode

    calls = {**toy.moments, "import": IMPORTS}
    for seed in trials(5, 30):
        line, phase = kinds[seed % len(kinds)]
        rng, notes = random.Random(f"whole {seed}"), tmp_path / f"{seed}.notes"
        with fresh(tmp_path / str(seed), database):
            # Of the calls of threads, which take turns as they like, only those of the first half are sure to come.
            call = rng.randint(1, calls[phase] // (2 if phase == "saving" else 1))
            print(f"{phase}: call {call} of {calls[phase]}", flush=True)
            code = alone(line, [{**moments[phase], "call": call, "do": "kill"}], notes)
            assert code and len(struck(notes)) == 1, code
            go_on(toy)
            expect_whole(toy)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["trainkit.tracking.tracker.Tracker.flush", "trainkit.analysis.promote.at_end"])
def test_killed_behind_its_end_a_run_is_promoted_by_the_next_start_and_not_trained_again(tmp_path, database, at):
    words = [str(TOY), "--plugin", "toy", *WORDS, "promote={}"]

    def promoted() -> str:
        return Store.locate().client().get_run(finished().info().run_id).data.tags.get("trainkit.promotion", "")

    with fresh(tmp_path / "store", database):
        assert ran(words, [{"at": at, "call": 1, "do": "kill"}]) == -signal.SIGKILL
        assert ended() and not promoted()
        assert ran(words) == 0
        assert finished().name in promoted() and not finished().leaving.exists() and not unsound(finished())
        assert ran(words) == 0 and len(trainings()) == 1, "all has been done"


@pytest.mark.slow
def test_killed_while_it_removes_what_was_sent_nothing_is_taken_for_damaged(toy, tmp_path, database):
    plan = [{"at": ["os.unlink", "os.rmdir"], "thread": "trainkit-uploader", "call": 8, "do": "kill"}]
    with fresh(tmp_path / "store", database):
        assert ran(toy.words, plan) == -signal.SIGKILL
        go_on(toy)
        expect_whole(toy)


@pytest.mark.slow
def test_a_model_of_a_run_that_is_told_to_stop_has_no_scores_of_an_earlier_step(toy, tmp_path, database):
    plan = [{"at": "trainkit.training.run_logger.RunLogger.progress", "call": 5, "do": "signal 15"}]
    with fresh(tmp_path / "store", database):
        assert ran(toy.words, plan) == 143
        assert not (wrong := unsound(trainings()[-1])), wrong
        go_on(toy)
        expect_whole(toy)


SPARSE = ("checkpoints={every: null, keep_last: 2, lose_at_most: 0.001 s}", "best=null", "train.length=4 epochs")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, database: Path) -> Job:
    """A recipe that saves at its end alone, but for the promise of what a kill costs."""
    return job([str(TOY), "--plugin", "toy", *SPARSE], tmp_path_factory.mktemp("sparse") / "store", database)


def after(calls: int) -> list[Fault]:
    """Killed in the micro-batch of this number. By the fourth update the checkpoint of the second is on the disk."""
    return [{"at": "trainkit.distributed.runtime.Runtime.backward", "call": calls, "do": "kill"}]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_always_killed_before_its_first_checkpoint_would_be_due_gets_to_its_end(
    sparse, trials, tmp_path, database
):
    for seed in trials(1, 30):
        rng = random.Random(f"K4 {seed}")
        plans = (after(rng.randint(8, 12)) for _ in range(20))
        lives = killed_often(sparse, rng, tmp_path / str(seed), database, plans)
        assert 3 <= lives < 12


@pytest.mark.slow
def test_without_that_promise_it_never_gets_on(tmp_path, database):
    words = [str(TOY), "--plugin", "toy", *SPARSE, "checkpoints.lose_at_most=null"]
    with fresh(tmp_path / "killed", database):
        for _ in range(2):
            assert ran(words, after(12)) == -signal.SIGKILL
            assert not list(Store.locate().runs()[-1].checkpoints.iterdir())


@pytest.mark.slow
def test_when_checkpoints_are_written_changes_no_bit(sparse, tmp_path, database):
    never = job([*sparse.words, "checkpoints.lose_at_most=null"], tmp_path / "never", database)
    assert never.moments["saving"] < sparse.moments["saving"] / 5
    assert unlike(never.whole, sparse.whole) == [
        "artifact recipe/overrides.txt", "artifact recipe/resolved.yaml", "recipe",
    ]  # fmt: skip


UPDATE = {"at": "trainkit.distributed.runtime.Runtime.backward", "call": 13}
"""In the seventh update, behind two evaluations, the last checkpoint being that of the sixth or before."""
SPOILED = {
    "reseeding": ("tensor model/", UPDATE),
    "sample_seeding": ("tensor model/", UPDATE),
    "optimizer": ("tensor model/", UPDATE),
    "averages": ("tensor ema/", UPDATE),
    "fixed_times": (
        "2 rows of",
        {"at": "trainkit.tracking.upload.Upload.acknowledge", "call": 1, "after": True},
    ),
    "commit_order": ("but the checkpoint was written at byte", {"at": "trainkit.checkpoint.storage.prune", "call": 3}),
    "verification": ("missing", {"at": "os.write", "thread": "trainkit-checkpoint", "call": 17}),  # in the third of 7
}
"""Mechanisms that are taken away, what the oracle says of it, and where the run is killed."""


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", SPOILED)
def test_the_oracle_notices_when_a_mechanism_is_taken_away(spoiled, tmp_path, database, monkeypatch):
    said, moment = SPOILED[spoiled]
    monkeypatch.setenv("SPOILED", spoiled)
    # Of what is sent, something lies behind the checkpoint only if there is none yet.
    rare = ("checkpoints.every=10 steps", "best=null") if spoiled == "fixed_times" else ()
    whole = job([str(TOY), "--plugin", "toy", "--plugin", "spoiled", *WORDS, *rare], tmp_path / "whole", database)
    with fresh(tmp_path / "killed", database):
        assert ran(whole.words, [{**moment, "do": "kill"}]) == -signal.SIGKILL
        with pytest.raises(AssertionError, match=said):
            go_on(whole)
            expect_whole(whole)
