"""`benchmarks.gpu`, speed, claims and several GPUs: all that measures runs here, small and on the processor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import PLUGIN

from benchmarks import contest
from benchmarks.claims.bench import GUIDES, RECIPES, Bench, Guide
from benchmarks.claims.table import CLAIMS, Switch
from benchmarks.gpu import claims, several, speed
from benchmarks.gpu.report import Row, Scale
from trainkit.config.run_request import RunRequest, load
from trainkit.models.face_backbones import IResNetSpec
from trainkit.tracking.store import Store
from trainkit.training.plan import Plan

TINY = Scale(device=torch.device("cpu"), tiny=True)


def study(part: str) -> speed.Study:
    """The study of speed of whose rows one has `part` in its name."""
    (found,) = (one for one in speed.studies() if any(part in what for what in one.expected))
    return found


def measure(part: str) -> list[Row]:
    return list(speed.measured(study(part), TINY))


# ---- Rows


def test_every_row_has_a_name_of_its_own():
    parts = [*speed.studies(), *several.studies()]
    names = [what for one in parts for what in one.expected] + [claims.named(claim) for claim in claims.chosen()]
    assert len(set(names)) == len(names) >= 40


def test_a_study_that_ends_early_says_so_in_the_rows_that_are_left(monkeypatch):
    def fails(scale: Scale) -> Iterator[tuple[str, str]]:
        yield "fast", "ok"
        raise RuntimeError("out of memory\non the device")

    def lacks(scale: Scale) -> Iterator[tuple[str, str]]:
        import no_such_package  # noqa: F401

        yield "", "ok"

    made = [
        speed.Study(expected={"a": "1", "b": "2"}, measure=fails),
        speed.Study(expected={"c": "3"}, measure=lacks),
        speed.Study(expected={"d": "4"}, measure=lambda scale: iter(())),
    ]
    monkeypatch.setattr(speed, "studies", lambda: iter(made))
    found = {row.what: row for row in speed.rows(TINY, ["a"])}
    assert list(found) == ["b", "c", "d"] and found["b"].expected == "2"
    assert found["b"].result == "fails" and found["b"].measured == "RuntimeError: out of memory on the device"
    assert found["c"].result == "skipped" and found["c"].measured == "no_such_package is not installed"
    assert found["d"].result == "fails"
    assert not list(speed.rows(TINY, ["a", "b", "c", "d"]))
    monkeypatch.setattr(speed, "SECONDS", -1.0)
    assert not list(speed.rows(TINY, []))


def test_turns_alternate_which_comes_first():
    seen: list[str] = []
    calls = [lambda name=name: seen.append(name) or float(len(seen)) for name in "ab"]
    assert speed.in_turns(calls, 3) == [[1, 4, 5], [2, 3, 6]] and "".join(seen) == "abbaab"


def test_sides_of_a_contest_take_turns_in_the_same_way(monkeypatch):
    seen: list[str] = []

    class Process:
        def __init__(self, script, side, case, threads, folder):
            self.side, self.left = side, 4

        def go(self, seconds):
            seen.append(self.side)
            self.left -= 1
            return self.left > 0

        def ended(self, seconds):
            return contest._MARK + json.dumps({"value": 1.0, "proof": None, "more": {}, "blocks": []}), "", 0

        def kill(self):
            pass

    monkeypatch.setattr(contest, "_Process", Process)
    monkeypatch.setattr(contest, "others", lambda: 0.0)
    race = contest.Contest("Race", "us", "a", dict.fromkeys("ab", lambda case: None), turns=True)
    race.run(Path("race.py"), ["a", "b"], [""], 1)
    assert "".join(seen) == "ab" + "baabba"  # up to the first block, and then by turns


def test_the_margin_head_is_measured_beside_a_chain_of_the_same_loss():
    (found,) = measure("margin softmax")
    assert found.result == "ok" and " ms, x " in found.measured


def test_jpeg_files_are_decoded_twice_to_the_same_pixels():
    (found,) = measure("JPEG")
    assert found.result == "ok" and "pixels differ by 0" in found.measured


def test_full_and_tiny_words_of_every_task_fit_its_recipe():
    for task in speed.TASKS.values():
        if task.recipe not in speed.loops.SUBJECTS:
            for words in (task.full, task.tiny):
                recipe = load(RunRequest(RECIPES / f"{task.recipe}.yaml", words))
                assert recipe.name == task.recipe


@pytest.mark.slow
def test_a_teacher_of_fifty_layers_stays_in_bounds():
    net = speed.teacher_of(IResNetSpec(name="iresnet50", embedding=512), 112, TINY).eval()
    with torch.no_grad():
        assert net(torch.zeros(2, 3, 112, 112)).norm(dim=1).max() < 1e3


@pytest.mark.slow
@pytest.mark.parametrize("name", speed.loops.SUBJECTS)
def test_loops_of_others_come_to_the_same_losses(name):
    found = measure(f"{name} bf16")
    known = [row for row in found if row.result != "skipped"]
    assert known and all(row.result == "no goal" and "first losses alike" in row.measured for row in known), found
    assert all("lightning" in row.what for row in found if row.result == "skipped")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdaDistill", *(f"{task}:" for task in speed.TASKS)])
def test_each_task_is_trained_in_each_precision(name):
    (found,) = measure(name)
    assert found.result == "ok" and "bf16 x " in found.measured, found


@pytest.mark.slow
def test_patches_of_volumes_are_those_of_monai():
    pytest.importorskip("monai")
    assert [row.measured.endswith("voxels equal") for row in measure("3-D patches")] == [True, True]


# ---- Claims


def test_each_claim_that_needs_a_gpu_can_be_trained_on_data_that_are_drawn():
    found = claims.chosen()
    assert len(found) == 26
    drawn = {guide: GUIDES[guide].small[-1] for guide in {claim.guide for claim in found}}
    opened = {
        name: load(RunRequest(RECIPES / f"{name}.yaml")).data.open(0) for name in drawn.values() if name != "reid"
    }
    for claim in found:
        assert isinstance(claim.way, Switch), claim.id
        for words in (claim.way.before, claim.way.after):
            own = [word.replace("{cores}", "16") for word in (*claim.way.both, *words)]
            name = drawn[claim.guide]
            recipe = load(RunRequest(RECIPES / f"{name}.yaml", own))
            if name in opened:  # people take long to draw, and no claim changes their batch
                Plan.make(recipe, opened[name], 1, 0)
        if claim.guide == "people":
            assert not any("batch" in word for word in (*claim.way.before, *claim.way.after))


@pytest.fixture
def toy(monkeypatch) -> Iterator[Bench]:
    """A bench whose guide has the toy recipe."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    guides = {"toy": Guide(title="toy", small=("toy",))}
    made = Bench(Store.locate(), False, repeats=2, block=0.01, guides=guides, folder=PLUGIN, plugins=("toy",))
    yield made
    made.close()


