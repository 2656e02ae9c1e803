"""Settings of `accelerate launch` beside those of a recipe: one holds, a contradiction is refused."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from runs import PLUGIN, ROOT, TOY, spawn

from trainkit.config.run_request import RunRequest, load
from trainkit.distributed import launch_settings
from trainkit.distributed.runtime import Runtime
from trainkit.environment import process
from trainkit.errors import EXIT_CODE, UserError
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


@pytest.mark.parametrize("processes", [1, 2])
def test_a_precision_of_the_launcher_that_the_recipe_does_not_share_ends_the_run(processes):
    done = spawn(processes, str(TOY), "--plugin", "toy", "train.precision='no'", ACCELERATE_MIXED_PRECISION="BF16")
    said = [line for line in done.stderr.splitlines() if "launch: " in line]
    assert done.returncode == (2 if processes == 1 else 1) and not Store.locate().runs(), done.stderr
    assert len(said) == 1 and "mixed_precision bf16" in said[0] and "train.precision" in said[0]
    assert "Traceback" not in done.stderr.partition("torch.distributed")[0]


SHARDED = {"use_fsdp": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"}
HALVE = "train.on_oom=halve"
AGREEING = [
    ({"mixed_precision": "no"}, "", ["train.precision=bf16"]),
    ({"mixed_precision": "bf16"}, "", ["train.precision=auto"]),
    ({"WORLD_SIZE": "2"}, "--num_processes 2", []),
    ({"use_cpu": "true"}, "", [HALVE]),
    (SHARDED, "", ["train.ema=0.9", "train.compile=default"]),
    (SHARDED, "", ["device.channels_last=true", "optim.fused=true"]),
]
"""The launcher's variables, its words and the recipe's."""
CONTRADICTORY = [
    ({"mixed_precision": "bf16"}, "", ["train.precision='no'"], "mixed_precision bf16, but recipe toy has"),
    ({"mixed_precision": "fp16"}, "", ["train.precision=bf16"], "mixed_precision fp16, but recipe toy has"),
    ({"mixed_precision": "fp16"}, "", ["train.precision=auto"], "fp16 on a CPU"),
    (SHARDED, "", [HALVE], "train.on_oom: halve, on 2 processes"),
    ({"use_fsdp": "true"}, "--use_fsdp", [], "FSDP1"),
    ({"use_megatron_lm": "true"}, "", [], "Megatron-LM"),
]
"""The same, and what is said."""


@pytest.fixture
def asked(launched, monkeypatch):
    """Set what a launcher of these variables and words leaves."""

    def set_all(options: dict[str, str], words: str) -> None:
        launched(**{name: value for name, value in options.items() if name.islower()})
        for name, value in options.items():
            if name.isupper():
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(process, "_parent_arguments", lambda: ["python", "accelerate", "launch", *words.split()])

    return set_all


@pytest.mark.parametrize("options, launcher, words", AGREEING)
def test_what_agrees_is_taken(options, launcher, words, asked):
    asked(options, launcher)
    launch_settings.check(recipe(*words))


@pytest.mark.parametrize("options, launcher, words, said", CONTRADICTORY)
def test_a_contradiction_is_refused_in_a_sentence(options, launcher, words, said, asked):
    asked(options, launcher)
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        launch_settings.check(recipe(*words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rank, launcher, waits", [("1", True, 1), ("0", True, 0), ("1", False, 0)])
def test_a_process_that_says_nothing_does_not_end_first(rank, launcher, waits, asked, monkeypatch):
    waited = []
    monkeypatch.setattr(launch_settings.time, "sleep", waited.append)
    asked({"mixed_precision": "bf16", "RANK": rank} | ({"TORCHELASTIC_RUN_ID": "none"} if launcher else {}), "")
    with pytest.raises(UserError) as caught:
        launch_settings.check(recipe("train.precision='no'"))
    assert caught.value.told == (rank != "0") and len(waited) == waits


def test_accelerate_divides_no_loss_by_the_number_of_micro_batches():
    from accelerate.state import AcceleratorState, GradientState

    for state in (AcceleratorState, GradientState):
        state._reset_state()
    runtime = Runtime(recipe("train.micro_batch=8"))
    assert runtime.accelerator.gradient_accumulation_steps == 1
    runtime.close()
    for state in (AcceleratorState, GradientState):
        state._reset_state()


LAUNCHES = {
    "--cpu --num_processes 2": "1 process started; expected 2",
    "--use_fsdp --num_processes 2 --main_process_port 0": "FSDP1",
    "--num_processes 1": "Device      cpu (no GPU found)",
    "--cpu": "Device      cpu (launcher: use_cpu), processes 1 (launcher), precision no (train.precision auto",
}
"""Options of the launcher; what is said."""


@pytest.mark.slow
@pytest.mark.parametrize("words", LAUNCHES)
def test_accelerate_launch_is_told_in_one_sentence_before_anything_starts_or_trains(words, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    script = [str(ROOT / "trainkit" / "run.py"), str(TOY), "--plugin", "toy", "train.length=2 steps"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *words.split(), *script]
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert LAUNCHES[words] in text, text
    if LAUNCHES[words].startswith("Device"):
        assert done.returncode == 0 and Store.locate().runs()[-1].info().status == "FINISHED", text
        return
    # Behind our message the launcher adds its own.
    ours = [line for line in text.splitlines() if LAUNCHES[words] in line]
    assert done.returncode != 0 and not Store.locate().runs(), text
    assert len(ours) == 1 and "Traceback" not in text[: text.index(ours[0])]
    assert f"exit status {EXIT_CODE}" in text or f"exitcode  : {EXIT_CODE}" in text


@pytest.mark.parametrize(
    "launched_in, word, precision",
    [
        ("no", "auto", "no (train.precision auto, for this device)"),
        ("bf16", "auto", "bf16 (launcher, since train.precision is auto)"),
        ("bf16", "bf16", "bf16 (train.precision)"),
        ("no", "bf16", "bf16 (train.precision)"),
    ],
)
def test_the_precision_is_said_with_its_source(launched, launched_in, word, precision):
    launched(use_cpu="true", mixed_precision=launched_in)
    assert str(launch_settings.precision(recipe(f"train.precision={word}"))) == precision


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
    line = next(line for line in done.stdout.splitlines() if line.startswith("Device "))
    assert line == (
        "Device      cpu (launcher: use_cpu), processes 1 (launcher), "
        "precision bf16 (launcher, since train.precision is auto), compile off (train.compile auto: a CPU)"
    )


@pytest.mark.parametrize(
    ("processes", "fsdp", "word", "said"),
    [
        ("2", "true", "no", "task.head.sharded: FSDP, which would divide the head again"),
        ("2", "false", "fp16", "task.head.sharded: precision fp16"),
        ("2", "false", "bf16", None),
        ("1", "false", "no", None),
    ],
)
def test_a_divided_head_is_refused_with_what_it_does_not_combine_with(processes, fsdp, word, said, asked):
    asked({"use_fsdp": fsdp, "FSDP_VERSION": "2", "WORLD_SIZE": processes}, "")
    words = ["task.head={sharded: true}", f"train.precision='{word}'"]
    faces = load(RunRequest(ROOT / "recipes" / "face_teacher.yaml", words))
    if said is None:
        launch_settings._refuse_sharded_head(faces)
    else:
        with pytest.raises(UserError, match=said):
            launch_settings._refuse_sharded_head(faces)
