"""Names and words for runs: short names, beginnings, `last`, `best`, and what is said where several are meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from runs import PLUGIN, TOY

import trainkit
from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.inference import evaluate_run
from trainkit.tracking import run_names
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.training import dependencies


@pytest.fixture
def store():
    return Store.locate()


def made(store, recipe: str, status: str, number: int, score: float | None = None, **more) -> RunFolder:
    """A run that is over, with a score where one is given; a later one has a higher number."""
    folder = store.new_run(recipe, more.pop("seed", 0), f"{number:04x}")
    more.setdefault("key", f"key {number}" if status == "FINISHED" else None)
    folder.update(status=status, started=1.7e9 + 60 * number, last_step=3, run_id=f"id{number}", **more)
    if more.get("evaluates") is None:
        (folder.path / "meta.json").write_text("{}")
    folder.recipe.write_text("name: x\nbest: {metric: val/top1}\n")
    value = {} if score is None else {"best/val/top1": score}
    folder.journal.write_text(json.dumps({"step": 3, "t": 1, "m": value}) + "\n" if value else "")
    folder.release()
    return folder


def test_a_short_name_is_the_last_finished_run_of_that_name_and_to_resume_the_last_unfinished_one(store):
    first = made(store, "faces", "FINISHED", 1)
    second = made(store, "faces", "FINISHED", 2, seed=1)
    killed = made(store, "faces", "KILLED", 3)
    other = made(store, "faces_wide", "FINISHED", 4)
    assert store.find("faces") == second and store.find("faces-s0") == first and store.find("faces-s1") == second
    assert store.find("faces_wide") == store.find("faces_w") == other
    assert store.find("faces", unfinished=True) == store.find("faces-s0", unfinished=True) == killed
    killed.claim()
    try:  # it is being trained: nothing is left to be continued
        killed.update(status="RUNNING")
        assert store.find("faces-s1", unfinished=True) == second
    finally:
        killed.release()
    assert store.find(first.name, unfinished=True) == first, "a whole name is that run"


def test_an_ambiguous_word_lists_the_newest_candidates_with_their_time(store, monkeypatch):
    runs = [made(store, "faces", "KILLED", number, number / 10) for number in range(1, 8)]
    with pytest.raises(UserError) as caught:
        store.find("faces")
    head, *lines = str(caught.value).splitlines()
    assert head == "run 'faces': 7 runs begin so, none of them finished; name one of them, the newest first:"
    assert [line.split()[0] for line in lines] == [*(run.name for run in runs[:1:-1]), "and"]
    assert lines[-1] == "  and 2 older ones"
    assert lines[0].split()[1] == "killed" and "2023-11-" in lines[0]


def test_last_is_the_newest_training_and_last_finished_the_newest_that_finished(store):
    for word in ("last", "last finished", "last-finished", "best"):
        with pytest.raises(UserError, match=r"no run in .* has"):
            store.find(word)
    done = made(store, "faces", "FINISHED", 1)
    killed = made(store, "eyes", "KILLED", 2)
    made(store, "evaluate-eyes", "FINISHED", 3, evaluates=killed.name, key=None)
    unbegun = made(store, "eyes", "FAILED", 4)
    unbegun.update(last_step=0)
    above = store.new_run("eyes-folds", 0, "ffff")
    above.update(started=1.7e9 + 999, status="KILLED", varies=["data.fold"])
    (above.path / "members.json").write_text("{}")
    above.release()
    assert store.find("last") == killed and store.find("last finished") == store.find("last-finished") == done
    assert store.find("last", unfinished=True) == above, "which goes on with those beneath it"
    literal = made(store, "last", "FINISHED", 5)
    newer = made(store, "eyes", "KILLED", 6)
    assert store.find("last") == newer and store.find("last-s0") == literal, "words come before names"


def test_best_of_a_recipe_is_of_its_runs_alone(store, monkeypatch):
    from types import SimpleNamespace

    from mlflow.store.entities import PagedList

    runs = [made(store, recipe, "FINISHED", number, experiment="both")
            for number, recipe in enumerate(("eyes", "faces", "eyes", "faces"))]  # fmt: skip
    known = [
        (0.95, "gone", "eyes"),
        (0.9, "id1", "faces"),
        (0.8, "id3", "faces"),
        (0.5, "id0", "eyes"),
        (0.4, "id2", "eyes"),
    ]

    def search_runs(experiments, condition, order_by, page_token, **how):
        """MLflow's pages, one run on each; `gone` has no folder here."""
        assert "best.metric" in condition or order_by == ["metrics.`best/val/top1` DESC"]
        found = [one for one in known if f"`trainkit.recipe` = '{one[2]}'" in condition or "recipe" not in condition]
        place = int(page_token or 0)
        page = (
            []
            if "best.metric" in condition
            else [
                SimpleNamespace(
                    info=SimpleNamespace(run_id=name), data=SimpleNamespace(metrics={"best/val/top1": value})
                )
                for value, name, _ in found[place : place + 1]
            ]
        )
        return PagedList(page, str(place + 1) if page and place + 1 < len(found) else None)

    client = SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(
            experiment_id="1", tags={"mlflow.experiment.primaryMetric.name": "val/top1"}
        ),
        search_runs=search_runs,
    )
    monkeypatch.setattr(Store, "client", lambda self: client)
    assert store.find("best") == runs[1] and store.find("best:eyes") == runs[0] and store.find("best:faces") == runs[1]
    with pytest.raises(UserError, match=r"no run of eye in .* has finished; the nearest recipes are eyes"):
        store.find("best:eye")


