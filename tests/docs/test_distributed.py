"""docs/how-to/clusters.md: its job script, under a scheduler that is a few lines of shell."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from runs import PLUGIN, ROOT, TOY, Ran, _port, newest, until_a_row
from torch.distributed.run import get_args_parser

from trainkit.cli import train
from trainkit.config import loader
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError

PAGE = (ROOT / "docs" / "how-to" / "clusters.md").read_text(encoding="utf-8")
SRUN = """#!/bin/bash
# One task for each node, and the code of the last that failed.
code=0
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    SLURM_NODEID=$node "$@" &
    echo $! >> $SCHEDULER/tasks
done
for task in $(jobs -p); do wait $task || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
case "$1" in
    show) echo 127.0.0.1; echo 127.0.0.1 ;;
    requeue) echo $2 >> $SCHEDULER/requeued ;;
esac
"""
ACCELERATE = f"""#!/bin/bash
exec {sys.executable} -m accelerate.commands.launch "${{@:2}}"
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


MANIFESTS = {one["kind"]: one for text in blocks("yaml") for one in yaml.safe_load_all(text)}
PODS = {
    "Job": MANIFESTS["Job"]["spec"]["template"]["spec"],
    "TrainJob": MANIFESTS["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"
    ]["spec"],
}


@pytest.mark.parametrize("kind", PODS)
def test_a_pod_has_time_to_stop_room_to_write_and_no_root(kind):
    pod = PODS[kind]
    (container,), volumes = pod["containers"], {volume["name"]: volume for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] > 30 > loader.load(ROOT / "recipes/adadistill.yaml").limits.stop.seconds
    assert pod["restartPolicy"] == "Never" and pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claim = mounts["/volume"]["persistentVolumeClaim"]["claimName"]
    assert kind == "TrainJob" or claim == MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]
    named = {each["name"]: each["value"] for each in container["env"]}
    assert named["TRAINKIT_STORE"].startswith("/volume/") and {"HOME", "USER"} <= named.keys()


COMMANDS = {
    "Job": PODS["Job"]["containers"][0]["command"],
    "TrainJob": MANIFESTS["TrainJob"]["spec"]["trainer"]["command"],
    "torchrun": shlex.split(next(text for text in blocks("bash") if text.startswith("torchrun")).replace("\\\n", "")),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_lines_are_understood_by_torchrun_and_by_trainkit(name):
    program, *words = COMMANDS[name]
    launched = get_args_parser().parse_args(words)
    assert program == "torchrun" and launched.training_script == "trainkit/run.py"
    asked = train.run.make_context("run", launched.training_script_args).params
    loader.load(ROOT / asked["recipe"], asked["overrides"])
    assert asked["or_start"] and asked["elastic"] == (launched.nnodes == "1:4")
    assert name == "TrainJob" or launched.nproc_per_node == "8"


@pytest.mark.slow
def test_torchrun_starts_processes_again_when_one_is_killed_and_the_run_goes_on(store, tmp_path, monkeypatch):
    """By the command of the page, with two processes on one machine."""
    monkeypatch.setenv("PYTHONPATH", f"{PLUGIN}{os.pathsep}{ROOT}")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    words = list(COMMANDS["torchrun"])
    for theirs, ours in (
        ("8", "2"),
        ("10.0.0.1:29400", f"127.0.0.1:{_port()}"),
        ("recipes/adadistill.yaml", str(TOY)),
        ("trainkit/run.py", str(ROOT / "trainkit" / "run.py")),
    ):
        words[words.index(theirs)] = ours
    words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    words += ["--plugin", "toy", "train.length=150 steps", "log.every=10 steps"]
    said = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            for line in launcher.stdout:
                said.append(line)
                if re.match(" +50 ", line) and (children := psutil.Process(launcher.pid).children()):
                    children[-1].kill()
                    break
            said.append(launcher.communicate()[0])
        finally:
            launcher.kill()
    text = "".join(said)
    assert launcher.returncode == 0, text
    done = newest()
    assert "resumed from step-" in text and done.info().status == "FINISHED" and Ran(0, done).last.step == 150
    assert len(list((store / "runs").iterdir())) == 1


@pytest.mark.slow
def test_a_second_signal_ends_a_process_and_beneath_the_launcher_of_several_a_third():
    """torch's launcher passes on what a scheduler may have said to everybody; and what comes at once is one wish."""
    code = (
        "import os, signal, time\nfrom trainkit.distributed.stop_signal import stop_flag\nstopping = stop_flag()\n"
        "for n in range(5):\n    os.kill(os.getpid(), signal.SIGTERM)\n    print(n, stopping(), flush=True)\n"
        "    time.sleep(1.2 * (n > 1))"
    )
    for told, name in ((4, "NO_LAUNCHER"), (5, "TORCHELASTIC_RUN_ID")):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {name: "1"}, capture_output=True)
        said = done.stdout.decode().split()
        assert done.returncode == 143 and said == [word for n in range(told - 1) for word in (str(n), "True")]


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_the_age_of_a_command_is_that_of_its_launcher_unless_that_has_restarted_it(restarts):
    worker = (
        "import sys, time; from trainkit.environment import process as launcher; time.sleep(0.1); print(launcher.age())"
    )
    code = "import subprocess, sys, time; time.sleep(0.3); subprocess.run([sys.executable, '-c', sys.argv[2]])"
    environment = os.environ | {"TORCHELASTIC_RESTART_COUNT": restarts}
    ages = []
    for parent in ("accelerate", "other"):
        began = time.monotonic()
        words = [sys.executable, "-c", code, parent, worker]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        least = 0.4 if (parent, restarts) == ("accelerate", "0") else 0.1
        # The kernel counts in hundredths of a second.
        ages.append(float(done.stdout))
        assert least - 0.02 <= ages[-1] <= time.monotonic() - began - (0.4 - least) + 0.02, done.stderr