def test_the_recipe_of_a_guide_is_found_with_what_it_needs(toy):
    assert toy.chosen("toy") == (PLUGIN / "toy.yaml", "")
    assert toy.request("toy", ("seed=3",)) == RunRequest(PLUGIN / "toy.yaml", ("seed=3",), ("toy",))


@pytest.mark.slow
def test_a_switch_is_measured_by_two_trainings(toy):
    way = Switch(before=("seed=0",), after=("seed=1",))
    found = way(toy, "toy")
    assert found.low < found.ratio < found.high and "samples/s before" in found.text
    assert "GB before" in replace(way, of="memory")(toy, "toy").text


@pytest.mark.slow
def test_a_claim_becomes_a_row():
    own = next(claim for claim in CLAIMS if claim.id == "scenes-amp")
    done = {claims.named(claim) for claim in claims.chosen()} - {claims.named(own)}
    (found,) = claims.rows(TINY, done)
    assert found.result == "no goal" and found.expected == "2x" and found.measured.endswith(" on segment"), found


# ---- Several GPUs


def test_several_gpus_are_asked_for_where_there_is_one(monkeypatch):
    monkeypatch.setattr(several, "processes", lambda scale: 1)
    found = list(several.rows(TINY, []))
    assert len(found) == 5 and {row.measured for row in found} == {"needs two GPUs"}
    assert {row.result for row in found} == {"skipped"}


@pytest.mark.slow
def test_two_processes_come_to_the_losses_of_one():
    found = list(several.rows(TINY, []))
    assert [row.result for row in found] == ["ok", "ok", "ok", "no goal", "no goal"], found
    assert "2 processes, FSDP" in found[1].measured


@pytest.mark.slow
def test_a_process_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(several, "SUBJECT", "mobilefacenet")  # the processes ask for another one's recipe
    with pytest.raises(RuntimeError, match=r"ended with 1: .*Error: .*convnext_tiny"):
        several.launched(TINY, "equal", tmp_path, 2)
