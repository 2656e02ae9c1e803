"""Damaged checkpoints, end to end: none is used by whoever reads one, and a run goes on from the one before."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runs import ROOT, Ran, all_same, environment, left_alone, newest, run, stop_after

from trainkit.checkpoint import safe_load, state_dict, storage
from trainkit.config.run_request import RunRequest, load
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights
from trainkit.training.optimizer import Average

WORDS = ("checkpoints={every: 3 steps, keep_last: 50}", "log={every: 2 steps, system_every: null}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database) -> Iterator[Ran]:
    """The toy recipe, run to its end."""
    with left_alone(tmp_path_factory.mktemp("whole"), database, *WORDS) as ran:
        yield ran


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, database) -> Path:
    """A store with a run of the same that was stopped at step 8."""
    home = tmp_path_factory.mktemp("interrupted")
    shutil.copy(database, home / "mlflow.db")
    with environment(TRAINKIT_STORE=home):
        assert run(*WORDS, stopping=stop_after(8)).steps == [3, 6, 8]
    return home


@pytest.fixture
def again(interrupted, tmp_path, monkeypatch):
    """A copy of that store each time it is called: the folder of the run in it."""
    made = iter(range(10**9))

    def copy() -> Path:
        home = shutil.copytree(interrupted, tmp_path / str(next(made)))
        monkeypatch.setenv("TRAINKIT_STORE", str(home))
        return newest().path

    return copy


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def cut(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def tags(ran: Ran) -> dict[str, str]:
    info = ran.folder.info()
    return Store.locate().client().get_run(info.run_id).data.tags


@pytest.mark.parametrize(("id", "damage"), [("C1", cut), ("C2", flip)])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(trials, again, whole, capsys, id, damage):
    """To the same bits and the same history, having said which one it left aside."""
    for seed in trials(1, 60):
        rng, path = random.Random(seed), again() / "checkpoints" / "step-000000008"
        file = rng.choice(sorted(path.iterdir()))
        damage(file, rng)
        capsys.readouterr()
        ran = run(*WORDS, resume="")
        assert f"left aside: {path}" in capsys.readouterr().out
        assert all_same(ran, whole) and ran.repeatable == whole.repeatable and not ran.events("elsewhere")
        (event,) = ran.events("checkpoint_refused")
        assert str(path) in event.data["error"] == tags(ran)["trainkit.checkpoint_refused"]
        shutil.rmtree(Store.locate().home)


def test_a_run_none_of_whose_checkpoints_is_whole_is_refused_and_they_stay(again):
    folder = again()
    for path in folder.glob("checkpoints/step-*"):
        flip(path / "model.safetensors", random.Random(0))
    with pytest.raises(UserError, match=r"all of its checkpoints are damaged: .*model\.safetensors: content has"):
        run(*WORDS, resume="")
    assert len(list(folder.glob("checkpoints/step-*"))) == 3


# ------------------------------------------------------------------------------------------- whoever reads one (I3)


def best_of(folder: Path) -> Path:
    """The checkpoint of a run's best evaluation, which is not its newest."""
    newest_one, _ = storage.newest_valid(folder / "checkpoints")
    step = storage.state_of(newest_one)["best"][0]["step"]
    assert step < 8, "the tests below want a best that is not the last"
    return folder / "checkpoints" / f"step-{step:09d}"


def test_damaged_weights_of_the_best_checkpoint_are_not_handed_out(again, caplog):
    folder = again()
    best = best_of(folder)
    assert best_weights(folder) == best / "model.safetensors" and not caplog.records
    flip(best / "model.safetensors", random.Random(0))
    assert best_weights(folder) == folder / "checkpoints" / "step-000000008" / "model.safetensors"
    assert f"left aside: {best}/model.safetensors: content has changed" in caplog.text
    assert "model.safetensors of step-000000008 takes its place" in caplog.text


def test_a_best_checkpoint_that_is_gone_is_named(again, caplog):
    folder = again()
    best = best_of(folder)
    shutil.rmtree(best)
    assert best_weights(folder).parent.name == "step-000000008"
    assert f"left aside: {best}: is missing" in caplog.text


def test_where_the_average_was_the_best_the_average_takes_its_place(again, monkeypatch, caplog):
    folder = again()
    newest_one = folder / "checkpoints" / "step-000000008"
    state = {"best": [{"value": 1.0, "step": 6, "weights": "ema"}]}
    monkeypatch.setattr(storage, "state_of", lambda path: state)
    assert best_weights(folder).relative_to(folder) == Path("checkpoints/step-000000006/ema.safetensors")
    cut(folder / "checkpoints/step-000000006/ema.safetensors", random.Random(0))
    assert best_weights(folder) == newest_one / "ema.safetensors" and "ema.safetensors: " in caplog.text


