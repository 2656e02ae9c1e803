"""A split has a seed of its own; a run that is older than the key keeps the split that it was trained on."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from runs import ROOT, Ran, own_store, run, stop_after, stripes

from trainkit.analysis import compare as comparing
from trainkit.cli import main
from trainkit.config import diff, loader, stored_recipes
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.errors import UserError
from trainkit.experiments import recipe_check
from trainkit.experiments.repeats import Seeds
from trainkit.experiments.sweep import Settings
from trainkit.export import export
from trainkit.inference import evaluate_run, predictor, trained_model
from trainkit.tracking import run_lifecycle
from trainkit.tracking.store import Store
from trainkit.training import dependencies

HELD = {
    0: "across/001 across/008 down/001 down/008 slanted/007 slanted/008",
    1: "across/001 across/003 down/002 down/003 slanted/008 slanted/009",
}
"""What was held out before there was the key, by the seed of the run."""
TEXT = """name: mine
task: {{name: classify, net: {{model: test_convnext3, args: {{patch_size: 2}}}}}}
data: {{name: images, train: {0}/set, image_size: 32, group: each, hold_out: 20%, stratify: true}}
optim: {{name: adamw, lr: 1e-3}}
train: {{length: 4 steps, batch_size: 8}}
evaluations: {{held_out: {{every: 2 steps, batch_size: 8}}}}
best: {{metric: held_out/top1}}
checkpoints: {{every: 2 steps}}
log: {{ceilings: "off", figures: null}}
"""


def ids(recipe) -> str:
    held = recipe.data.open(recipe.seed).evaluations["held_out"]
    known = held.packed.ids()
    return " ".join(sorted(known[row].removesuffix(".png") for row in held.rows.tolist()))


def older(ran: Ran) -> Ran:
    """Take the key out of a stored recipe: what is left is what trainkit wrote before."""
    file = ran.folder.recipe
    file.write_text(re.sub(r"\n *split_seed: \d+", "", file.read_text()))
    return ran


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    stripes(folder / "set", 10, 0)
    (folder / "mine.yaml").write_text(TEXT.format(folder))
    return folder / "mine.yaml"


@pytest.fixture(scope="module")
def old(mine, tmp_path_factory, database):
    """A run of seed 1, as it was before there was the key."""
    with own_store(tmp_path_factory.mktemp("old"), database):
        yield older(run("seed=1", "data.split_seed=1", recipe=mine))


@pytest.fixture
def home(old, monkeypatch):
    monkeypatch.setenv("TRAINKIT_STORE", str(old.folder.path.parents[1]))
    return Store.locate()


def test_the_seed_of_the_training_moves_no_split(mine):
    assert [ids(loader.load(mine, [f"seed={seed}"])) for seed in (0, 1, 2)] == [HELD[0]] * 3
    assert ids(loader.load(mine, ["seed=7", "data.split_seed=1"])) == HELD[1]


def test_digests_of_before_stay_where_the_split_does():
    recipe = ROOT / "recipes" / "reid_faces.yaml"
    before = [
        "547e56a0c77f0ddcbbce697cefa7c9c6811efad08ab9589422f08d2ee83b8074",
        "8327289971edc0d5199ece2b36c3722a04c7626b7562b0a92063cfb80a586446",
    ]

    def digest(*words: str) -> str:
        return loader.digest(loader.load(recipe, words))

    assert [digest(), digest("seed=1", "data.split_seed=1")] == before
    resolved = re.sub(r"\n *split_seed: 0", "", loader.dump(loader.load(recipe, ["seed=1"])))
    found = loader.parse(Recipe, resolved, "resolved", ("seed=2",), loader.TABLES)
    assert (found.seed, found.data.split_seed) == (2, 1), "of people as of images, whatever comes after it"
    assert len({*before, digest("seed=1"), digest("data.split_seed=1")}) == 4
    assert digest("seed=1", "data.hold_out=[n1]") == digest("seed=1", "data.split_seed=1", "data.hold_out=[n1]")


def test_an_older_run_keeps_its_split(old, mine, home, tmp_path):
    name, stored = old.folder.name, old.folder.recipe
    assert stored_recipes.split_seed(diff.read(stored)) == 1
    requests = {
        "its own": RunRequest(stored),
        "evaluated with another seed": RunRequest(stored, ("seed=5",)),
        "resumed by name": run_lifecycle.request_of(old.folder, plugins=("toy",)),
        "resumed by recipe and name": RunRequest(mine, ("seed=1",), resume=name),
        "its weights": RunRequest(mine, (f"task.net.weights=run:{name}",)),
        "its checkpoint": RunRequest(mine, (f"task.net.weights={old.folder.checkpoints}/step-000000002",)),
    }
    exported = tmp_path / "exported"
    export.export(name, exported, ("safetensors",))
    requests["its export"] = RunRequest(mine, (f"task.net.weights={exported}",))
    for what, request in requests.items():
        assert ids(load(dependencies.with_their_split(request, home))) == HELD[1], what
    assert loader.digest(loader.load(stored)) == old.folder.info().recipe_hash
    new = tmp_path / "new.yaml"
    assert CliRunner().invoke(main.main, ["cp", name, str(new)]).exit_code == 0
    assert ids(loader.load(new)) == HELD[1]
    assert predictor.Predictor.of_run(old.folder).recipe.data.split_seed == 1
    about = predictor.describe(loader.load(stored), trained_model.read_meta(old.folder), name, "model.safetensors")
    assert loader.parse(Recipe, about["recipe"], "x", (), loader.TABLES).data.split_seed == 1


def test_an_older_run_is_evaluated_on_what_it_held_out(old, mine, home):
    step, score = old.history.series("best/held_out/top1")[0][-1], old.series("best/held_out/top1")[-1]
    for request in (RunRequest(old.folder.recipe), RunRequest(mine), RunRequest(mine, ("seed=3",))):
        assert evaluate_run.evaluate(request, old.folder.name, log=False)["held_out/top1"] == pytest.approx(score), step
    other = RunRequest(mine, ("data.split_seed=0",))
    with pytest.raises(UserError, match=r"data\.split_seed: 0 in mine\.yaml; expected 1, the split of run mine-s1"):
        evaluate_run.evaluate(other, old.folder.name, log=False)
    allowed = RunRequest(mine, ("data.split_seed=0", "data.leakage=allow"))
    assert evaluate_run.evaluate(allowed, old.folder.name, log=False)


def test_weights_of_another_split_are_refused_before_any_work(old, mine, home):
    words = (f"task.net.weights=run:{old.folder.name}", "data.split_seed=0")
    for attempt in (recipe_check.check, recipe_check.open_all, lambda request: run(*request.overrides, recipe=mine)):
        with pytest.raises(UserError, match="these were trained on what it holds out"):
            attempt(RunRequest(mine, words))
    assert "split_seed: 1" in recipe_check.check(RunRequest(mine, words[:1]))


@pytest.mark.parametrize(
    ("trained", "scored", "leaks"),
    [
        ("20%", "20%", ""), ("20%", "10%", ""), ("10%", "20%", "hold_out"), (None, "20%", "hold_out"),
        ("20%", None, ""), (["a", "b"], ["b"], ""), (["b"], ["a", "b"], "hold_out"), ("20%", ["a"], "hold_out"),
        (["a"], "20%", "hold_out"),
    ],
)  # fmt: skip
def test_what_weights_were_trained_on_is_not_held_out(trained, scored, leaks):
    blocks = [{"name": "images", "hold_out": one, "group": "each", "stratify": False} for one in (trained, scored)]
    assert stored_recipes.exposed(*blocks) == leaks
    older = {key: value for key, value in blocks[0].items() if key != "stratify"}
    assert stored_recipes.exposed(older, blocks[1]) == leaks, "a run that is older than a key"
    both = isinstance(trained, str) and isinstance(scored, str)
    assert stored_recipes.exposed(blocks[0] | {"stratify": True}, blocks[1]) == ("stratify" if both else leaks)
    tested = [blocks[0] | {"hold_out_test": "10%"}, blocks[1] | {"hold_out_test": "10%"}]
    assert stored_recipes.exposed(*tested) == leaks
    assert (
        stored_recipes.exposed(tested[0], blocks[1]) == stored_recipes.exposed(blocks[0], tested[1]) == "hold_out_test"
    )
    folds = [{"name": "volumes", "fold": fold, "folds": 5} for fold in (None, 0, 1)]
    assert [stored_recipes.exposed(one, folds[1]) for one in folds] == ["fold", "", "fold"]
    assert [stored_recipes.exposed(one, folds[0]) for one in folds] == [""] * 3
    assert stored_recipes.exposed({"name": "volumes", "fold": 0}, folds[1]) == ""


def test_weights_that_saw_what_is_held_out_are_refused(old, mine, home):
    start = f"task.net.weights=run:{old.folder.name}"
    assert load(dependencies.with_their_split(RunRequest(mine, (start, "data.hold_out=10%")), home))
    for word, theirs in (("hold_out=40%", "20%"), ("stratify=false", "True")):
        request = RunRequest(mine, (f"data.{word}",))
        with pytest.raises(UserError, match=rf" in mine\.yaml; expected {theirs}, the split of run mine-s1"):
            evaluate_run.evaluate(request, old.folder.name, log=False)
        with pytest.raises(UserError, match="these were trained on what it holds out"):
            recipe_check.check(RunRequest(mine, (start, *request.overrides)))
    student = loader.tree(loader.load(mine))
    with pytest.raises(
        UserError, match=r"data\.hold_out: None in mine\.yaml; expected 20%, the split of student\.yaml"
    ):
        teacher = ("data.hold_out=null", "data.stratify=false", "evaluations={}", "best=null")
        dependencies.with_split_of(RunRequest(mine, teacher), student, "student.yaml", makes=True)


def test_a_recipe_that_makes_weights_has_the_split_of_the_one_that_needs_them(mine):
    student = loader.tree(loader.load(mine, ["data.split_seed=3"]))
    made = dependencies.with_split_of(RunRequest(mine, ("seed=9",)), student, "student.yaml")
    assert load(made).data.split_seed == 3 and load(made).seed == 9
    with pytest.raises(UserError, match=r"expected 3, the split of student\.yaml"):
        dependencies.with_split_of(RunRequest(mine, ("data.split_seed=2",)), student, "student.yaml")
    elsewhere = RunRequest(mine, ("data.train=/other",))
    assert dependencies.with_split_of(elsewhere, student, "student.yaml") == elsewhere


@pytest.mark.slow
def test_an_older_run_goes_on_with_its_split(mine, store):
    stopped = older(run("seed=1", "data.split_seed=1", recipe=mine, stopping=stop_after(2)))
    assert stopped.code != 0
    result = CliRunner().invoke(main.main, ["run", "--resume", stopped.folder.name, "--plugin", "toy"])
    assert result.exit_code == 0 and stopped.folder.info().status == "FINISHED", result.output
    whole = run("seed=1", "data.split_seed=1", recipe=mine)
    assert stopped.repeatable == whole.repeatable and whole.folder != stopped.folder


def test_seeds_are_evaluated_on_one_split_and_compared(mine, store):
    store = Store.locate()
    assert run(recipe=mine, seeds=2).code == 0
    runs = [folder for folder in store.runs() if folder.info().recipe == "mine"]
    assert [folder.info().seed for folder in runs] == [0, 1]
    found = comparing.compare(store, runs)
    assert found.same_data == {"held_out": True} and found.primary.verdict != "not comparable"


@pytest.mark.slow
def test_runs_of_two_splits_are_not_comparable(mine, store):
    store = Store.locate()
    for seed in (0, 1):
        run(f"data.split_seed={seed}", recipe=mine)
    found = comparing.compare(store, store.runs())
    assert found.primary.verdict == "not comparable" and found.primary.why == "evaluated on different data"
    assert [str(change) for change in found.changes] == ["data.split_seed  0 -> 1"]


def test_sweeps_and_repeats_over_splits_are_refused(mine):
    for key, words in (("split_seed", "0,1"), ("hold_out", "20%,40%"), ("stratify", "true,false")):
        with pytest.raises(UserError, match=rf"data\.{key}=.*not comparable: .* other held-out data"):
            Settings.of(RunRequest(mine, (f"data.{key}={words}",), sweep=True))
    assert Settings.of(RunRequest(mine, ("data.split_seed=4", "seed=0,1"), sweep=True))
    seeds = Seeds.of(RunRequest(mine, ("data.split_seed=4",), seeds=3))
    children = seeds.children
    assert [(child.recipe.seed, child.recipe.data.split_seed) for child in children] == [(0, 4), (1, 4), (2, 4)]
    with pytest.raises(UserError, match="not comparable: val is other data for each seed"):
        seeds.check_data({"0": ("d", {"val": "a", "test": "c"}), "1": ("d", {"val": "b", "test": "c"})})