def test_what_differs_between_processes_is_named_on_each():
    others = [{"recipe": "a", "torch": "1"}, {"recipe": "a", "torch": "1"}, {"recipe": "b", "torch": "2"}]
    for main in (True, False):
        runtime = SimpleNamespace(world=3, main=main, all_gather=lambda thing: others)
        with pytest.raises(UserError, match=r"rank 2 differs from rank 0 in: recipe, torch; .*recipe: a and b") as no:
            Runtime.check_equal(runtime, others[0])
        assert no.value.told is not main
    others[2] = others[0]
    Runtime.check_equal(runtime, others[0])


@pytest.fixture
def job(tmp_path, monkeypatch, store):
    """The script of the page, for the toy on two nodes of one CPU process."""
    script = next(text for text in blocks("bash") if "#SBATCH" in text)
    script = re.sub(r"^export TRAINKIT_STORE=.*$", "", script, count=1, flags=re.MULTILINE)
    for theirs, ours in (
        ("recipes/adadistill.yaml", f'{TOY} --plugin toy train.length="1000 steps" log.every="10 steps"'),
        ("adadistill", "toy"),
        ("8 *", "1 *"),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    (tmp_path / "job.sh").write_text(script)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("accelerate", ACCELERATE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SCHEDULER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for name, value in (("SLURM_NNODES", "2"), ("SLURM_JOB_ID", "4711"), ("SLURM_JOB_NODELIST", "a[1-2]")):
        monkeypatch.setenv(name, value)
    return tmp_path


def start(job: Path) -> subprocess.Popen:
    (job / "tasks").unlink(missing_ok=True)
    words = ["bash", str(job / "job.sh")]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def signal_steps(job: Path, number: int) -> None:
    """As SLURM does before the time is up: to every process of every task, not to the batch script."""
    for task in map(int, (job / "tasks").read_text().split()):
        for each in [psutil.Process(task), *psutil.Process(task).children(recursive=True)]:
            each.send_signal(number)


@pytest.mark.slow
def test_a_job_with_a_mistake_is_not_queued_again(job):
    script = job / "job.sh"
    script.write_text(script.read_text().replace("log.every", "log.evry"))
    done = start(job)
    text = done.communicate()[0]
    assert "log.evry" in text and "did you mean" in text and not (job / "requeued").exists(), text


@pytest.mark.slow
def test_the_job_of_the_page_is_stopped_requeued_and_goes_on(job):
    first = start(job)
    seen = until_a_row(first)
    signal_steps(job, signal.SIGUSR1)
    text = seen + first.communicate()[0]
    assert (job / "requeued").read_text() == "4711\n", text
    cut = Ran(143, newest())
    assert cut.folder.info().status == "KILLED", text
    assert 1000 > cut.last.step >= cut.folder.info().last_step > 0
    second = start(job)
    text = second.communicate()[0]
    assert second.returncode == 0 and (job / "requeued").read_text() == "4711\n", text
    done = newest()
    assert done.name == cut.folder.name and done.info().status == "FINISHED" and Ran(0, done).last.step == 1000
