"""Every verb of `trainkit`, and the literal command from any folder."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import click
import click_commands
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from runs import PLUGIN, ROOT, TOY, run

import trainkit
from trainkit import errors
from trainkit.analysis.run_scores import duration
from trainkit.autoconfig import new_recipe
from trainkit.checkpoint import verification
from trainkit.cli import main, train
from trainkit.config import loader
from trainkit.tracking.store import Store

HEAVY = {"rich", "torch", "mlflow", "timm", "datasets", "accelerate", "matplotlib", "numpy", "PIL", "yaml", "pydantic"}


def ask(*words: str, code: int = 0) -> str:
    """What a command says on both streams; it must end with this code and without a traceback."""
    result = CliRunner().invoke(main.main, list(words), catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with nothing of the checkout on its path."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run([sys.executable, *words], cwd=cwd, capture_output=True, text=True, env=env | environment)


def people(root: Path, size: int = 16) -> Path:
    draw = np.random.default_rng(0)
    for person in ("anna", "ben"):
        (root / person).mkdir(parents=True)
        for k in range(3):
            pixels = draw.integers(0, 256, (size, size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / person / f"{k}.png")
    (root / "pairs.csv").write_text("path_a,path_b,same\nanna/0.png,anna/1.png,1\nanna/0.png,ben/0.png,0\n")
    return root


# Help and mistakes


def test_help_answers_at_once_and_loads_nothing_heavy(tmp_path):
    code = (
        "import sys; from trainkit.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: print('loaded', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = command("-c", code, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    help_text, _, loaded = done.stdout.partition("loaded ")
    assert done.returncode == 0 and "Compare and choose:" in help_text and not HEAVY & set(loaded.split())
    assert min(seconds) < 0.3


def test_loading_any_recipe_imports_neither_torch_nor_what_is_slow():
    slow = "torch sympy mlflow accelerate matplotlib timm torchvision datasets sklearn scipy filelock monai nibabel"
    code = (
        "import sys; from pathlib import Path; from trainkit.config import loader as config\n"
        "for recipe in Path('recipes').glob('*.yaml'): config.load(recipe)\n"
        "print(*sys.modules)"
    )
    loaded = set(command("-c", code, cwd=ROOT).stdout.split())
    assert "trainkit.tasks.segment3d" in loaded and "trainkit.data.people.dataset" in loaded
    assert not loaded & {*slow.split(), "pandas", "pyarrow", "safetensors", "transformers"}


WORDS_AND_SECONDS = (
    "import resource, sys; from trainkit.cli.main import main\n"
    "try: main(sys.argv[1:])\n"
    "finally:\n"
    "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
    "    print('torch' in sys.modules, used.ru_utime + used.ru_stime)"
)


@pytest.mark.parametrize(
    ("recipe", "verb"),
    [("convnext", "run"), ("face_teacher", "check"), ("segment", "preflight"), ("tom500", "run"), ("reid", "check")],
)
def test_an_error_in_a_recipe_is_told_before_torch_is_imported(recipe, verb, tmp_path):
    libraries = "import resource, numpy, pydantic, click, yaml; u = resource.getrusage(resource.RUSAGE_SELF)"
    seconds = []
    for _ in range(3):
        # On a machine with other work the same imports take more CPU time.
        least = float(command("-c", f"{libraries}; print(u.ru_utime + u.ru_stime)", cwd=tmp_path).stdout)
        words = ("-c", WORDS_AND_SECONDS, verb, str(ROOT / "recipes" / f"{recipe}.yaml"))
        done = command(*words, "data.nosuch=1", "optim.lr=fast", cwd=tmp_path, PYTHONPATH=str(ROOT))
        assert done.returncode == 2 and "data.nosuch" in done.stderr and "found 'fast'" in done.stderr
        torch, used = done.stdout.split()
        assert torch == "False"
        seconds.append((float(used), least))
        if float(used) < max(0.6, 6 * least):  # with torch it would be 12 times as much
            break
    else:
        pytest.fail(f"CPU seconds, and those of the libraries alone: {seconds}")


def test_runs_and_recipes_are_shown_and_listed_without_torch(store, tmp_path):
    run = Store.locate().new_run("convnext", 0, "abc123")
    run.recipe.write_text(loader.dump(loader.load(ROOT / "recipes" / "convnext.yaml")))
    run.release()
    for words in (("ls",), ("show", "convnext"), ("show", run.name)):
        done = command("-c", WORDS_AND_SECONDS, *words, cwd=tmp_path, PYTHONPATH=str(ROOT))
        assert done.returncode == 0 and done.stdout.split()[-2] == "False", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["show"], "Missing argument 'WHAT'"),
        (["ls", "--loud"], "No such option '--loud'"),
        (["ui", "--port", "much"], "'much' is not a valid integer"),
        (["data", "import", "a", "b", "--resize", "up"], "'up' is not one of"),
        (["check", "nosuch.yaml"], "no such file"),
        (["show", "nosuch.yaml"], "no such file"),
        (["show", "nosuch"], "run 'nosuch': not in"),
        (["download", "nosuch.yaml"], "no such file"),
        (["cp", "nosuch.yaml", "x.yaml"], "no such file"),
        (["data", "import", "nosuch", "x"], "nosuch: does not exist"),
        (["check", "adadistill", "optim.lrr=1"], "optim.lrr"),
        (
            ["check", "face_teacher", "train.length=40 steps"],
            "is longer than the training, length '40 steps', which would end at 0.89 of the full rate; shorten the "
            'warm-up too: train.schedule.warmup.over="4 steps"',
        ),
    ],
)
def test_every_mistake_is_one_message_and_exit_code_2(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = ask(*words, code=2)
    assert said.startswith("error: ") and said.count("error: ") == 1 and message in said and "Usage" not in said
    assert list(tmp_path.iterdir()) == [], "nothing was made"


def test_run_is_called_train_too_and_takes_the_name_of_a_shipped_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ask("train", "convnext", "--check") == ask("run", "convnext", "--check")


@pytest.mark.parametrize(("old", "said"), [("ladder", "trainkit bench now"), ("claims", "python -m benchmarks.claims")])
def test_what_became_of_a_command_is_said(old, said):
    assert said in ask(old, "--list", code=2) and f"\n  {old} " not in ask("--help")


def test_a_process_that_does_not_lead_signs_its_message(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert ask("show", "nosuch.yaml", code=2).startswith("[process 1] error: ")


def test_without_a_command_there_are_five_first_steps_and_the_way_to_all_commands():
    *steps, last = ask().splitlines()
    assert len(steps) == 5 and last.endswith(" trainkit --help")
    for line in steps:
        task, _, command = line.partition("  ")
        assert task and click_commands.parsed(command.strip()), line
    assert ask("data", code=2).count("Commands:") == 1


def test_help_has_a_heading_for_each_group_and_each_command_below_one():
    text = ask("--help")
    for heading in ("Train", "Data", "Compare and choose", "Speed", "Use the model", "Store"):
        assert f"\n{heading}:\n" in text
    assert ask("--version").strip().endswith(trainkit.__version__)
    grouped = [name for names in main.main.headings.values() for name in names]
    assert sorted(grouped) == sorted(main.main.commands) and "...\n" not in text.partition("Train:")[2], (
        "no sentence is cut off"
    )


@pytest.mark.parametrize("words", click_commands.paths(), ids=" ".join)
def test_each_command_and_option_has_help_and_an_example_that_is_a_command(words):
    command = click_commands.find(words)
    example = (command.help or "").rpartition("Example: ")[2].strip()
    assert example.startswith(f"trainkit {' '.join(words)}") and click_commands.parsed(example), words
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help and option.help[0].isupper(), f"{words} {option.opts}"


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    code = """from trainkit.cli.main import click, main
@main.command()
def flood():
    while True:
        click.echo('line')
