"""Contests: rounds in turns, ratios within rounds, equal work or no table, and a busy machine is said to be busy."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def contest():
    spec = importlib.util.spec_from_file_location("contest", BENCHMARKS / "contest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["contest"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["contest"]


@pytest.fixture
def race(contest):
    """A contest and a stand-in for its processes: what each round of each side measures."""

    def of(figures, proofs=None, **settings):
        made = contest.Contest(
            "Race", "us", "plain", {side: lambda case: None for side in figures}, cases=("small",), **settings
        )
        asked = []

        def processes(self, script, sides, case):
            asked.append(sides)
            return {side: process(side, sum(side in group for group in asked) - 1) for side in sides}

        def process(side, number):
            value = figures[side]
            if isinstance(value, str):
                return None, value
            value = value[number]
            blocks = value if isinstance(value, list) else []
            value = statistics.median(blocks) if blocks else value
            return {"value": value, "proof": (proofs or {}).get(side), "more": {}, "blocks": blocks}, ""

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contest.Contest, "_processes", processes)
            patch.setattr(contest, "others", lambda: 0.1)
            found = made.run(Path("x.py"), list(figures), ("small",), len(figures["plain"]))
        return made, found, asked

    return of


def test_a_ratio_is_the_median_of_those_within_a_round(race):
    # In the third round the machine was twice as slow for both.
    made, found, asked = race({"plain": [10.0, 11.0, 20.0], "ours": [5.0, 6.6, 10.0]})
    (row,) = [line for line in made.lines(found) if line.startswith("| small | ours")]
    assert row == "| small | ours | 6.6 | 5 | 0.5 | 0.5 to 0.6 |"
    assert asked == [["plain"], ["ours"], ["ours"], ["plain"], ["plain"], ["ours"]]


def test_sides_that_did_different_work_get_no_table(race, contest):
    made, found, _ = race({"plain": [1.0], "ours": [1.0]}, {"plain": [1.0, "a"], "ours": [1.0 + 1e-9, "a"]})
    assert made.lines(found)[0].startswith("NO TABLE: the implementations did not do the same work: small ours")
    made, found, _ = race(
        {"plain": [1.0], "ours": [1.0]}, {"plain": [1.0, "a"], "ours": [1 + 1e-9, "a"]}, tolerance=1e-6
    )
    assert made.lines(found)[0] == "### Race"
    made, found, _ = race({"plain": [1.0], "ours": [1.0]}, {"plain": [1.0, "a"], "ours": [1.0, "b"]}, tolerance=1e-6)
    assert made.lines(found)[0].startswith("NO TABLE")


def test_targets_are_met_or_missed(race, contest):
    targets = (
        contest.Target("small", "ours", 0.5),
        contest.Target("small", "ours", 1.0, "difference", words="over plain"),
        contest.Target("small", "ours", 7.0, "value", least=True),
        contest.Target("small", "gone", 7.0),
    )
    made, found, _ = race(
        {"plain": [10.0, 10.0, 10.0], "ours": [6.0, 6.0, 6.0], "gone": "no such package"}, targets=targets
    )
    said = [line.strip() for line in made.lines(found) if "target" in line]
    assert said == [
        "target: small ours ratio at most 0.5: 0.6, missed",
        "target: over plain at most 1: -4, met",
        "target: small ours value at least 7: 6, missed",
    ]
    assert "gone was not measured: no such package" in "\n".join(made.lines(found))


def test_a_target_can_be_against_another_side_than_the_baseline(race, contest):
    targets = (
        contest.Target("small", "ours", 3, against="other", least=True, words="/ other"),
        contest.Target("small", "ours", 1.0, "difference", against="other", words="over other"),
        contest.Target("small", "ours", 3, against="gone", least=True),
    )
    figures = {"plain": [1.0, 1.0, 1.0], "other": [2.0, 2.0, 4.0], "ours": [6.0, 10.0, 10.0], "gone": "no such package"}
    made, found, _ = race(figures, targets=targets)
    assert [line.strip() for line in made.lines(found) if "target" in line] == [
        "target: / other at least 3: 3, met",
        "target: over other at most 1: 6, missed",
    ]


def test_a_case_that_the_baseline_cannot_do_has_figures_and_no_ratios(race, contest):
    targets = (contest.Target("small", "ours", 5.0, "value"), contest.Target("small", "ours", 0.5))
    made, found, asked = race({"plain": [1.0], "ours": [2.0]}, only={"small": ("ours",)}, targets=targets)
    assert asked == [["ours"]] and "| small | ours | 2 | 2 |  |  |" in made.lines(found)
    assert [line.strip() for line in made.lines(found) if "target" in line] == [
        "target: small ours value at most 5: 2, met"
    ]


def test_the_summary_says_how_many_times_as_good_as_each_peer_and_which_targets_were_met(contest, race, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import suite

    figures = {"plain": [10.0, 10.0, 12.0], "peer": [4.0, 5.0, 6.0], "trainkit": [2.0, 1.0, 2.0]}
    made, found, _ = race(figures, targets=(contest.Target("small", "trainkit", 0.1, words="of plain,"),))
    monkeypatch.setattr(suite, "subject", lambda name: made)
    said = suite.summary({"race": found})
    assert "| Race: small | trainkit | plain | 6 | 5 to 10 |" in said
    assert "| Race: small | trainkit | peer | 3 | 2 to 5 |" in said
    assert "| Race: of plain | at most 0.1 | 0.1667 | missed |" in said
    assert "| Race (busy machine: not valid): small | trainkit | peer | 3 | 2 to 5 |" in suite.summary(
        {"race": {**found, "busy": 0.9}}
    )
    made, found, _ = race(figures, more_is_better=True)
    monkeypatch.setattr(suite, "subject", lambda name: made)
    assert "| Race: small | trainkit | peer | 0.3333 | 0.2 to 0.5 |" in suite.summary({"race": found})
    made, found, _ = race(figures, {"plain": 1, "trainkit": 2})
    assert any("did not do the same work" in line for line in suite.summary({"race": found}))


def test_a_case_that_is_run_once_is_of_the_first_round_alone(race):
    made, found, asked = race({"plain": [4.0, 4.0, 4.0], "ours": [2.0, 2.0, 2.0]}, once=("small",))
    assert asked == [["plain"], ["ours"]] and "| small | ours | 2 | 2 | 0.5 | 0.5 to 0.5 |" in made.lines(found)


def test_a_busy_machine_has_no_result(race):
    made, found, _ = race({"plain": [1.0], "ours": [2.0]})
    assert not any("not valid" in line for line in made.lines(found))
    assert any("not valid" in line for line in made.lines({**found, "busy": 0.9}))


def test_a_ratio_of_sides_in_turns_is_of_blocks_next_to_each_other(race, contest):
    # The machine halves its pace after the first block of a side: medians over all blocks would say 2.1.
    targets = (contest.Target("small", "ours", 1.5, "difference", words="over plain"),)
    figures = {"plain": [[10.0, 20.0, 20.0]], "ours": [[21.0, 21.0, 21.0]]}
    made, found, asked = race(figures, turns=True, targets=targets)
    assert asked == [["plain", "ours"]]
    assert "| small | ours | 21 | 21 | 1.05 | 1.05 to 1.05 |" in made.lines(found)
    assert any("over plain at most 1.5: 1, met" in line for line in made.lines(found))


def test_in_turns_one_side_works_and_the_threads_of_others_stand(tmp_path):
    script, kept = tmp_path / "race.py", tmp_path / "found.json"
    script.write_text(
        f"""import sys, threading, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import contest
