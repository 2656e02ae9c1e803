"""Long series of faults over every kind of recipe, any order of faults and orders, and nothing that piles up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import psutil
import pytest
from fault_injection import Fault
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from runs import ROOT, TOY, run, start

from tests.whole_runs import test_classification, test_embedding, test_reid, test_segmentation_2d, test_segmentation_3d
from tests.whole_runs.test_classification import pictures  # noqa: F401 - a fixture, as those below
from tests.whole_runs.test_embedding import crops  # noqa: F401
from tests.whole_runs.test_kills import (
    FULL,
    PHASES,
    SYSTEM,
    WORDS,
    Job,
    ended,
    expect_whole,
    fresh,
    go_on,
    job,
    killed_often,
    killed_once,
    ran,
    trainings,
)
from tests.whole_runs.test_reid import sets  # noqa: F401
from tests.whole_runs.test_segmentation_2d import streets  # noqa: F401
from tests.whole_runs.test_segmentation_3d import bodies  # noqa: F401
from trainkit.checkpoint import storage, verification
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.upload import sent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KINDS = ("classify", "embed", "segment3d", "reid", "segment2d", "folded", "adadistill")
"""Kinds of recipes; `folded` trains on all volumes but those of a fold."""
FOLDED = (
    "data={name: folded, fold: 1}", "evaluations={held_out: {every: 3 steps}}", "best={metric: held_out/accuracy}"
)  # fmt: skip
SMALL_FACES = (
    "data.image_size=48", "train={length: 12 steps, batch_size: 32, micro_batch: 16, ema: 0.9}",
    "evaluations={sample: {every: 6 steps, batch_size: 64}}", "checkpoints={every: 3 steps, keep_last: 2}",
    "log.every=2 steps",
)  # fmt: skip


def taught(home: Path, database: Path) -> Path:
    """Weights that know faces, so that nobody refuses to learn from them."""
    words = (str(ROOT / "recipes" / "face_teacher.yaml"), "train.length=3 epochs", "evaluations={}", "best=null")
    with fresh(home / "store", database):
        assert ran(words) == 0
        newest, _ = storage.newest_valid(Store.locate().runs()[-1].checkpoints)
        return (newest / "model.safetensors").rename(home / "teacher.safetensors")


@pytest.fixture(scope="module")
def kinds(pictures, crops, sets, streets, bodies, tmp_path_factory, database) -> Callable[[str], Job]:  # noqa: F811
    """The job of a kind, its undisturbed run made when it is first asked for."""
    few = {"checkpoints": "{every: 3 steps, keep_last: 2}"}
    made: dict[str, Job] = {}

    def words(kind: str, home: Path) -> list[str]:
        if kind == "adadistill":
            teacher = f"{{net: {{name: iresnet18, embedding: 128, width: 0.25}}, weights: {taught(home, database)}}}"
            return [str(ROOT / "recipes" / "adadistill.yaml"), *SMALL_FACES, f"task.teacher={teacher}"]
        return {
            "classify": [str(test_classification.CONVNEXT), *test_classification.words(pictures, **few)],
            "embed": [str(test_embedding.EYES), *test_embedding.words(crops, **few)],
            "segment3d": [str(test_segmentation_3d.TOM500), *test_segmentation_3d.words(bodies, **few)],
            "reid": [str(test_reid.REID), *test_reid.words(sets, **few)],
            "segment2d": [str(test_segmentation_2d.SEGMENT), *test_segmentation_2d.words(streets, **few)],
            "folded": [str(TOY), "--plugin", "toy", *WORDS, *FOLDED],
        }[kind]

    def one(kind: str) -> Job:
        if kind not in made:
            home = tmp_path_factory.mktemp(kind)
            made[kind] = job(words(kind, home), home / "whole", database)
        return made[kind]

    return one


def test_every_kind_of_recipe_is_killed_at_a_random_moment_and_resumed(kinds, trials, tmp_path, database):
    phases = list(PHASES)
    for seed in trials(3, 49):
        # From the last: the first four kinds are killed in the few series below.
        rng, kind = random.Random(f"kinds {seed}"), KINDS[-1 - seed % len(KINDS)]
        print(kind)
        killed_once(kinds(kind), phases[seed // len(KINDS) % len(phases)], rng, tmp_path / str(seed), database)


def faults(job: Job, rng: random.Random) -> list[Fault]:
    """What one process of a long series has to bear: a full disk, a store that refuses, a signal, a kill."""
    plan: list[Fault] = []
    if rng.random() < 0.4:
        call = rng.randint(1, job.moments["saving"])
        full = {"at": ["os.write", "os.open", "os.mkdir"], "thread": "trainkit-checkpoint", "do": FULL}
        plan.append({**full, "call": call, "until": call + rng.randint(0, 6)})
    if rng.random() < 0.4:
        call = rng.randint(1, 3)
        away = {"at": "mlflow.tracking.MlflowClient.log_batch", "do": "OSError 111"}
        plan.append({**away, "call": call, "until": call + rng.randint(0, 2)})
    phase = rng.choice(list(PHASES))
    end = {**PHASES[phase], "call": rng.randint(1, max(1, job.moments[phase]))}
    return [*plan, {**end, "do": rng.choice(["kill", "kill", "kill", "signal 15"])}]


def test_any_series_of_faults_over_every_kind_of_recipe_changes_nothing(kinds, trials, tmp_path, database):
    for seed in trials(4, 35):
        rng, one = random.Random(f"series {seed}"), kinds(KINDS[seed % len(KINDS)])
        plans = (faults(one, rng) for _ in range(rng.randint(2, 6)))
        killed_often(one, rng, tmp_path / str(seed), database, plans)


def test_killed_every_15_seconds_a_run_of_minutes_gets_to_its_end(trials, tmp_path, database):
    """Its updates wait, so that 20 seconds of them cost a second of the processor."""
    slow = ["task.slow_rank=0", "train.length=180 epochs", "checkpoints={every: null}", "log.every=100 steps"]
    words = [str(TOY), "--plugin", "toy", *slow, "evaluations={val: {every: 50 epochs}}"]
    whole = None
    for seed in trials(1, 5):
        whole = whole or job(words, tmp_path / "whole", database)
        rng, lives, began = random.Random(f"15 s {seed}"), 0, time.monotonic()
        with fresh(tmp_path / str(seed), database):
            while not ended():
                lives += 1
                assert lives <= 40
                with start(1, *words, "--resume-or-start") as process:
                    killed = time.monotonic() + min(45.0, rng.expovariate(1 / 15))
                    while time.monotonic() < killed and psutil.pid_exists(process.pids[0]):
                        with contextlib.suppress(psutil.Error):
                            if psutil.Process(process.pids[0]).status() == psutil.STATUS_ZOMBIE:
                                break
                        time.sleep(0.05)
                    process.kill()
                    process.wait()
            print(f"{lives} lives, {time.monotonic() - began:.0f} s")
            go_on(whole)
            expect_whole(whole)


# ---------------------------------------------------------------------------------------------- orders in any order


class Orders(RuleBasedStateMachine):
    """One run of the toy recipe, and whatever may happen to it; at the end of each sequence it is finished."""

    job: Job
    home: Path
    database: Path
    begun = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).begun += 1
        self._fresh = contextlib.ExitStack()
        self._fresh.enter_context(fresh(self.home / f"run{type(self).begun}", self.database))
        self.had_checkpoint = False

    @property
    def folder(self) -> RunFolder | None:
        return trainings()[-1] if trainings() else None

    @initialize(updates=st.integers(1, 6))
    def begin(self, updates: int) -> None:
        self.train(updates)

    def train(self, updates: int, *more: Fault) -> None:
        if not ended():
            stop = {"at": "trainkit.training.run_logger.RunLogger.progress", "call": updates, "do": "signal 15"}
            assert ran(self.job.words, [stop, *more]) in (0, 143)

    @precondition(lambda self: not ended())
    @rule(updates=st.integers(1, 6))
    def train_on(self, updates: int) -> None:
        self.train(updates)

    @precondition(lambda self: not ended())
    @rule(phase=st.sampled_from(sorted(PHASES)), share=st.floats(0.01, 1.0), after=st.booleans())
    def kill(self, phase: str, share: float, after: bool) -> None:
        call = max(1, int(share * self.job.moments[phase]))
        ran(self.job.words, [{**PHASES[phase], "call": call, "do": "kill", "after": after}])

    @precondition(lambda self: not ended())
    @rule(updates=st.integers(2, 6), call=st.integers(1, 60), many=st.integers(1, 20))
    def fill_the_disk(self, updates: int, call: int, many: int) -> None:
        full = {"at": [name for name in SYSTEM if name not in ("os.unlink", "os.rmdir")], "do": FULL}
        full |= {"thread": "trainkit-checkpoint", "call": call, "until": call + many}
        stop = {"at": "trainkit.training.run_logger.RunLogger.progress", "call": updates, "do": "signal 15"}
        ran(self.job.words, [full, stop])

    @precondition(lambda self: len(self.whole()) > 1 and not ended())
    @rule(which=st.integers(0, 9), at=st.floats(0, 0.999), how=st.sampled_from(["flip", "cut", "remove", "empty"]))
    def damage_the_newest(self, which: int, at: float, how: str) -> None:
        files = sorted(self.whole()[-1].iterdir())
        file = files[which % len(files)]
        content = bytearray(file.read_bytes())
        place = int(at * len(content))
        file.unlink()  # what waits to be sent may be another name of this file
        if how == "remove":
            return
        if how == "flip" and content:
            content[place] ^= 1 << which % 8
            file.write_bytes(content)
        else:
            file.write_bytes(b"" if how == "empty" else content[:place])

    @precondition(lambda self: self.newest_is_whole() and not ended())
    @rule()
    def prune(self) -> None:
        """As behind a commit, which has read back what it wrote."""
        storage.prune(self.folder.checkpoints, 1)

    @precondition(lambda self: self.whole() and not ended())
    @rule(tail=st.binary(max_size=40), share=st.floats(0, 1))
    def lose_the_unsynced_end_of_the_journal(self, tail: bytes, share: float) -> None:
        """What a power cut may take: nothing before the newest checkpoint or what was sent, which wait for it."""
        state = json.loads((self.whole()[-1] / storage.STATE).read_text())
        size = self.folder.journal.stat().st_size
        kept = max(state["journal"], sent(self.folder).position)
        cut = min(size, kept + int(share * max(0, size - kept)))
        with open(self.folder.journal, "r+b") as file:
            file.truncate(cut)
            file.seek(cut)
            file.write(tail.replace(b"\n", b""))

    @precondition(lambda self: self.whole())
    @rule()
    def evaluate(self) -> None:
        with start(1, *self.job.words, "--score", self.folder.name) as process:
            (code,) = process.wait(600)
            assert code in (0, 2) and "Traceback" not in process.stderr, process.stderr

    def whole(self) -> list[Path]:
        """Checkpoints that verify, oldest first."""
        if self.folder is None:
            return []
        found = sorted(path for path in self.folder.checkpoints.glob("step-*") if not verification.verify(path))
        return found

    def newest_is_whole(self) -> bool:
        """Whether the checkpoint that was written last verifies."""
        return bool(self.whole()) and self.whole()[-1] == max(self.folder.checkpoints.glob("step-*"))

    @invariant()
    def never_without_a_checkpoint(self) -> None:
        self.had_checkpoint = self.had_checkpoint or bool(self.whole())
        assert not self.had_checkpoint or self.whole()

    @invariant()
    def finished_means_finished(self) -> None:
        if ended():
            newest, _ = storage.newest_valid(self.folder.checkpoints)
            assert newest is not None and storage.read(newest).step == 12

    def teardown(self) -> None:
        try:
            go_on(self.job)
            expect_whole(self.job)
        finally:
            self._fresh.close()


def test_orders_and_faults_in_any_sequence(trials, tmp_path, database):
    whole = job([str(TOY), "--plugin", "toy", *WORDS], tmp_path / "whole", database)
    for seed in trials(1, 16):

        @hypothesis.seed(seed)
        class Sequence(Orders):
            job, home = whole, tmp_path / str(seed)

        Sequence.database = database
        settings = hypothesis.settings(
            max_examples=5, stateful_step_count=8, deadline=None, database=None, derandomize=False,
            suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        run_state_machine_as_test(Sequence, settings=settings)


# ----------------------------------------------------------------------------------------------- nothing piles up


def in_shared_memory(pids: set[int]) -> list[str]:
    """Names that processes have left in /dev/shm; what has no name any more counts as an open file."""
    return [name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids)]


def held(process: psutil.Process) -> dict[str, float]:
    """What a process and its children hold."""
    family = [process, *process.children(recursive=True)]
    return {
        "MB": sum(one.memory_info().rss for one in family) / 1e6,
        "files": sum(one.num_fds() for one in family),
        "threads": sum(one.num_threads() for one in family),
        "children": len(family) - 1,
        "shared memory": len(in_shared_memory({one.pid for one in family})),
    }


def test_epochs_with_workers_pile_nothing_up(tmp_path, database):
    """A run of 1,200 epochs, its workers kept: files, threads and shared memory of its second half are those of its
    first, and memory grows by less than 3 MB from the second to the fourth quarter."""
    words = [str(TOY), "--plugin", "toy", "loader.workers=2", "train.length=1200 epochs", "log.every=50 steps"]
    words += ["evaluations={val: {every: 100 steps}}", "checkpoints={every: 100 steps, keep_last: 2}"]
    with fresh(tmp_path / "store", database), start(1, *words) as process:
        seen, child, pids = [], psutil.Process(process.pids[0]), set[int]()
        while child.status() != psutil.STATUS_ZOMBIE:
            with contextlib.suppress(psutil.Error, OSError):
                pids |= {child.pid, *(one.pid for one in child.children(recursive=True))}
                seen.append(held(child))
            time.sleep(0.1)
        assert process.wait(3600) == [0], process.stderr
        assert not in_shared_memory(pids)
        seen = [one for one in seen if one["children"] >= 2]  # from when the workers are there
        assert len(seen) > 40
        quarters = [seen[len(seen) * n // 4 : len(seen) * (n + 1) // 4] for n in range(4)]
        second, last = (
            {key: statistics.median(one[key] for one in part) for key in seen[0]} for part in quarters[1::2]
        )
        print(second, last)
        assert last["MB"] - second["MB"] < 3
        assert all(last[key] <= second[key] for key in ("threads", "children", "shared memory"))
        # A connection to the store comes and goes; what every epoch left open would be hundreds.
        assert last["files"] < second["files"] + 5


def test_runs_one_after_the_other_in_one_process_pile_nothing_up(store):
    """Ten runs to warm up, then forty: no more files, threads and children, less than 0.5 MB of memory a run."""
    me = psutil.Process()
    words = ("loader.workers=1", "train.length=1 epochs", "evaluations={}", "best=null")
    for _ in range(10):
        assert run(*words).code == 0
    before = held(me)
    for _ in range(40):
        assert run(*words).code == 0
    after = held(me)
    print(before, after)
    assert after["MB"] - before["MB"] < 20
    assert all(after[key] <= before[key] for key in ("files", "threads", "children"))