main(['flood'])"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=-1, stderr=-1) as process:
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.wait(60) != 0 and process.stderr.read() == b""


ORDERS = "\x1b]0;owned\x07\x1b[2J\rall is well\x7f\x9b31m\u202egnp"
"""What a terminal obeys: another title, nothing on it, another line over this one, colours, the other direction."""


def test_names_that_others_chose_order_a_terminal_nothing(tmp_path, caplog, monkeypatch):
    import click

    def printed(call) -> str:
        # As to a terminal: without one click leaves some of them out by itself.
        said: list[str] = []
        monkeypatch.setattr(click, "echo", lambda text="", **more: said.append(str(text)))
        call()
        monkeypatch.undo()
        return "\n".join(said)

    folder = tmp_path / f"set {ORDERS}"
    people(folder)
    (folder / "anna" / f"{ORDERS}.png").write_bytes(b"no picture")
    for words in (["data", "verify", str(folder)], ["show", str(folder)], [f"nosuch{ORDERS}"], ["check", ORDERS]):

        def call(words=words):
            with pytest.raises(SystemExit):
                main.main(words)

        said = printed(call)
        assert r"\x1b]0;owned\x07" in said and not set(ORDERS) & set("\x1b\x07\r\x7f\x9b\u202e") & set(said), words
    with caplog.at_level("WARNING"):
        logging.getLogger("any.library").warning("class %s", ORDERS)
    assert r"class \x1b]0;owned\x07\x1b[2J\rall is well\x7f\x9b31m\u202egnp" in caplog.text
    assert errors.visible("Zoë\t名\n→ 1 µs") == "Zoë\t名\n→ 1 µs"
    assert errors.visible(os.fsdecode(b"caf\xe9")) == r"caf\udce9"