from contest import Contest, Sample, next_turn
contest.others = lambda: 0.1
beats = []
def beat():
    while True:
        beats.append(time.monotonic())
        time.sleep(0.002)
def side(case):
    threading.Thread(target=beat, daemon=True).start()
    spans = []
    next_turn()
    for _ in range(6):
        began = time.monotonic()
        time.sleep(0.05)
        spans += [began, time.monotonic()]
        next_turn()
    inside = sum(any(a <= b <= c for a, c in zip(spans[::2], spans[1::2])) for b in beats)
    outside = sum(spans[0] <= b <= spans[-1] for b in beats) - inside
    return Sample(1.0, more={{"beats": inside, "outside": outside}}, blocks=spans)
def gone(case):
    import no_such_package
CONTEST = Contest("Race", "us", "plain", {{"plain": side, "ours": side, "gone": gone}}, turns=True)
if __name__ == "__main__":
    sys.exit(CONTEST.main("doc"))
"""
    )
    command = [sys.executable, str(script), "--rounds", "1", "--json", str(kept)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    sides = json.loads(kept.read_text())["cases"][""]
    spans = [s for side in ("plain", "ours") for s in zip(*[iter(sides[side][0]["blocks"])] * 2, strict=True)]
    spans.sort()
    assert len(spans) == 12 and all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    # Let run beside each other, they would beat as often outside of their turns as inside.
    assert all(0 < s["beats"] > 2 * s["outside"] for s in (sides[side][0]["more"] for side in ("plain", "ours")))
    assert "gone was not measured: No module named 'no_such_package'" in done.stdout


def test_the_digest_of_weights_is_that_of_their_bits(contest):
    state = {"a": torch.ones(3), "b": torch.zeros(2, 2)}
    same = {"b": torch.zeros(2, 2), "a": torch.ones(3)}
    assert contest.digest(state) == contest.digest(same)
    assert contest.digest(state) != contest.digest({**state, "a": torch.tensor([1.0, 1.0, 1.0 + 1e-7])})


def test_every_subject_of_the_suite_is_a_contest_whose_targets_exist(contest, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import suite

    assert suite.SUBJECTS
    for name in suite.SUBJECTS:
        if not (BENCHMARKS / f"{name}.py").exists():
            pytest.fail(f"benchmarks/{name}.py is not there")
        made = suite.subject(name)
        assert made.baseline in made.sides
        for target in made.targets:
            assert target.case in made.cases and target.side in made.sides, (name, target)
            assert not target.against or target.against in made.sides, (name, target)
