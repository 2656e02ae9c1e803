"""The table at the end of a run: which scores stand in it, and in how many digits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainkit import terminal
from trainkit.analysis import run_scores, run_summary
from trainkit.tracking.journal import History, Journal, Point

SCORES = {"dice_mean": 0.81234, "hd95_mean_mm": 4.5, "missed": 3.0, "volume_error_mean_mm3": 558.4925, "cases": 12.0}
ORGANS = {"dice.sr": 0.9, "dice.on": 0.25, "hd95_mm.sr": 1.5, "hd95_mm.on": 30.0}
SPEED = {"speed/samples_per_s": 3.61, "time/wall_s": 700.0, "time/total_s": 652.0}
SPEED |= {"time/compute_share": 0.996, "time/log_share": 0.004}


def told(tmp_path, best="val/dice_mean") -> list[str]:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step, less in ((50, 0.1), (100, 0.0)):
        for evaluation in ("patches", "val"):
            found = {key: value - less for key, value in (SCORES | ORGANS).items()} if less else SCORES | ORGANS
            journal.append(step, {f"{evaluation}/{key}": value for key, value in found.items()})
    journal.append(100, {f"best/val/{key}": value for key, value in (SCORES | ORGANS).items()})
    journal.commit()
    journal.close()
    recipe = SimpleNamespace(evaluations={"patches": None}, best=best and SimpleNamespace(metric=best))
    block = f"best: {{metric: {best}}}\n" if best else ""
    (tmp_path / "recipe.yaml").write_text(f"{block}evaluations: {{patches: {{}}, val: {{}}, never: {{}}}}\n")
    folder = SimpleNamespace(
        name="orbits-s0",
        journal=path,
        path=path.parent,
        recipe=path.parent / "recipe.yaml",
        info=lambda: SimpleNamespace(follows="a", status="RUNNING", last_step=0),
    )
    run = SimpleNamespace(recipe=recipe, require_folder=lambda: folder, source="orbits.yaml")
    outcome = SimpleNamespace(
        status="FINISHED", step=100, speed=SPEED, verdict="3.6 samples/s.\nBottleneck: data loading.\n  detail",
        best=[{"value": 0.81234, "step": 100}],
    )  # fmt: skip
    page = run_summary.page(run, outcome)
    closing = run_summary.closing(run, outcome, SimpleNamespace(shown="sqlite:///x.db"))
    return terminal.plain([*page, *closing]).splitlines()


def test_the_last_and_best_scores_are_told_and_those_of_each_class_of_the_set_that_counts(tmp_path):
    lines = told(tmp_path)
    best = "Best val/dice_mean 0.8123 at step 100, chosen among 2 evaluations; final 0.8123."
    assert lines[1] == f"Finished in 11 min 40 s. {best}"
    assert next(line for line in lines if "orbits-s0" in line) == "orbits-s0", "its name once, in the heading"
    tables = [line.split() for line in lines if line.startswith(("val", "patches", "final", "best", "never"))]
    numbers = ["0.8123", "4.5000", "3", "558.49", "12"]
    assert tables == [
        ["patches", *SCORES],
        ["final", *numbers],
        ["val", *SCORES],
        ["final", *numbers],
        ["best", *numbers],
        ["val,", "dice", "sr", "on"],
        ["final", "0.9000", "0.2500"],
        ["best", "0.9000", "0.2500"],
    ]
    assert "Throughput  3.6 samples/s in training" in lines
    assert "Time        10 min 52 s of training: forward, backward and optimizer 100 %" in lines
    assert lines[lines.index("Bottleneck: data loading.") + 1] == "  detail", "the throughput is said once"
    assert lines[-4].startswith("View:   trainkit ui ") and lines[-3].startswith("Files:  ")
    assert lines[-2].startswith("Next:   trainkit compare a orbits-s0 ")
    assert lines[-1].startswith("Next:   trainkit predict orbits-s0 IMAGES OUT.parquet")


def test_without_a_best_score_every_set_shows_its_classes(tmp_path):
    assert sum(line.startswith(("val, dice ", "patches, dice ")) for line in told(tmp_path, None)) == 2


def test_of_many_classes_the_first_twelve_are_shown():
    whole, kind, classes = terminal.split(["dice_mean", *(f"dice.o{k}" for k in range(20)), "iou.o1", "iou_mean"])
    assert whole == ["dice_mean", "iou_mean"] and kind == "dice" and classes == [f"dice.o{k}" for k in range(12)]
    assert terminal.split(["accuracy", "auc"]) == (["accuracy", "auc"], "", [])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, 0.5], ["1.0000", "0.5000"]),
        ([3.0, float("nan"), 40.0], ["3", "-", "40"]),
        ([0.4, 123.456, 99999.5], ["0.4000", "123.46", "100000"]),
        ([float("nan")], ["-"]),
        ([], []),
    ],
)
def test_numbers_have_as_many_digits_as_they_need(values, words):
    assert terminal.numbers(values) == words


def test_the_headline_names_the_test_set_first_and_says_what_the_best_was_chosen_among():
    def at(*values: float) -> list[Point]:
        return [Point(10 * k, value, 0) for k, value in enumerate(values)]

    scores = {"val/top1": at(0.94, 0.92, 0.91), "best/val/top1": at(0.94), "probe/val/top1": at(0.94)}
    best = "Best val/top1 0.9400 at step 0, the linear probe, chosen among 3 evaluations; final 0.9100."
    assert run_scores.headline("val/top1", History(scores)) == best
    tested = scores | {"test/top1": at(0.9)}
    assert run_scores.headline("val/top1", History(tested)) == f"Final test/top1 0.9000. {best}"
    later = {**scores, "best/val/top1": at(0, 0.95), "val/top1": at(0.94, 0.95, 0.91)}
    assert run_scores.headline("val/top1", History(later)).endswith("; final 0.9100; the linear probe 0.9400.")
    once = {"val/top1": at(0.5), "best/val/top1": at(0.5)}
    assert run_scores.headline("val/top1", History(once)) == "Best val/top1 0.5000 at step 0."
    assert run_scores.headline("", History()) == ""
