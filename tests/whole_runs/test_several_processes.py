"""One process and several: what is equal, to the bit or nearly, and what the launcher is not allowed to hide."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from runs import PLUGIN, ROOT, TOY, Ran, _port, all_same, evaluated, newest, run, spawn

from trainkit.rng import permutation

pytestmark = pytest.mark.usefixtures("store")
TRAIN = [str(TOY), "--plugin", "toy"]
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
    "FSDP_MIN_NUM_PARAMS": "500",
}


def train(processes: int, *words: str, code: int = 0, **environment: str) -> Ran:
    done = spawn(processes, *TRAIN, *words, **environment)
    # torchrun turns every code but 0 into 1.
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    assert ("Stopped after " if code else "Finished in ") in done.stdout, done.stdout + done.stderr
    return Ran(done.returncode, newest())


def test_a_process_leaves_when_its_threads_and_handlers_are_done_and_is_not_taken_down_object_by_object():
    code = (
        "import atexit, os, threading, time; from trainkit.environment import process as launcher\n"
        "class Held:\n    def __del__(self): os.write(1, b'taken down\\n')\n"
        "held = Held()\n"
        "atexit.register(print, 'handler', end='')\n"
        "threading.Thread(target=lambda: time.sleep(0.2) or print('thread')).start()\n"
        "launcher.leave(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "thread\nhandler", "")


def test_two_processes_train_and_score_like_one_resume_to_the_bit_and_score_a_checkpoint_identically():
    plain = ["task.norm=false", "task.dropout=0.0", "train.length=20 steps", "log.every=1 steps", "train.ema=null"]
    one, two = run(*plain), train(2, *plain)
    losses = [ran.series("train/loss") for ran in (one, two)]
    assert len(losses[0]) == 20 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert set(two.series("eval/val/unique_samples")) == {37.0}
    scored = [evaluated(n, *TRAIN, *plain, "--score", one.folder.name) for n in (1, 2)]
    assert scored[0] and scored[0] == scored[1]


def test_on_two_processes_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one():
    whole = train(2)
    cut = train(2, "task.signal_at=6", code=143)
    assert cut.folder.info().status == "KILLED" and cut.last.step in (7, 8)
    # The switch is part of the recipe, so it stays on; the step at which it acts is behind.
    resumed = train(2, "task.signal_at=6", "--resume")
    assert resumed.folder == cut.folder
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable
    assert torch.equal(whole.last.tensors["memory"]["mean"], resumed.last.tensors["memory"]["mean"])


@pytest.mark.slow
def test_on_three_processes_too_whose_sums_of_gradients_round_by_the_order_of_buckets():
    words = ["train.batch_size=12", "train.micro_batch=4", "log.every=1 steps"]
    whole = train(3, *words)
    train(3, *words, "task.signal_at=6", code=143)
    resumed = train(3, *words, "task.signal_at=6", "--resume")
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable


@pytest.mark.slow
def test_a_sharded_checkpoint_loads_on_one_process_and_back():
    plain = ["task.norm=false", "task.dropout=0.0", "log.every=1 steps"]
    whole = run(*plain)
    first = train(2, *plain, "task.signal_at=3", code=143, **FSDP)
    assert first.last.state["machine"]["parallelism"] == "FSDP"
    keys = whole.last.tensors["model"].keys()
    assert first.last.tensors["model"].keys() == keys and first.folder.info().status == "KILLED"
    second = spawn(1, *TRAIN, *plain, "task.signal_at=3", "--resume")
    assert second.returncode == 2 and "--elastic" in second.stderr and "processes 2" in second.stderr
    done = train(1, *plain, "task.signal_at=3", "--resume", "--elastic")
    assert done.last.step == 12
    for group in ("model", "ema"):
        for name, tensor in done.last.tensors[group].items():
            torch.testing.assert_close(tensor, whole.last.tensors[group][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_one_process_goes_on_sharded():
    plain = ["task.norm=false", "task.dropout=0.0", "train.ema=null", "task.signal_at=3"]
    train(1, *plain, code=143)
    done = train(2, *plain, "--resume", "--elastic", **FSDP)
    whole = run("task.norm=false", "task.dropout=0.0", "train.ema=null")
    for name, tensor in done.last.tensors["model"].items():
        torch.testing.assert_close(tensor, whole.last.tensors["model"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_sharded_averaged_and_compiled_at_once_a_run_is_nearly_the_one_without(store):
    plain = ["task.norm=false", "task.dropout=0.0", "log.every=1 steps", "train.ema=0.9"]
    whole = run(*plain)
    done = spawn(2, *TRAIN, *plain, "train.compile=default", **FSDP)
    assert done.returncode == 0, done.stdout + done.stderr
    ran = Ran(0, newest())
    assert ran.last.state["machine"]["parallelism"] == "FSDP" and "compile default (train.compile)" in done.stdout
    assert ran.series("train/loss") == pytest.approx(whole.series("train/loss"), rel=1e-4)
    for group in ("model", "ema"):
        assert ran.last.tensors[group].keys() == whole.last.tensors[group].keys()
        for name, tensor in ran.last.tensors[group].items():
            torch.testing.assert_close(tensor, whole.last.tensors[group][name], rtol=1e-4, atol=1e-5)


def launch(*words: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


@pytest.mark.slow
def test_two_launchers_on_loopback_train_as_two_nodes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    config, port = str(ROOT / "accelerate_configs" / "multi_node.yaml"), str(_port())
    nodes = []
    for rank in ("0", "1"):
        words = ["--config_file", config, "--num_processes", "2", "--machine_rank", rank, "--main_process_port", port]
        nodes.append(launch(*words, str(ROOT / "trainkit" / "run.py"), *TRAIN, "train.length=4 steps"))
        time.sleep(1)
    texts = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert "2 processes x 1 micro-batch x 8" in texts[0] and newest().info().status == "FINISHED"


@pytest.mark.slow
def test_the_file_that_accelerate_config_writes_works_with_the_literal_command(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    command = str(Path(sys.executable).with_name("accelerate"))
    words = ["config", "default", "--mixed_precision", "bf16"]
    subprocess.run([command, *words], check=True, capture_output=True)
    assert (tmp_path / "accelerate" / "default_config.yaml").is_file()
    words = [command, "launch", "trainkit/run.py", *TRAIN, "train.length=4 steps"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    precision = "precision bf16 (launcher, since train.precision is auto)"
    assert f"Device      cpu (launcher: use_cpu), processes 1 (launcher), {precision}" in done.stdout
    assert newest().info().status == "FINISHED"


def test_every_accelerate_config_is_understood_by_accelerate():
    from accelerate.commands.config.config_args import load_config_from_file

    files = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
    assert {file.stem for file in files} == {
        "cpu", "cpu_2proc", "one_gpu", "one_gpu_fp16", "all_gpus", "multi_node", "fsdp2", "fp8",
    }  # fmt: skip
    for file in files:
        config = load_config_from_file(str(file))
        assert config.num_processes >= 1 and file.read_text().startswith("# ")
        assert file.stem != "cpu_2proc" or (config.num_processes, config.distributed_type) == (2, "MULTI_GPU")


@pytest.mark.slow
def test_the_fsdp2_config_shards_over_gloo(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    content = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2.yaml").read_text())
    content |= {"use_cpu": True, "num_processes": 2}
    content["fsdp_config"]["fsdp_min_num_params"] = 500
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(content))
    words = [str(ROOT / "trainkit" / "run.py"), *TRAIN, "train.length=4 steps"]
    done = launch("--config_file", str(tmp_path / "fsdp2.yaml"), *words)
    text, _ = done.communicate()
    assert done.returncode == 0, text
    assert Ran(0, newest()).last.state["machine"]["parallelism"] == "FSDP"


@pytest.mark.slow
def test_a_mistake_of_one_process_is_the_reason_that_all_give():
    row = permutation(0, 0, 64)[8]  # process 1 reads rows 8 to 15 of the first update
    done = spawn(2, *TRAIN, f"data.damaged={row}")
    text = done.stdout + done.stderr
    assert done.returncode != 0 and text.count(f"images/{row}: damaged on the other machine") == 1
    assert "Traceback" not in text.split("torch.distributed")[0] and newest().info().status == "FAILED"


def test_deepspeed_is_refused_with_the_reason():
    done = spawn(1, *TRAIN, ACCELERATE_USE_DEEPSPEED="true")
    assert done.returncode == 2 and "could not be resumed" in done.stderr and "Traceback" not in done.stderr