def test_a_set_with_a_name_that_is_not_utf8_is_refused_wherever_it_lies(tmp_path):
    home = tmp_path / os.fsdecode(b"caf\xe9")
    people(home / "faces")
    out = tmp_path / "out"
    said = ask("data", "import", str(home / "faces"), str(out), "--image-size", "16")
    assert "6 images of 2 people" in said
    (home / "faces" / "ben").rename(home / "faces" / os.fsdecode(b"bj\xf6rn"))
    for words in ([], ["--size", "16x16"]):
        said = ask("data", "import", str(home / "faces"), str(tmp_path / "other"), *words, code=errors.EXIT_CODE)
        assert "/faces: 1 name not in UTF-8, or with control characters:\n  bj\\xf6rn\nexpected" in said, said


def test_warnings_of_libraries_order_a_terminal_nothing_and_show_no_secret():
    """As of a file in whose name a sign of control stands. Figures write such signs as numbers, without a warning."""
    code = f"""import warnings, matplotlib
from trainkit.redact import hide_in_logs
from trainkit.plots.style import blank
hide_in_logs()
hide_in_logs()
warnings.warn({f"file {ORDERS}.png"!r})
warnings.warn("https://me:hunter2@host")
figure, axes = blank(2.0)
axes.set_title({f"class {ORDERS}"!r})
figure.savefig("/dev/null", format="png")"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert r"UserWarning: file \x1b]0;owned\x07\x1b[2J\rall is well\x7f\x9b31m\u202egnp.png" in done.stderr
    assert "UserWarning: https://host" in done.stderr and "hunter2" not in done.stderr and "Glyph" not in done.stderr
    assert not set(done.stderr) & set("\x1b\x07\r\x7f\x9b\u202e")


def test_nothing_prints_past_that():
    own = [file for file in (ROOT / "trainkit").rglob("*.py") if "click.echo(" in file.read_text(encoding="utf-8")]
    assert own == [ROOT / "trainkit" / "cli" / "options.py"]


# Recipes


def test_ls_lists_the_shipped_recipes_with_their_headlines():
    lines = ask("ls").splitlines()
    names = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {line.split()[0] for line in lines} == names
    assert "adadistill               AdaDistill on the built-in sample set" in ask("ls")


def test_show_of_a_recipe_is_its_header_and_all_its_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ask("show", "face_teacher")
    assert text.startswith((ROOT / "recipes" / "face_teacher.yaml").read_text().split("name:")[0])
    assert text.endswith(loader.dump(loader.load(ROOT / "recipes" / "face_teacher.yaml")))
    assert ask("show", "recipes/face_teacher.yaml") == ask("show", "face_teacher.yaml") == text
    monkeypatch.syspath_prepend(str(PLUGIN))
    assert ask("show", str(TOY), "--plugin", "toy").startswith("name: toy\n")


def test_check_prints_the_resolved_recipe_and_what_is_not_there_and_then_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ask("check", "adadistill", "optim.lr=0.5", "--all")
    assert "\n  lr: 0.5\n" in text and "not there yet" not in text
    teacher = "task.teacher={net: {name: iresnet18, embedding: 128}, weights: teacher.pth}"
    text = ask("check", "adadistill", "data.train=nowhere", "data.evaluate={a: gone.bin}", "evaluations={a: {}}",
               "best=null", teacher, "--all", code=2)  # fmt: skip
    text, _, error = text.rpartition("error: ")
    assert error.startswith(f"{tmp_path}/nowhere: does not exist"), "as run says"
    absent = [line for line in text.splitlines() if line.startswith("# not there yet: ")]
    assert [line.replace(f" {tmp_path}/", " ") for line in absent] == [
        "# not there yet: data.train: nowhere does not exist",
        "# not there yet: data.evaluate.a: gone.bin does not exist",
        "# not there yet: task.teacher.weights: teacher.pth does not exist",
    ]
    (tmp_path / "again.yaml").write_text(text)
    assert ask("check", "again.yaml", "--all", code=2).startswith(text), "what it prints is a recipe"
    assert ask("check", "again.yaml", code=2).partition("error: ")[0] == "".join(f"{x[2:]}\n" for x in absent)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "again.yaml"], "no store, no data"


@pytest.mark.parametrize(
    "words",
    [["check", "mine.yaml", "--all"], ["run", "mine.yaml", "--check"], ["sweep", "mine.yaml", "seed=1,2", "--check"]],
)
def test_check_ends_by_saying_that_the_recipe_is_valid_beside_what_it_prints(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "recipes" / "convnext.yaml", "mine.yaml")
    done = CliRunner().invoke(main.main, words, catch_exceptions=False)
    valid, following = done.stderr.splitlines()
    assert (done.exit_code, valid) == (0, "valid: mine.yaml") and done.output.endswith(done.stderr)
    verb = "sweep mine.yaml seed=1,2" if words[0] == "sweep" else "run mine.yaml"
    assert following == f"Next: trainkit {verb}  # train it" and click_commands.parsed(following)
    Path("printed.yaml").write_text(done.stdout)
    if words[0] == "check":
        assert loader.load(Path("printed.yaml")).name == "convnext", "what it prints is a recipe"
    done = CliRunner().invoke(main.main, [*words, "optim.lrr=1"], catch_exceptions=False)
    assert done.exit_code == 2 and "valid: " not in done.output


def test_a_recipe_in_this_folder_comes_before_a_shipped_one_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = (ROOT / "recipes" / "face_teacher.yaml").read_text().replace("\nname:", "\nseed: 7\nname:")
    (tmp_path / "face_teacher.yaml").write_text(mine)
    assert "\nseed: 7\n" in ask("check", "face_teacher.yaml", "--all")
    assert "\nseed: 0\n" in ask("check", "face_teacher", "--all")


def test_cp_marks_what_to_change_and_its_copy_passes_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = ask("cp", "face_teacher", "mine.yaml")
    text = Path("mine.yaml").read_text()
    assert said.startswith(
        f"mine.yaml: change the {text.count(new_recipe.MARK)} lines marked with {new_recipe.MARK!r}\n"
    )
    assert said.splitlines()[-1] == "Next: trainkit check mine.yaml  # validate it"
    explained = ask("check", "mine.yaml").splitlines()
    assert all(line.startswith("to decide: line ") for line in explained)
    assert len(explained) == text.count(new_recipe.MARK)
    resolved = ask("check", "mine.yaml", "--all").partition("\nname: ")[2]
    assert resolved == ask("check", "face_teacher", "--all").partition("name: ")[2]
    assert "already exists" in ask("cp", "face_teacher", "mine.yaml", code=2) and Path("mine.yaml").read_text() == text


def test_download_says_when_there_is_nothing_to_download(tmp_path):
    shutil.copy(ROOT / "recipes" / "face_teacher.yaml", tmp_path)
    assert "no downloads listed" in ask("download", str(tmp_path / "face_teacher.yaml"))


# Data


def test_data_is_imported_and_verified(tmp_path, monkeypatch):
    monkeypatch.chdir(people(tmp_path / "people").parent)
    said = ask("data", "import", "people", "set", "--image-size", "16")
    assert "set: 6 images of 2 people" in said
    assert "set: 0 problems, 0 to look at" in ask("data", "verify", "set")
    said = ask("data", "import", "people/pairs.csv", "test", "--image-size", "16", "--evaluation")
    assert "test: 3 images of 0 people" in said
    shared = ask("data", "verify", "set", "--against", "test")
    assert "warning: set: 3 of its 6 images are in test: " in shared and "0 problems, 1 to look at" in shared, (
        "no damage: code 0"
    )
    assert "exists" in ask("data", "import", "people", "set", "--image-size", "16", code=2)
    content = bytearray(Path("set/rows.arrow").read_bytes())
    content[-100] ^= 1
    Path("set/rows.arrow").write_bytes(content)
    assert "rows.arrow: is not what was written" in ask("data", "verify", "set", code=2)


def test_a_damaged_picture_is_named_or_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(people(tmp_path / "people").parent)
    Path("people/ben/1.png").write_bytes(b"not a picture")
    assert "ben/1.png" in ask("data", "import", "people", "set", "--image-size", "16", code=2)
    assert not Path("set").exists()
    said = ask("data", "import", "people", "set", "--image-size", "16", "--damaged", "skip")
    assert "5 images of 2 people" in said and "skipped: " in said


# Runs


TIMES = ("time/wall_s", "time/total_s")


def test_show_of_a_run_and_of_a_checkpoint(store, monkeypatch):
    ran = run("train.length=1 epoch")
    text = ask("show", ran.folder.name)
    ended, name, table, speed, facts = text.split("\n\n")[:5]
    facts = dict(line.split(None, 1) for line in facts.splitlines())
    at, best = (values[-1] for values in ran.history.series("best/val/accuracy"))
    wall, total, rate = (ran.history.series(f"final/{name}")[1][-1] for name in (*TIMES, "speed/samples_per_s"))
    assert ended.startswith(f"Finished in {duration(wall)}. Best val/accuracy {best:.4f} at step {at}, chosen among ")
    assert name == ran.folder.name
    assert [line.split()[0] for line in table.splitlines()] == ["val", "final", "best", "EMA"]
    throughput, time = speed.splitlines()[:2]
    assert throughput == f"Throughput  {rate:.1f} samples/s in training"
    assert time.startswith(f"Time        {duration(total)} of training: ")
    assert facts["name"] == ran.folder.name and facts["status"] == "FINISHED" and facts["last_step"] == "4"
    assert not set("[{'") & set(text), "no Python repr"
    (path,) = ran.folder.checkpoints.glob("step-*4")
    shown = ask("show", str(path))
    assert shown.strip() == verification.describe(path) and shown in text
    assert ask("show", "toy-s0") == ask("show", facts["run_id"]) == ask("show", str(ran.folder.path)) == text
    assert Store.locate().find("toy").info().status == "FINISHED", "looking changed nothing"
    damaged = path / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "Traceback" not in ask("show", str(path), code=0)


# The literal command


def test_the_command_works_uninstalled_and_from_any_folder(tmp_path):
    file = ROOT / "trainkit" / "run.py"
    done = command(str(file), "recipes/adadistill.yaml", "optim.lr=0.5", "--check", cwd=tmp_path)
    assert done.returncode == 0 and "\nvalid: " in f"\n{done.stderr}", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("verb", "rank"), [("run", "0"), ("run", "1"), ("preflight", "0")])
def test_the_first_line_names_the_recipe_before_torch_is_loaded_on_rank_0_alone(tmp_path, verb, rank):
    (tmp_path / "torch.py").write_text(
        "import os, sys\nprint('torch is loaded', file=sys.stderr, flush=True)\nos._exit(9)\n"
    )
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from trainkit.cli import main as cli"
    words = ("-c", f"{code}; cli.main()", verb, "adadistill", "train.length=1 epochs")
    done = command(*words, cwd=tmp_path, RANK=rank, WORLD_SIZE="2")
    first = ["adadistill: starting; loading torch and accelerate"] * (rank == "0")
    assert (done.returncode, done.stderr.splitlines()) == (9, [*first, "torch is loaded"])


def test_the_command_reads_its_words_in_any_order(monkeypatch):
    orders = []
    monkeypatch.setattr(
        "trainkit.experiments.launch.launch", lambda order, stopping, began: orders.append(order) or 143
    )
    asked = (
        ["x.yaml", "--resume"],
        ["x.yaml", "a=1", "--resume", "name", "b=2"],
        ["--plugin", "p", "x.yaml"],
        ["x.yaml", "a=1", "--resume", "b=2", "c=3"],
    )
    for words in asked:
        assert CliRunner().invoke(train.run, words).exit_code == 143
    done = CliRunner().invoke(train.run, ["adadistill", "--check"])
    assert "valid: " in done.stderr
    assert [(str(o.path), o.resume, tuple(o.overrides), tuple(o.plugins)) for o in orders] == [
        ("x.yaml", "", (), ()),
        ("x.yaml", "name", ("a=1", "b=2"), ()),
        ("x.yaml", None, (), ("p",)),
        ("x.yaml", "", ("a=1", "b=2", "c=3"), ()),
    ]
