"""Every metric that a training logs has a definition."""

from __future__ import annotations

import ast
import re

import pytest
from runs import ROOT, run

from trainkit.config import metric_table
from trainkit.config.metric_definitions import DEFINITIONS
from trainkit.config.metric_table import definition


@pytest.mark.usefixtures("store")
def test_every_metric_of_a_run_is_defined():
    ran = run("log.system_every=0.1 s", "log.metrics=all")
    names = set(ran.history.metrics)
    scores = {name for name in names if name.startswith("val/") and not name.startswith("val/ema/")}
    assert len(names) > 40 and scores and not {name for name in names - scores if definition(name) is None}
    assert not {name for name in scores if definition(name) is not None}, "scores are defined by their protocol"


@pytest.mark.parametrize(
    "name, form",
    [
        ("train/loss", "train/loss"),
        ("train/id_loss", "train/<term>"),
        ("final/time/wall_s", "final/time/wall_s"),
        ("final/speed/samples_per_s", "final/speed/<metric>"),
        ("final/val/top1", "final/<metric>"),
        ("time/eval_val_s", "time/eval_<evaluation>_s"),
        ("pooled/val/top1_low", "pooled/<metric>_low"),
        ("sweep/val/top1", "sweep/<metric>"),
        ("system/gpu_1_power_usage_watts", "system/gpu_<n>_power_usage_watts"),
        ("val/ema/top1", "<evaluation>/ema/<metric>"),
    ],
)
def test_the_narrowest_form_counts(name, form):
    found = definition(name)
    assert found is not None and found[0] == form


def test_names_and_sentences_are_well_formed():
    every = [one for group in DEFINITIONS.values() for one in group.values()]
    assert len({name for group in DEFINITIONS.values() for name in group}) == len(every)
    assert all(one.text.endswith(".") and one.text[0] == one.text[0].upper() for one in every)


DIRECTIONS = {
    "lower": (
        *(
            "nll",
            "val/nll",
            "val/ema/nll",
            "at_best/val/ema/nll",
            "best/test/nll",
            "final/val_2/ece",
            "baseline/val/nll",
        ),
        *("lfw/eer", "teacher/lfw/eer", "pixels/lfw/eer", "val/fnmr@1e-3", "val/fnmr_at_fmr_1e-4", "val/bayes_error"),
        *("val/hd95_mm.liver", "val/hd95_mean_mm", "val/ema/asd_mm.left kidney", "val/volume_error_mean_mm3"),
        *("val/hd95_mm.map", "val/hd95_mm.rank_1", "val/asd_mm.minp"),
        *("val/missed", "pooled/val/invented", "val/intra", "val/mae", "val/log_loss", "sweep/val/nll"),
        *("train/loss", "final/train/loss", "train/id_loss", "val/loss", "time/eval_val_s", "final/time/wall_s"),
        *("speed/step_ms_p99", "cost/gpu_hours", "device/idle_ms"),
    ),
    "higher": (
        *("top1", "val/iou.road", "val/iou/road", "val/ema/iou.nll", "val/dice.loss", "val/hellinger", "val/ks"),
        *("val/rgb.map", "val/modal_1.rank_5", "test/minp", "lfw/tar_at_far_1e-3", "lfw/val_at_far_1e-3", "val/fisher"),
        *("val/balanced_accuracy", "unseen/map_at_r", "val/nsd.liver", "train/accuracy"),
        *("speed/samples_per_s", "final/speed/samples_per_s"),
    ),
    "none": (
        *("val/margin", "val/pca_energy_0", "val/threshold", "val/accuracy_std", "val/dice_mean_low", "val/cases"),
        *("lfw/val_at_far_1e-3_far", "lfw/xnorm", "val/unmatched", "val/pictures", "train/lr", "std/val/nll"),
        *("seeds/val/nll_low", "eval/val/unique_samples", "val/own_std"),
    ),
    None: ("val/odd", "train/term", "best/val/odd", "odd"),
}


@pytest.mark.parametrize("better", DIRECTIONS)
def test_the_direction_of_a_metric_is_known_under_every_name_that_it_has(better):
    assert {name: metric_table.direction(name) for name in DIRECTIONS[better]} == dict.fromkeys(
        DIRECTIONS[better], better
    )


def test_an_evaluation_may_have_the_name_of_anything():
    names = ("time", "std", "cost", "seeds", "train", "iou", "loss", "nll", "best", "ema")
    assert {metric_table.mode(f"{name}/{net}nll") for name in names for net in ("", "ema/")} == {"min"}
    assert {metric_table.mode(f"{name}/{net}top1") for name in names for net in ("", "ema/")} == {"max"}


# ---- Nothing else states a direction ---------------------------------------------------------------------------------

WORDS = {"max", "min", "maximize", "minimize", "higher", "lower"}
HOME = ("metric_definitions.py", "metric_table.py", "metric_rules.py")
"""The table, and the check of recipes against it, in trainkit/config."""


def statements(source: str) -> list[int]:
    """Return the lines that decide a direction: a word compared with a mode, a list of metrics, a function."""
    metrics, found = {name.partition(".")[0] for name in metric_table.names()}, []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = {ast.unparse(side).rpartition(".")[2] for side in (node.left, *node.comparators)}
            wrong = bool(sides & {f"'{word}'" for word in WORDS}) and any(
                "mode" in side or "direction" in side for side in sides
            )
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            values = {ast.unparse(value).strip("'") for value in node.values}
            wrong = bool(keys & metrics) and values <= {*WORDS, "none", "True", "False", "1", "-1"}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            wrong = len(metrics & set(re.split(r"[|()?]", node.value))) > 1
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Set | ast.Tuple | ast.List | ast.Call):
            said = {one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
            name = ast.unparse(node.targets[0]).lower()
            wrong = bool(said & metrics) and re.search("lower|higher|less|better|minimi|maximi", name) is not None
        else:
            wrong = isinstance(node, ast.FunctionDef) and node.name.endswith("is_better")
        found += [node.lineno] if wrong else []
    return found


def test_no_other_file_states_a_direction():
    package = ROOT / "trainkit"
    files = [file for file in sorted(package.rglob("*.py")) if file.parent.name != "config" or file.name not in HOME]
    assert len(files) > 300
    found = {str(file.relative_to(package)): statements(file.read_text(encoding="utf-8")) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "sign = -1 if best.mode == 'max' else 1",
        "wanted = direction != 'lower'",
        "found = {'nll': 'lower', 'top1': 'higher'}",
        "SIGNS = {'eer': -1}",
        "_LOWER = re.compile(r'nll|ece|loss')",
        "LOWER = {'nll', 'ece'}",
        "lower_better = frozenset(('hd95_mean_mm',))",
        "def lower_is_better(metric): ...",
    ],
)
def test_such_a_statement_is_found(source):
    assert statements(source)