def test_a_folder_of_the_store_is_its_run(store):
    run = made(store, "faces", "KILLED", 1)
    assert store.find(f"{run.path}/") == store.find(f"{run.name}/") == store.find("id1") == run
    assert run.name.startswith("faces-s0-") and made(store, "faces", "KILLED", 1).name != run.name
    with pytest.raises(UserError, match=rf"not in .*the nearest are .*{run.name}"):
        store.find(run.name.replace("faces", "facse"))


@pytest.mark.parametrize(
    "words",
    ["show {}", "compare {} other", "run my.yaml --plugin toy --resume {}"],
)
def test_every_verb_takes_a_run_where_something_else_has_its_name(store, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(PLUGIN)
    made(store, "other", "FINISHED", 1)
    run = made(store, "flowers", "KILLED" if "--resume" in words else "FINISHED", 2)
    (tmp_path / "my.yaml").write_text(TOY.read_text())
    (tmp_path / "flowers").mkdir()
    for word in ("flowers", run.name, "./flowers", f"{tmp_path}/flowers"):
        result = CliRunner().invoke(main.main, words.format(word).split())
        assert (run.name in result.output) == ("/" not in word), result.output
        assert result.exit_code == 2 or "/" not in word


def test_weights_models_and_checkpoints_are_found_by_the_same_rule(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = made(store, "flowers", "FINISHED", 1)
    assert store.find_or_path("flowers") == run, "nothing else is there"
    (tmp_path / "flowers").mkdir()
    assert store.find_or_path("flowers") == store.find_or_path(str(run.path)) == store.find("flowers") == run
    for path in ("./flowers", "flowers/", str(tmp_path / "flowers")):
        assert store.find_or_path(path) == Path(path)
    (tmp_path / "trees").write_text("x")
    assert store.find_or_path("trees") == Path("trees"), "no run has the name"
    for find in (lambda w: dependencies.find(w, store, "x"), trainkit.load, lambda w: evaluate_run.find(w, store)):
        with pytest.raises(UserError, match=run.name):
            find("flowers")
        with pytest.raises(UserError) as caught:
            find("./flowers")
        assert run.name not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "r"),
        (("seed=3", "log.experiment=x"), "r"),
        (("train.length=6 epochs", "optim.lr=6e-3"), "lr=6e-3 length=6 epochs · r"),
        (("optim.lr=1", "optim.lr=2"), "lr=2 · r"),
        (("a.lr=1", "b.lr=2"), "b.lr=2 a.lr=1 · r"),
        ((f"b={'x' * 40}", "c=1", "d=2", f"a={'y' * 20}"), f"a={'y' * 20} d=2 c=1 +1 · r"),
        ((f"a={'x' * 60}",), f"a={'x' * 45}… · r"),
    ],
)
def test_the_name_in_mlflow_begins_with_what_was_changed(overrides, expected):
    assert run_names.title("r", overrides) == expected