def test_a_run_without_a_whole_checkpoint_hands_out_nothing(again):
    folder = again()
    for path in folder.glob("checkpoints/step-*"):
        (path / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds no checkpoint that is whole: .*state\.json"):
        best_weights(folder)


def test_a_file_in_a_checkpoint_is_read_only_as_it_was_written(again, tmp_path):
    """`weights: .../step-000000006/ema.safetensors`, evaluate, predict and export all read by this one function."""
    path = again() / "checkpoints" / "step-000000006"
    rng = random.Random(0)
    assert (
        safe_load.read_tensors(path / "ema.safetensors").keys()
        == safe_load.read_tensors(path / "model.safetensors").keys()
    )
    for name in ("ema.safetensors", "model.safetensors"):
        kept = (path / name).read_bytes()
        for _ in range(20):
            flip(path / name, rng)
            with pytest.raises(UserError, match=rf"step-000000006/{name}: content has changed"):
                safe_load.read_tensors(path / name)
            (path / name).write_bytes(kept)
    (path / "mine.safetensors").write_bytes(kept)
    with pytest.raises(UserError, match=r"mine\.safetensors: not in the manifest"):
        safe_load.read_tensors(path / "mine.safetensors")
    (path / "MANIFEST.json").unlink()
    with pytest.raises(UserError, match=r"MANIFEST\.json: missing"):
        safe_load.read_tensors(path / "model.safetensors")
    alone = shutil.copy(path / "model.safetensors", tmp_path / "alone.safetensors")
    assert safe_load.read_tensors(alone), "what lies in no checkpoint is nobody's to compare with"


def test_states_are_read_in_one_place_alone():
    """Who opens `state.json` would read what nobody has verified. Tensors: tests/security/test_malicious_files.py."""
    for file in sorted((ROOT / "trainkit").rglob("*.py")):
        found = re.findall(
            r"read\w*\(.*\bSTATE\b.*|\bSTATE\)\.\w*(?:read|open).*|state\.json\"\)\.\w*read.*", file.read_text()
        )
        assert not found or file.name == "verification.py", f"{file} reads a state by {found}"


# ------------------------------------------------------------------------------------- another machine, other parts


def test_going_on_elsewhere_is_said_noted_and_tagged(again, capsys, monkeypatch):
    again()
    monkeypatch.setattr(Runtime, "describe", lambda self, plain=Runtime.describe: {**plain(self), "cpu": "another"})
    monkeypatch.setattr("trainkit.training.state._versions", lambda: {"torch": "9.9", "trainkit": "x", "python": "3"})
    ran = run(*WORDS, resume="")
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed in another environment")
    )
    assert f"torch {torch.__version__} -> 9.9" in line and "cpu " in line and "no longer guaranteed" in line
    assert "trainkit " not in line and len(ran.events("elsewhere")) == 1
    assert tags(ran)["trainkit.elsewhere"].startswith("step 8: ") and ran.code == 0


def test_an_average_that_is_missing_or_of_another_shape_is_a_sentence(again):
    path = again() / "checkpoints" / "step-000000008"
    loaded = storage.read(path)
    average = Average(torch.nn.Linear(2, 2), 0.9)
    with pytest.raises(UserError, match=r"bias is missing, weight is missing"):
        state_dict.load_tensors(average.tensors, {}, "ema.safetensors")
    del loaded.tensors["ema"]
    from trainkit.training.events import EventSchedule
    from trainkit.training.state import TrainState

    recipe = load(RunRequest(Path(__file__).parents[1] / "plugin" / "toy.yaml", (), ("toy",)))
    net = recipe.task.build(recipe.data.open(0).meta, {}, 0).model
    state = TrainState(net, torch.optim.SGD(net.parameters()), None, average, None, EventSchedule({}, None, None), None,
                  loaded.state["identity"])  # fmt: skip
    with pytest.raises(UserError, match="step-000000008: holds no ema"):
        state.load(loaded, 0)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused(again, whole):
    """Whole in itself, at the place of the newest, of the same task with another rate."""
    folder = again()
    other = run(*WORDS, "optim.lr=0.01", "train.length=8 steps")
    shutil.rmtree(folder / "checkpoints" / "step-000000008")
    shutil.copytree(other.folder.checkpoints / "step-000000008", folder / "checkpoints" / "step-000000008")
    with pytest.raises(UserError, match="step-000000008: belongs to another run"):
        run(*WORDS, resume=folder.name)
    shutil.rmtree(folder / "checkpoints" / "step-000000008")
    run(*WORDS, resume=folder.name)
    assert all_same(Ran(0, RunFolder(folder)), whole)


@pytest.mark.slow
def test_folders_of_two_checkpoints_that_were_swapped_are_told_apart(again, whole, capsys):
    folder = again() / "checkpoints"
    os.rename(folder / "step-000000006", folder / "x")
    os.rename(folder / "step-000000008", folder / "step-000000006")
    os.rename(folder / "x", folder / "step-000000008")
    ran = run(*WORDS, resume="")
    said = capsys.readouterr().out
    assert "the folder is named for step 8" in said and "the folder is named for step 6" in said
    assert all_same(ran, whole), "it went on from step 3"
