"""The gate to the registry: who takes an alias, who does not, and what is written down of it."""

from __future__ import annotations

import json
import math
import socket
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from mlflow.artifacts import download_artifacts
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from runs import PLUGIN, ROOT, TOY, own_store, run

from trainkit.analysis import promote
from trainkit.analysis.compare_report import VERDICTS
from trainkit.analysis.promote import Check
from trainkit.cli import main
from trainkit.config import loader
from trainkit.config.schema import Promote
from trainkit.diagnostics import preflight, stepping_child
from trainkit.errors import UserError
from trainkit.tracking import journal
from trainkit.tracking.run_folder import MEMBERS, RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.ui import running
from trainkit.training.best import best_weights

EASY = ("data.noise=0.5", "train.length=8 epochs", "log.every=50 steps", "evaluations.val.every=16 steps")
GUESSING = 1 / 4 + 3 * math.sqrt(0.25 / 37)
"""What guessing stays below on 37 images of four classes: three standard deviations above a quarter."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, database):
    """A store with runs: one that learned, one that did not, and one that was scored on other images."""
    with own_store(tmp_path_factory.mktemp("registry"), database):
        runs = {
            "good": run(*EASY).folder,
            "weak": run(*EASY, "optim.lr=1e-9").folder,
            "other": run(*EASY, "data.test=41").folder,
        }
        return Store.locate(), SimpleNamespace(**runs)


@pytest.fixture
def store(trained, monkeypatch) -> Store:
    monkeypatch.setenv("TRAINKIT_STORE", str(trained[0].home))
    return trained[0]


@pytest.fixture
def runs(trained) -> SimpleNamespace:
    return trained[1]


@pytest.fixture
def compared(monkeypatch):
    """Have two runs compared as a test says: the rows of tiny runs decide little."""

    def settle(verdict: str = "better", same: bool = True) -> list:
        asked, comparable = [], same and verdict != "not comparable"
        score = SimpleNamespace(
            evaluation="best/val", metric="accuracy", values=(0.7, 0.9), draws=2000, units="37 samples",
            verdict=verdict,
            difference=0.2 if comparable else None, low=0.1, high=0.3,
            why="" if comparable else "evaluated on different data",
        )  # fmt: skip
        side = SimpleNamespace(digest=lambda evaluation: (f"{evaluation} abc",))

        def compare(store, runs):
            asked.append([folder.name for folder in runs])
            changes = ["optim.lr  0.1 -> 0.05"]
            found = {"changes": changes, "scores": [score], "same_data": {"val": same}}
            return SimpleNamespace(**found, sides=[side, side])

        module = types.ModuleType("trainkit.analysis.compare")
        module.compare = compare
        monkeypatch.setitem(sys.modules, "trainkit.analysis.compare", module)
        return asked

    return settle


def ask(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main.main, ["promote", *words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def holder(store: Store, name: str) -> str:
    return str(store.client().get_registered_model(name).aliases["champion"])


def versions(store: Store, name: str) -> list[str]:
    return sorted(str(version.version) for version in store.client().search_model_versions(f"name = '{name}'"))


def evidence(store: Store, folder: RunFolder, tmp_path: Path) -> dict:
    client, run_id = store.client(), folder.info().run_id
    path = client.get_run(run_id).data.tags["trainkit.promotion.evidence"]
    return json.loads(Path(client.download_artifacts(run_id, path, str(tmp_path))).read_text())


# The first of a name


def test_the_first_of_a_name_is_registered_with_its_evidence(store, runs, tmp_path, monkeypatch):
    decision = promote.promote(store, runs.good, Promote(name="first"))
    assert (decision.refused, decision.version, decision.held) == (False, "1", "")
    client, run_id = store.client(), runs.good.info().run_id
    version = client.get_model_version_by_alias("first", "champion")
    assert (str(version.version), version.run_id) == ("1", run_id)

    # The alias is the run's best weights, for recipes and for MLflow.
    weights = best_weights(runs.good.path)
    assert store.model_file("models:/first@champion").read_bytes() == weights.read_bytes()
    assert store.model_file("models:/first/1") == store.model_file("models:/first@champion")
    step = int(weights.parent.name.removeprefix("step-"))
    model_id = json.loads((runs.good.path / "models.json").read_text())[f"best@{step}"]
    model = client.get_logged_model(model_id)
    assert client.get_model_version_download_uri("first", "1") == model.artifact_location
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    (fetched,) = Path(download_artifacts("models:/first@champion", dst_path=str(tmp_path))).rglob("*.safetensors")
    assert fetched.read_bytes() == weights.read_bytes()
    assert {"name": "first", "version": "1"} in [
        {key: str(value) for key, value in entry.items()} for entry in json.loads(model.tags["mlflow.modelVersions"])
    ]

    history = journal.read(runs.good.journal).metrics["val/accuracy"]
    accuracy = next(point.value for point in history if point.step == step)
    assert version.tags["trainkit.run"] == runs.good.name and version.tags["trainkit.weights"] == f"best@{step}"
    assert float(version.tags["trainkit.score.val/accuracy"]) == accuracy > GUESSING
    said = f"val/accuracy {accuracy:.4f}, upper bound of chance level {GUESSING:.4f} (99.9 %)"
    assert decision.checks == (Check("chance", True, said),)
    assert version.description.startswith(decision.headline) and said in version.description

    written = evidence(store, runs.good, tmp_path)
    assert (written["decision"], written["model"], written["alias"]) == ("promoted", "first", "champion")
    assert (written["version"], written["model_id"], written["metric"]) == ("1", model_id, "val/accuracy")
    assert written["checks"] == [{"name": "chance", "passed": True, "why": said}]
    tags = client.get_run(run_id).data.tags
    assert tags["trainkit.promotion"] == decision.headline == version.tags["trainkit.promotion.decision"]
    assert tags["trainkit.promotion.evidence"] == version.tags["trainkit.promotion.evidence"]


def test_what_guesses_is_refused_and_not_registered(store, runs, tmp_path):
    said = ask(runs.weak.name, "--name", "weak", "--as", "best-one", code=1)
    assert said.startswith(f"weak@best-one: run {runs.weak.name} is refused; it is not set\n! chance  val/accuracy 0.")
    with pytest.raises(MlflowException, match="not found"):
        store.client().get_registered_model("weak")
    written = evidence(store, runs.weak, tmp_path)
    assert (written["decision"], written["version"]) == ("refused", "")
    assert "is refused" in store.client().get_run(runs.weak.info().run_id).data.tags["trainkit.promotion"]
    with pytest.raises(UserError, match="models:/NAME@ALIAS"):
        store.model_file("models:/weak@best-one")


def test_bounds_of_guessing_are_in_the_journal(runs):
    events = [event.data for event in journal.read(runs.good.journal).events if event.name == "chance"]
    assert events and all(bounds == {
        "val/accuracy": pytest.approx(GUESSING), "val/ema/accuracy": pytest.approx(GUESSING)
    } for bounds in events)  # fmt: skip


@pytest.mark.parametrize(
    ("value", "lower", "chance", "passed", "why"),
    [
        (0.8, False, 0.6, True, "lfw/auc 0.8000, upper bound of chance level 0.6000"),
        (0.6, False, 0.6, False, "lfw/auc 0.6000, upper bound of chance level 0.6000"),
        (0.1, True, 0.4, True, "0.1000, lower bound of chance level 0.4000"),
        (0.5, True, 0.4, False, "0.5000, lower bound of chance level 0.4000"),
        (0.9, False, None, None, "is unknown"),
        (math.nan, False, 0.6, False, "lfw/auc is nan"),
    ],
)
def test_the_first_must_be_better_than_guessing_where_that_is_known(value, lower, chance, passed, why):
    one = promote._Candidate(RunFolder(Path("x")), "", "lfw/auc", 7, "", value, lower, chance)
    check = promote._above_chance_level(one)
    assert check.passed is passed and why in check.why


# Against the one that has it


@pytest.mark.parametrize(
    ("verdict", "same", "moves"),
    [
        ("better", True, True),
        ("worse", True, False),
        ("not decided", True, False),
        ("not comparable", True, False),
        ("better", False, False),
    ],
)
def test_the_alias_moves_only_to_what_is_better_beyond_chance_on_the_same_data(
    store, runs, compared, tmp_path, verdict, same, moves
):
    name = f"gate {verdict} {same}"
    promote.promote(store, runs.other, Promote(name=name))
    asked, comparable = compared(verdict, same), same and verdict != "not comparable"
    decision = promote.promote(store, runs.good, Promote(name=name))
    assert asked == [[runs.other.name, runs.good.name]], "before and after, in this order"
    assert decision.refused is not moves and decision.held == f"version 1, of run {runs.other.name}"
    assert (holder(store, name), versions(store, name)) == (("2", ["1", "2"]) if moves else ("1", ["1"]))
    written = evidence(store, runs.good, tmp_path)
    assert written["holder"] == {"run": runs.other.name, "version": "1"}
    assert written["changes"] == ["optim.lr  0.1 -> 0.05"]
    assert written["digests"] == [["val abc"], ["val abc"]]
    assert written["score"] == {
        "values": [0.7, 0.9], "difference": 0.2 if comparable else None, "low": 0.1, "high": 0.3, "draws": 2000,
        "units": "37 samples", "verdict": verdict,
    }  # fmt: skip
    checks = {check.name: check for check in decision.checks}
    assert checks["data"].passed is comparable
    if comparable:
        ends = "95 % CI +0.1000 to +0.3000; paired bootstrap, n = 2,000 over 37 samples"
        why = f"val/accuracy 0.7000 -> 0.9000, +0.2000 ({ends}): {VERDICTS.get(verdict, verdict)}"
        assert checks["score"] == Check("score", moves, why)
    else:
        assert checks["data"].why == "val: not comparable: evaluated on different data"
        assert list(checks) == ["data"], "scores of different data are not put beside each other"


def test_scores_of_other_weights_than_those_that_have_it_decide_nothing(store, runs, compared, monkeypatch):
    promote.promote(store, runs.other, Promote(name="average"))
    compared()
    real, other = promote.diff.read, runs.other.recipe
    for best, words in (("val/ema/accuracy", "those with the best val/ema/accuracy"), (None, "its last")):
        change = {"best": best and {"metric": best}}
        monkeypatch.setattr(promote.diff, "read", lambda path, c=change: real(path) | (c if path == other else {}))
        decision = promote.promote(store, runs.good, Promote(name="average"))
        why = f"the alias is on other weights of run {runs.other.name}: {words}"
        assert decision.refused and decision.checks == (Check("score", False, why),)


def test_the_rows_of_runs_decide(store, runs, tmp_path):
    """As it is meant: nothing replaced."""
    client = store.client()
    client.create_registered_model("rows")
    client.create_model_version("rows", "file:///nowhere", run_id=runs.weak.info().run_id)
    client.set_registered_model_alias("rows", "champion", "1")
    wish = Promote(name="rows")
    better = promote.promote(store, runs.good, wish)
    assert not better.refused and holder(store, "rows") == "2", better.lines()
    worse = promote.promote(store, runs.weak, wish)
    assert {check.name: check.passed for check in worse.checks} == {"data": True, "score": False}
    second = run(*EASY, "seed=1").folder
    twin = promote.promote(store, second, wish)
    assert "inconclusive" in twin.lines()[2], twin.lines()
    other = promote.promote(store, runs.other, wish)
    assert [(check.name, check.passed) for check in other.checks] == [("data", False)]
    assert (holder(store, "rows"), versions(store, "rows")) == ("2", ["1", "2"])


# Again, cut short, and at the same time


def test_who_has_it_already_changes_nothing(store, runs):
    promote.promote(store, runs.good, Promote(name="again"))
    client, run_id = store.client(), runs.good.info().run_id
    before = [file.path for file in client.list_artifacts(run_id, "promotion")]
    assert "again@champion is already version 1, of this run" in ask(runs.good.name, "--name", "again")
    assert versions(store, "again") == ["1"]
    assert [file.path for file in client.list_artifacts(run_id, "promotion")] == before


def test_another_alias_of_the_same_model_takes_the_version_that_is_there(store, runs):
    for alias in ("champion", "challenger"):
        promote.promote(store, runs.good, Promote(name="two", alias=alias))
    assert versions(store, "two") == ["1"]
    assert {key: str(v) for key, v in store.client().get_registered_model("two").aliases.items()} == {
        "champion": "1", "challenger": "1",
    }  # fmt: skip


def test_a_promotion_that_was_cut_short_is_finished_by_the_next(store, runs, monkeypatch):
    def fail(*given):
        raise MlflowException("the wire was cut")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_registered_model_alias", fail)
        assert "refuses: the wire was cut" in ask(runs.good.name, "--name", "cut", code=2)
    assert not store.client().get_registered_model("cut").aliases
    assert not promote.promote(store, runs.good, Promote(name="cut")).refused
    assert (holder(store, "cut"), versions(store, "cut")) == ("1", ["1"])


def test_an_alias_that_moved_meanwhile_is_left_there(store, runs, compared, monkeypatch):
    promote.promote(store, runs.other, Promote(name="race"))
    compared()
    real = promote._write_down

    def meanwhile(client, *given):
        client.create_model_version("race", "file:///nowhere")
        client.set_registered_model_alias("race", "champion", "3")
        return real(client, *given)

    monkeypatch.setattr(promote, "_write_down", meanwhile)
    with pytest.raises(UserError, match="race@champion: moved during the decision; run the command again"):
        promote.promote(store, runs.good, Promote(name="race"))
    assert holder(store, "race") == "3"


# Mistakes


def test_mistakes_are_one_message(store, runs):
    assert "alias is 'v1'" in ask(runs.good.name, "--as", "v1", code=2)
    assert "alias is 'Latest'" in ask(runs.good.name, "--as", "Latest", code=2)
    assert "name is 'a/b'" in ask(runs.good.name, "--name", "a/b", code=2)
    assert "not in" in ask("toy-s9", code=2)


def test_a_run_that_cannot_be_promoted_says_why(store):
    folder = store.new_run("unfinished", 0, "aaaa")
    folder.recipe.write_text("best: {metric: val/accuracy}\nevaluations: {val: {}}\n")
    assert "is RUNNING; expected a finished run" in ask(folder.name, code=2)
    folder.update(status="FINISHED", run_id="0" * 32)
    folder.journal.write_text('{"t":1,"step":5,"m":{"val/accuracy":0.9,"val/top":1.0}}\n')
    assert "has no model; expected a run that kept its best weights" in ask(folder.name, code=2)
    (folder.path / MEMBERS).write_text('{"seed 0": "a", "seed 1": "b"}')
    assert "is the parent run of 2 runs; expected one of its child runs" in ask(folder.name, code=2)
    (folder.path / MEMBERS).unlink()
    (folder.path / "models.json").write_text('{"last@3": "m-1", "best@3": "m-2", "best@4": "m-3", "last@9": "m-4"}')
    assert promote._model(folder) == (4, "m-3")
    assert "val/accuracy was not measured at step 4" in ask(folder.name, code=2)
    folder.recipe.write_text("evaluations: {val: {}}\n")
    assert "has no best.metric, which chooses the weights" in ask(folder.name, code=2)
    folder.release()


def test_an_alias_of_a_model_that_is_of_no_run_here_is_not_fought_over(store, runs):
    client = store.client()
    client.create_registered_model("orphan")
    client.create_model_version("orphan", "file:///nowhere")
    client.set_registered_model_alias("orphan", "champion", "1")
    said = ask(runs.good.name, "--name", "orphan", code=2)
    assert "orphan@champion: version 1 has no run in" in said and versions(store, "orphan") == ["1"]


# In a recipe


def test_the_words_of_the_command_line_stand_before_those_of_the_recipe(tmp_path):
    folder = RunFolder(tmp_path)
    folder.recipe.write_text("promote: {name: faces, alias: edge, later_key: 1}\n")
    assert promote.asked(folder, {}) == Promote(name="faces", alias="edge")
    words = {"name": None, "alias": "cloud"}
    assert promote.asked(folder, words) == Promote(name="faces", alias="cloud")
    folder.recipe.write_text("promote: null\n")
    assert promote.asked(folder, {}) == Promote()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["promote={alias: v2}"], "alias is 'v2'"),
        (["promote={name: 'a@b'}"], "name is 'a@b'"),
        (["promote={}", "best=null"], "promote has no deciding metric"),
    ],
)
def test_mistakes_in_a_recipe_are_found_before_anything_begins(monkeypatch, words, message):
    monkeypatch.syspath_prepend(PLUGIN)
    with pytest.raises(UserError, match=message):
        loader.load(TOY, words, ("toy",))


def test_promotion_is_no_part_of_the_experiment_and_never_the_default(monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    plain, asking = (loader.load(TOY, words, ("toy",)) for words in ([], ["promote={}"]))
    assert plain.promote is None and asking.promote == Promote()
    assert loader.digest(plain) == loader.digest(asking)
    trials = [preflight._shortened(asking, None), stepping_child.shortened(asking)]
    assert all(trial.promote is None for trial in trials), "they have no score to decide by"
    recipes = list((ROOT / "tests" / "golden").glob("*.yaml"))
    assert recipes and all("\npromote: null\n" in recipe.read_text() for recipe in recipes)


def test_a_run_promotes_itself_at_its_end(store, tmp_path, capsys):
    ran = run(*EASY, "promote={name: ends, alias: edge}")
    said = capsys.readouterr().out
    assert ran.code == 0 and f"ends@edge is now version 1, of run {ran.folder.name}, best of step" in said
    assert store.client().get_model_version_by_alias("ends", "edge").run_id == ran.folder.info().run_id
    assert evidence(store, ran.folder, tmp_path)["decision"] == "promoted"


def test_a_run_that_is_refused_is_finished_all_the_same(store, capsys):
    ran = run(*EASY, "optim.lr=1e-9", "promote={name: ends_weak}")
    assert f"ends_weak@champion: run {ran.folder.name} is refused" in capsys.readouterr().out
    assert ran.code == 0 and ran.folder.info().status == "FINISHED"


@pytest.mark.parametrize("error", [UserError("the store", "is away"), RuntimeError("is away")])
def test_a_promotion_that_fails_at_the_end_of_a_run_is_said_and_not_raised(monkeypatch, error):
    def fail(*given):
        raise error

    monkeypatch.setattr(promote, "promote", fail)
    said = promote.at_end(None, None, Promote())
    assert said.startswith("not promoted: ") and said.endswith("is away")


@pytest.mark.slow
def test_a_server_takes_it_as_the_database_does(store, runs, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running(store, port) as (_, at):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", at)
        served = Store.locate()
        for _ in range(2):
            decision = promote.promote(served, runs.good, Promote(name="served"))
            assert (decision.refused, decision.version) == (False, "1")
        weights = best_weights(runs.good.path).read_bytes()
        assert served.model_file("models:/served@champion").read_bytes() == weights
        model = served.client().get_logged_model(promote._model(runs.good)[2])
        named = [entry["name"] for entry in json.loads(model.tags["mlflow.modelVersions"])]
        assert named.count("served") == 1
