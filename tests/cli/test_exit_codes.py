"""Any words, in any environment: every verb ends with a documented exit code and a sentence, never with a traceback.

No verb is let do its work: what is looked at is what comes before it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re

import pytest
from click.testing import CliRunner
from runs import PLUGIN, ROOT, TOY

from trainkit.cli import main, train
from trainkit.distributed import stop_signal
from trainkit.environment import process
from trainkit.errors import UserError

CODES = {0, 1, 2, 130, 143}
"""Of docs/reference/exit-codes.md: done; refused by `promote`; a mistake of the user's; interrupted; told to stop."""


def verbs(group=main.main, before=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, (*before, name))
        else:
            yield (*before, name), command


VERBS = dict(verbs())
RECIPES = [path.stem for path in sorted((ROOT / "recipes").glob("*.yaml"))]
WORDS = [
    "", " ", "-", "--", "---", "=", "a=", "=a", "a=1", "..", "../..", "/", "/dev/null", "/proc/self/mem", "~",
    "nosuch.yaml", "optim.lr=fast", "optim.lr=1e400", "train.length=1 step", "data.train=/dev/zero", "a.b.c.d=1",
    "x" * 5000, "é", "\\x00", "\U0001f600", "\u202e", "\n", "\t", "%s", "{}", "$HOME", "`ls`", ";ls", "|", "&", "*",
    "?", "[a]", "run:x", "models:/x", "last", "best", "hf://a/b", "file:///etc/passwd", "-1", "0", "1",
    "99999999999999999999", "nan", "inf", "1e3", "None", "--help", "--resume", "--check", "--plugin", "--plugin=os",
    "--plugin=no.such", "--plugin=a b", "--seeds", "--seeds=-1", "--port", "--port=0", "--port=99999", "--names",
    "--size", "--size=0x0", "--size=9999999x1", "--spacing=nanxnanxnan",
    "--folds",
    "--sweep", "--score=x", "--image-size=-3", "--json", "--whole", "--most=1", "--against=x",
    "--group=(", "--patient=[", "--only=x", "--repeats=0", "--as=v1", "--from=/",
]  # fmt: skip
ENVIRONMENT = {
    "TRAINKIT_STORE": ["", " ", "/dev/null", "/dev/null/x", "/proc/x", "\x7f", "x" * 300, "~nobody/x", ".", "a\nb"],
    "TRAINKIT_DATA": ["", "/dev/null", "/nosuch", "~", "."],
    "TRAINKIT_CACHE": ["", "/dev/null", "/proc/x"],
    "MLFLOW_TRACKING_URI": [
        "", "garbage", "http://", "http://127.0.0.1:9", "file:///tmp/x", "sqlite://", "sqlite:////dev/null",
        "postgresql://127.0.0.1:9/x", "nosuch://x", "http://[::1", "http://me:pw@127.0.0.1:9", "sqlite:///" + "x" * 300,
    ],
    "WORLD_SIZE": ["", "two", "-1", "0", "1e3", "99999999999"],
    "RANK": ["", "x", "-1", "7"],
    "LOCAL_RANK": ["", "x"],
    "LANG": ["C", "nosuch"],
    "COLUMNS": ["", "x", "0", "-3", "1"],
    "HF_HOME": ["", "/dev/null"],
    "OMP_NUM_THREADS": ["", "x"],
    "PYTHONPATH": ["", "/dev/null"],
}  # fmt: skip


def drawn(rng: random.Random) -> tuple[tuple[str, ...], list[str], dict[str, str]]:
    """A verb, words and an environment."""
    verb = rng.choice(list(VERBS))
    options = [name for param in VERBS[verb].params for name in getattr(param, "opts", ()) if name.startswith("--")]
    pool = [WORDS, WORDS, RECIPES, options or WORDS, [str(TOY)], ["x.png", "set", "out", "x.yaml"]]
    words = [rng.choice(rng.choice(pool)) for _ in range(rng.randrange(6))]
    if rng.random() < 0.2:
        words = [word.replace("=", rng.choice("=:= ")) + rng.choice(["", "=", "\x01", "é"]) for word in words]
    names = rng.sample(list(ENVIRONMENT), rng.randrange(4))
    return verb, words, {name: rng.choice(ENVIRONMENT[name]) for name in names}


