"""Settings of `accelerate launch` beside those of a recipe: one holds, a contradiction is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from runs import PLUGIN, ROOT, TOY, spawn

from trainkit.config.run_request import RunRequest, load
from trainkit.distributed import launch_settings
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.tracking.store import Store

pytestmark = pytest.mark.usefixtures("store")


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def recipe(*words: str):
    return load(RunRequest(TOY, words, ("toy",)))


@pytest.fixture
def launched(monkeypatch):
    """Set what `accelerate launch` sets for its options."""

    def set_options(**options: str) -> None:
        for name, value in options.items():
            monkeypatch.setenv(f"ACCELERATE_{name.upper()}", value)

    return set_options


OPTIONS = {"dynamo_backend": ("eager", "train.compile"), "mixed_precision": ("bf16", "train.precision")}


def refused(text: str, option: str) -> bool:
    """Whether one sentence names the option of the launcher and the key of the recipe, and no run was begun."""
    value, key = OPTIONS[option]
    said = [line for line in text.splitlines() if "launch: " in line]
    one = len(said) == 1 and f"{option} {value}" in said[0] and key in said[0]
    return one and "Traceback" not in text.partition("torch.distributed")[0] and not Store.locate().runs()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_the_launcher_that_the_recipe_does_not_share_ends_the_run(option, processes):
    variable = {f"ACCELERATE_{option.upper()}": OPTIONS[option][0].upper()}
    done = spawn(processes, str(TOY), "--plugin", "toy", "train.precision='no'", **variable)
    assert done.returncode == (2 if processes == 1 else 1) and refused(done.stderr, option), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_accelerate_launch_hands_its_options_over_as_they_are_read(option, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    words = ["--cpu", f"--{option}={OPTIONS[option][0]}", str(ROOT / "trainkit" / "run.py"), str(TOY)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *words, "--plugin", "toy", "train.precision='no'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0 and refused(done.stderr.partition("Traceback")[0], option), done.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}, ["train.compile=off"]),
        ({"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}, ["train.compile=default"]),
        ({"dynamo_backend": "INDUCTOR", "dynamo_use_fullgraph": "True"}, ["train.compile=default"]),
        ({"dynamo_backend": "AOT_EAGER"}, ["train.compile=default"]),
        ({"mixed_precision": "bf16"}, ["train.precision='no'"]),
        ({"mixed_precision": "fp16"}, ["train.precision=bf16"]),
    ],
)
def test_a_contradiction_is_refused(launched, options, words):
    launched(**options)
    with pytest.raises(UserError, match=words[0].partition("=")[0]):
        launch_settings.check(recipe(*words))


@pytest.mark.parametrize(
    "options, words, precision",
    [
        ({"mixed_precision": "no", "dynamo_backend": "NO"}, [], "no (train.precision auto, for this device)"),
        ({"mixed_precision": "bf16"}, [], "bf16 (launcher, since train.precision is auto)"),
        ({"mixed_precision": "bf16"}, ["train.precision=bf16"], "bf16 (train.precision)"),
        ({"mixed_precision": "no"}, ["train.precision=bf16"], "bf16 (train.precision)"),
        ({"dynamo_backend": "INDUCTOR", "dynamo_use_dynamic": "False"}, ["train.compile=default"], None),
    ],
)
def test_what_agrees_is_taken(launched, options, words, precision):
    launched(use_cpu="true", **options)
    launch_settings.check(recipe(*words))
    assert precision is None or str(launch_settings.precision(recipe(*words))) == precision


def test_accelerate_compiles_nothing_though_the_launcher_asks_for_what_the_recipe_has(launched):
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend

    AcceleratorState._reset_state(reset_partial_state=True)
    launched(dynamo_backend="INDUCTOR", dynamo_mode="default")
    runtime = Runtime(recipe("train.compile=default"))
    assert runtime.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
    net = torch.nn.Linear(2, 2)
    assert runtime.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))[0] is net
    runtime.close()
    AcceleratorState._reset_state(reset_partial_state=True)


def test_the_plan_says_device_processes_precision_and_compile_mode_with_where_they_come_from():
    done = spawn(1, str(TOY), "--plugin", "toy", "train.length=2 steps", ACCELERATE_MIXED_PRECISION="bf16")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("device "))
    assert line == (
        "device cpu (launcher: use_cpu), processes 1 (launcher), "
        "precision bf16 (launcher, since train.precision is auto), compile off (train.compile)"
    )
