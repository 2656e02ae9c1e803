"""The claims ledger: every statement of the guides is in it, the page is what the code says, and figures are right."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import PLUGIN, ROOT
from scipy import stats
from torch import nn

from benchmarks import results
from benchmarks.claims import __main__ as claims
from benchmarks.claims import measurements
from benchmarks.claims.bench import GUIDES, RECIPES, Bench, Found, Guide, Parts
from benchmarks.claims.table import CLAIMS, Claim, Inside, Known, Switch, Whole
from benchmarks.results import Skipped
from trainkit.config.run_request import RunRequest, load
from trainkit.diagnostics.stepped_process import Block, Ready
from trainkit.errors import UserError
from trainkit.interfaces import Loss
from trainkit.tracking.store import Store

PAGE = ROOT / "docs" / "project" / "claims.md"


# ---- The table


def test_every_statement_is_of_a_guide_and_there_once():
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids) and {claim.guide for claim in CLAIMS} == set(GUIDES)
    for claim in CLAIMS:
        assert claim.said and claim.id.startswith(f"{claim.guide}-")
        assert claim.most is None or 1 < claim.least < claim.most, claim.id


def test_functions_and_recipes_that_are_named_exist():
    for claim in CLAIMS:
        if isinstance(claim.way, Inside):
            assert callable(getattr(measurements, claim.way.function, None)), claim.id
    for guide in GUIDES.values():
        for name in (*guide.large, *guide.small):
            assert (RECIPES / f"{name}.yaml").is_file(), name


def test_words_of_every_switch_fit_the_recipes_they_are_said_of():
    together: dict[str, list[dict[str, str]]] = {}
    for claim in CLAIMS:
        way = claim.way
        if isinstance(way, Switch):
            loads = together.setdefault(GUIDES[claim.guide].small[-1], [])
            for words in ((*way.both, *way.before), (*way.both, *way.after)):
                own = {word.partition("=")[0]: word.replace("{cores}", "2") for word in words}
                # Loading takes time: words that do not contradict each other are loaded at once.
                fits = (held for held in loads if all(held.get(key, word) == word for key, word in own.items()))
                held = next(fits, None)
                loads.append(own) if held is None else held.update(own)
    for name, loads in together.items():
        for words in loads:
            load(RunRequest(RECIPES / f"{name}.yaml", list(words.values())))
    assert set(together) == {guide.small[-1] for guide in GUIDES.values()}


def test_evaluations_that_are_computed_are_in_the_recipes():
    for claim in CLAIMS:
        if isinstance(claim.way, Whole) and claim.way.evaluation:
            recipe = load(RunRequest(RECIPES / f"{GUIDES[claim.guide].small[-1]}.yaml"))
            assert claim.way.evaluation in recipe.evaluations, claim.id


def test_the_page_is_what_the_code_says():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    heads = {c.id: f"| `{c.id}` {c.said} | {c.promised} |" for c in CLAIMS}
    assert len(rows) >= 46 and text.startswith(claims.HEAD)
    for line in rows:
        assert line.startswith(heads.pop(line.split("`")[1])), "the page is old: python -m benchmarks.claims"


# ---- Judging


def claim(way=None, least=1.5, most=2.0, id="eyes-x", **more) -> Claim:
    return Claim(
        id=id, guide="eyes", said="said", how="how", way=way or Known(true=True), least=least, most=most, **more
    )


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.5, 1.9, "holds"),
        (2.1, 2.3, "holds, and more"),
        (1.2, 1.49, "does not hold"),
        (1.4, 1.6, "inconclusive"),
        (0.5, 3.0, "inconclusive"),
    ],
)
def test_a_claim_is_judged_by_its_whole_interval(low, high, verdict):
    assert claims.judge(claim(), Found(ratio=(low * high) ** 0.5, low=low, high=high)) == verdict


@pytest.mark.parametrize(("low", "high", "verdict"), [(1.02, 1.1, "holds"), (0.99, 1.005, "does not hold")])
def test_what_promises_no_number_must_bring_a_hundredth(low, high, verdict):
    assert claims.judge(claim(least=1.0, most=None), Found(ratio=1.0, low=low, high=high)) == verdict


def test_a_statement_is_true_or_not():
    assert (
        claims.judge(claim(), Known(true=True)(None, "eyes")) == "true"
        and claims.judge(claim(), Found(true=False)) == "not true"
    )


# ---- What is measured


@dataclass(frozen=True)
class Counted:
    """A way that counts how often it was measured."""

    calls: list[str]
    name: str
    fails: type[BaseException] | None = None
    gpu: bool = False
    recipe: bool = True

    def __call__(self, bench, guide):
        self.calls.append(self.name)
        if self.fails:
            raise self.fails(self.name)
        return Found(ratio=1.7, low=1.6, high=1.8, text=f"seen {self.name}")


def test_an_interrupted_measurement_goes_on_and_what_fails_or_needs_a_gpu_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(Bench, "chosen", lambda self, guide: Path("toy.yaml"))
    calls: list[str] = []
    ways = {"eyes-a": None, "eyes-b": KeyboardInterrupt, "eyes-c": RuntimeError, "eyes-d": Skipped}
    table = [claim(Counted(calls, name, fails), id=name) for name, fails in ways.items()]
    table += [claim(Counted(calls, "eyes-e", gpu=True), id="eyes-e"), claim(id="eyes-f")]
    bench = Bench(None, False)
    with pytest.raises(KeyboardInterrupt):
        results.measure("claims", claims.checks(table, bench), {}, folder=tmp_path)
    table[1] = claim(Counted(calls, "eyes-b"), id="eyes-b")
    rows, left = results.measure("claims", claims.checks(table, bench), {}, folder=tmp_path)
    assert calls == ["eyes-a", "eyes-b", "eyes-b", "eyes-c", "eyes-d"] and not left
    assert [row.result for row in rows] == ["holds", "holds", "fails", "skipped", "skipped", "true"]
    assert rows[0].measured == "1.700 (1.600 to 1.800); toy: seen eyes-a" and rows[4].measured == "needs a GPU"


def test_the_page_has_what_was_measured_with_its_figure_alone():
    measured = {"faces-modes": ("1.0 (0.9 to 1.1); 3 ms", "inconclusive"), "organs-factors": ("how", "not true")}
    rows = [results.Row(what=k, expected="p", measured=m, result=r) for k, (m, r) in measured.items()]
    rows += [results.Row(what="eyes-amp", expected="p", measured="needs a GPU", result="skipped")]
    text = claims.page({"gpu": "none"}, rows)
    assert "adds up | p | 1.0 (0.9 to 1.1) | inconclusive |" in text and "50-80 % | p |  | not true |" in text
    assert "eyes-amp" not in text and "1 inconclusive, 1 not true." in text


def test_claims_are_named_by_id_or_guide_and_another_word_is_refused():
    assert [one.id for one in claims.chosen(("faces-modes",))] == ["faces-modes"]
    assert {one.guide for one in claims.chosen(("eyes",))} == {"eyes"} and len(claims.chosen(())) == len(CLAIMS)
    with pytest.raises(UserError, match="no claim faces-calback; expected a guide"):
        claims.chosen(("faces-calback",))


# ---- Figures


def made(updates=(0.1, 0.2, 0.4), guide="eyes", **more) -> Bench:
    """A bench to which seconds of updates are known."""
    bench = Bench(None, False, repeats=len(updates), cores=2.0, **more)
    bench._updates[guide] = list(updates), Ready(4, True, {})
    return bench


def test_a_cost_is_set_against_the_update_of_its_repeat():
    before, after = [0.1, 0.2, 0.3], [0.0, 0.1, 0.0]
    found = made().against("eyes", before, after)
    ratios = [(0.1 + 0.1) / 0.1, (0.2 + 0.2) / (0.2 + 0.1), (0.4 + 0.3) / 0.4]
    logs = [math.log(r) for r in ratios]
    mean = sum(logs) / 3
    half = float(stats.t.ppf(0.975, 2)) * math.sqrt(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    assert found.value == pytest.approx(math.exp(mean))
    assert (found.low, found.high) == pytest.approx((math.exp(mean - half), math.exp(mean + half)))


def test_callbacks_that_return_are_counted_by_nanoseconds():
    bench = made((0.275, 0.275, 0.275))
    found = measurements.callbacks_that_return(bench, "eyes")
    assert found.ratio > 1 and found.low > 0.999 and found.high < 1.001  # a hundred times what nanoseconds can be
    assert claims.judge(next(c for c in CLAIMS if c.id == "faces-callbacks"), found) == "does not hold"


def test_a_short_call_is_repeated_often_though_its_first_trial_was_held_up():
    calls = []

    def call():
        calls.append(0)
        if len(calls) == 2:
            time.sleep(0.1)

    seconds = made((1.0, 1.0)).timed(call, 0.05)
    assert len(seconds) == 2 and max(seconds) < 1e-3 and len(calls) > 100


def test_a_progress_bar_costs_twice_as_much_when_drawn_twice_as_often():
    quick = measurements.progress_bar(made((1e-9, 1e-9, 1e-9)), "eyes")
    assert quick.ratio == pytest.approx(2, rel=1e-2)
    assert measurements.progress_bar(made((1.0, 1.0, 1.0)), "eyes").ratio < 1.01


def block(rate: float, gb: float) -> Block:
    return Block(1, int(1000 * rate), 1000.0, (), gb)


def test_a_switch_compares_rates_and_memory_in_their_own_direction(monkeypatch):
    pairs = [(block(100, 2.0), block(150, 1.0)), (block(110, 2.0), block(165, 1.0)), (block(90, 2.2), block(135, 1.1))]
    asked = []

    def training(self, guide, words, environment, patience):
        asked.append((words, environment))
        return nullcontext(SimpleNamespace(go=lambda steps: block(100, 1.0)))

    monkeypatch.setattr(Bench, "training", training)
    monkeypatch.setattr("trainkit.diagnostics.stepped_process.in_turns", lambda *words: iter(pairs))
    bench = Bench(None, False, cores=6.0)
    way = Switch(before=("a=1",), after=("a={cores}",), both=("b=2",), environment=(("X", "1"),))
    found = way(bench, "eyes")
    assert found.ratio == pytest.approx(1.5) and "100 samples/s before, 150 after" in found.text
    assert asked[:2] == [(("b=2", "a=1"), (("X", None),)), (("b=2", "a=6"), (("X", "1"),))]
    memory = replace(way, of="memory")(bench, "eyes")
    assert memory.ratio == pytest.approx(2) and "2.2 GB before, 1.1 after" in memory.text
    with pytest.raises(Skipped, match="this machine has 6"):
        replace(way, cores=16)(bench, "eyes")


def test_a_whole_training_with_fewer_evaluations_is_computed(monkeypatch):
    bench = made((0.5, 0.5), "toy", guides={"toy": Guide(title="toy", small=("toy",))}, folder=PLUGIN, plugins=("toy",))
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr(Bench, "chosen", lambda self, guide: PLUGIN / "toy.yaml")
    monkeypatch.setattr(Bench, "evaluation", lambda self, guide, name: (3.0, True))
    found = Whole(evaluation="", every=("1 epoch", "2 epochs"), length="10 epochs")(bench, "toy")
    # 40 updates of half a second; ten evaluations of 3 s, or five.
    assert found.ratio == pytest.approx((20 + 30) / (20 + 15)) and found.low == pytest.approx(found.high)
    with pytest.raises(Skipped, match="no evaluation 'other'"):
        Whole(evaluation="other", every=("1 epoch", "2 epochs"), length="10 epochs")(bench, "toy")


# ---- What is computed


def in_process(net: nn.Module, data: torch.Tensor, labels: torch.Tensor, block: int = 1) -> Bench:
    """A bench whose recipe is this network over these samples."""
    bench = Bench(None, False)
    train = SimpleNamespace(
        fetch=lambda rows, epoch: {"image": data[rows], "label": labels[rows]},
        on_device=lambda batch: batch,
        order=lambda epoch, size: np.arange(len(data))[None],
    )

    def loss(net, networks, batch, at):
        out = nn.functional.cross_entropy(net(batch["image"]), batch["label"], reduction="sum")
        return Loss(out, len(batch["label"]))

    recipe = SimpleNamespace(task=SimpleNamespace(loss=loss), train=SimpleNamespace(batch_size=len(data)))
    opened = SimpleNamespace(train=train, block=block)
    rows = np.arange(len(data) // (2 if block > 1 else 1))
    bench._parts = ("eyes", Parts(recipe, opened, net, None, rows, torch.device("cpu")))
    return bench


def samples():
    rng = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=rng), torch.arange(8) % 3


def test_two_halves_are_the_batch_without_batch_norm_and_not_with_it():
    x, y = samples()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.ReLU(), nn.Linear(5, 3))
    assert measurements.two_portions(in_process(plain, x, y), "eyes").true
    assert plain.training and plain[1].training
    normed = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    kept = {key: value.clone() for key, value in normed.state_dict().items()}
    found = measurements.two_portions(in_process(normed, x, y), "eyes")
    assert not found.true and "2 x 4 samples" in found.text and normed[1].training
    assert all(torch.equal(value, kept[key]) for key, value in normed.state_dict().items())

    # The same by hand: whole against halves, statistics of each portion its own.
    def gradient(portions):
        normed.zero_grad()
        for part in portions:
            nn.functional.cross_entropy(normed(x[part]), y[part], reduction="sum").backward()
        return torch.cat([p.grad.flatten() for p in normed.parameters()])

    whole, halves = gradient([slice(0, 8)]), gradient([slice(0, 4), slice(4, 8)])
    off = float((whole - halves).norm() / whole.norm())
    assert f"by {100 * off:.2g} % of its length;" in found.text


def test_two_blocks_that_belong_together_are_a_batch():
    x, y = samples()
    found = measurements.two_portions(in_process(nn.Linear(4, 3), x, y, block=4), "eyes")
    assert found.true and "2 x 4 samples differs from that of 8" in found.text


def test_what_backward_keeps_of_a_sample_is_counted():
    # Of a linear layer backward keeps its input; of ReLU its output, which is the next one's input; of the loss the
    # log-probabilities and labels: 4 + 5 + 3 floats and one int64.
    x, y = samples()
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    found = measurements.half_the_memory(in_process(net, x, y), "eyes")
    each = 4 * (4 + 5 + 3) + 8
    assert f"{1000 * each / 1e9:.3g} MB per sample" in found.text and not found.true
    fits = (24e9 - 16 * sum(p.numel() for p in net.parameters())) / each
    assert f"about {fits:,.0f} fit into" in found.text


def test_arithmetic_of_the_guides():
    how = {claim.id: claim.how for claim in CLAIMS if isinstance(claim.way, Known)}
    assert len(how) == 10 and 1863 * 32 == 59_616 and "59,616" in how["people-calls"]
    factors = (3, 2, 1.5, 1.3, 1.2, 1.1)
    assert f"{sum(100 * (1 - 1 / f) for f in factors):.0f} %" in how["people-factors"]
    low = math.prod(factors)
    assert f"{low:.0f} to {low * 5 / 3:.0f}" in how["people-factors"]
    ends = 1.3 * 1.1 * 1.1 / 0.95, 1.5 * 1.2 * 1.2 / 0.9
    assert "{:.2f} to {:.2f}".format(*ends) in how["organs-factors"]


def test_an_index_of_the_guides_size_takes_less_than_its_seconds():
    found = measurements.index_seconds(made(), "people")
    assert found.low > 1


# ---- Recipes


def test_the_first_recipe_whose_data_are_here_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    monkeypatch.setattr("trainkit.training.dependencies.gather", lambda *words: {})
    assert Bench(Store.locate(), False).chosen("scenes").stem == "segment"
    with pytest.raises(Skipped, match="no recipe can be trained here: camvid: its data are not here"):
        Bench(Store.locate(), False, guides={"x": Guide(title="x", small=("camvid",))}).chosen("x")


def test_a_recipe_whose_teacher_is_not_trained_gives_way_to_the_teacher(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))

    def gather(order, recipe, *words):
        if recipe.task.required_weights():
            raise UserError("recipes/face_teacher.yaml", "has no finished run")
        return {}

    monkeypatch.setattr("trainkit.training.dependencies.gather", gather)
    assert Bench(Store.locate(), False).chosen("faces").stem == "face_teacher"


@pytest.mark.slow
def test_a_switch_is_measured_by_two_trainings(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    monkeypatch.syspath_prepend(str(PLUGIN))
    guides = {"toy": Guide(title="toy", small=("toy",))}
    bench = Bench(
        Store.locate(), False, repeats=3, block=0.3, cores=2.0, guides=guides, folder=PLUGIN, plugins=("toy",)
    )
    way = Switch(before=("train.micro_batch=1",), after=("train.micro_batch=16",))
    found = way(bench, "toy")
    again = replace(way, of="memory")(bench, "toy")
    assert found.low > 1.5 and 0.5 < again.ratio < 2  # sixteen forwards an update instead of one
    with pytest.raises(Skipped, match="a training ended"):
        Switch(before=way.before, after=("task.nan_at=1",))(bench, "toy")