class Never:
    """Nobody asks to stop."""

    def at_once(self):
        return contextlib.nullcontext()

    def __call__(self) -> bool:
        return False


@pytest.fixture
def idle(monkeypatch, tmp_path, store):
    """Nothing trains, listens, downloads or measures; what comes before is done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    monkeypatch.setattr(stop_signal, "stop_flag", lambda: Never())
    from trainkit.diagnostics import benchmark_command, preflight, sync_audit
    from trainkit.experiments import launch
    from trainkit.tracking import ui

    monkeypatch.setattr(launch, "launch", lambda order, stopping, began: 0)
    monkeypatch.setattr(ui, "serve", lambda store, port=5000, say=None, named="": None)
    for module in (benchmark_command, preflight, sync_audit):
        answer = {sync_audit: [], preflight: 0}.get(module)
        monkeypatch.setattr(module, "command", lambda *words, answer=answer, **more: answer)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_any_words_in_any_environment_end_in_a_sentence(trials, idle):
    before = sorted(os.listdir(ROOT))
    for seed in trials(80, 20000):
        verb, words, environment = drawn(random.Random(f"words {seed}"))
        done = CliRunner().invoke(main.main, [*verb, *words], env=environment)
        shown = f"{environment} trainkit {' '.join(verb)} {words}\n{done.output}"
        assert done.exit_code in CODES, shown
        assert "Traceback" not in done.output, shown
        assert max(map(len, done.output.splitlines()), default=0) < 12_000, "a line that floods the terminal"
    assert sorted(os.listdir(ROOT)) == before


@pytest.mark.parametrize("words", [["sync"], ["cp", "a", "b"], ["relocate"], ["data", "verify", "x" * 5000]])
def test_a_name_that_no_disk_can_hold_is_said_to_be_too_long(idle, words):
    done = CliRunner().invoke(main.main, words, env={"TRAINKIT_STORE": "x" * 300})
    assert done.exit_code == 2 and done.output.startswith("error: ")
    assert "File name too long; give a shorter one" in done.output


def test_any_words_for_the_command_behind_the_launcher(trials, idle):
    for seed in trials(40, 5000):
        _, words, environment = drawn(random.Random(f"run {seed}"))
        done = CliRunner().invoke(train.run, words, env=environment)
        assert done.exit_code in CODES and "Traceback" not in done.output, f"{environment} {words}\n{done.output}"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        *(("WORLD_SIZE", word) for word in ("", "two", "-1", "1e3", "1.0", " 1", "0x2", "9" * 30, "\u0662")),
        *((name, "two") for name in ("RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")),
    ],
)
def test_what_a_launcher_should_have_set_is_a_number(idle, name, word):
    done = CliRunner().invoke(train.run, [str(TOY), "--plugin", "toy"], env={name: word})
    assert done.exit_code == 2 and done.output.startswith(("error: ", "[process")) and f"{name}: " in done.output


def test_numbers_of_a_launcher_fit_each_other(monkeypatch):
    for size, rank in (("0", "0"), ("2", "2"), ("1", "5")):
        monkeypatch.setenv("WORLD_SIZE", size)
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UserError, match="a number greater than RANK"):
            process.check_variables()
    monkeypatch.setenv("WORLD_SIZE", "6")
    process.check_variables()
    monkeypatch.delenv("RANK")
    process.check_variables()
    monkeypatch.delenv("WORLD_SIZE")
    process.check_variables()


def test_the_codes_are_those_of_the_page():
    page = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == CODES
