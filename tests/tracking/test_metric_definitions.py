"""Every metric that a training logs has a definition."""

from __future__ import annotations

import pytest
from runs import run

from trainkit.tracking.metric_definitions import DEFINITIONS, definition


@pytest.mark.usefixtures("store")
def test_every_metric_of_a_run_is_defined():
    ran = run("log.system_every=0.1 s", "time_to={val/accuracy: [0.01]}", "log.metrics=all")
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
        ("speed/ceiling_eval_val", "speed/ceiling_eval_<evaluation>"),
        ("pooled/val/top1_low", "pooled/<metric>_low"),
        ("sweep/best/val/top1", "sweep/best/<metric>"),
        ("system/gpu_1_power_usage_watts", "system/gpu_<n>_power_usage_watts"),
        ("val/ema/top1", "<evaluation>/ema/<metric>"),
    ],
)
def test_the_narrowest_form_counts(name, form):
    found = definition(name)
    assert found is not None and found.name == form


def test_names_and_sentences_are_well_formed():
    every = [one for group in DEFINITIONS.values() for one in group]
    assert len({one.name for one in every}) == len(every)
    assert all(one.meaning.endswith(".") and one.meaning[0] == one.meaning[0].upper() for one in every)
