"""Nothing secret leaves: forty secrets lie wherever a run could take one up, and none is found in what it leaves."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import fake_secrets
import pytest
from click.testing import CliRunner
from runs import PLUGIN, ROOT, TOY, spawn

from trainkit import redact
from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.redact import holds_secret, without_secrets
from trainkit.tracking import tracker
from trainkit.tracking.store import Store

HEADER = "".join(f"# {line}\n" for text in fake_secrets.SAID.values() for line in text.splitlines())


@pytest.fixture
def planted(tmp_path, store) -> tuple[Path, dict[str, str]]:
    """A recipe whose header speaks of all, and an environment in which all stand: by their names and by others."""
    recipe = tmp_path / "given" / "leaky.yaml"
    recipe.parent.mkdir()
    text = TOY.read_text().replace("data: {name: toy}", "data: {name: leaky}")
    recipe.write_text(f"# A recipe to learn from\n#\n{HEADER}{text}")
    environment = {f"CANARY_{number}": text.replace("\0", "") for number, text in enumerate(fake_secrets.SAID.values())}
    environment |= {
        "HF_TOKEN": fake_secrets.SECRETS["HF_TOKEN"],
        "AWS_SECRET_ACCESS_KEY": fake_secrets.SECRETS["AWS secret"],
        "MLFLOW_TRACKING_PASSWORD": fake_secrets.SECRETS["MLflow"],
        "HTTPS_PROXY": f"http://me:{fake_secrets.SECRETS['password of a URI']}@proxy.example:3128",
        "WANDB_API_KEY": fake_secrets.SECRETS["W&B"],
        # A checkout whose remote holds a token, as git tells it.
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "remote.origin.url",
        "GIT_CONFIG_VALUE_0": fake_secrets.SAID["token in a remote"],
        "TRAINKIT_STORE": str(store),
        "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(ROOT / "tests" / "support")]),
    }
    return recipe, environment


def left(home: Path) -> dict[str, list[str]]:
    """Files below a folder in which secrets stand, and which."""
    files = (file for file in home.rglob("*") if file.is_file() and not file.is_symlink())
    return {str(file): kinds for file in files if (kinds := fake_secrets.found_in(file.read_bytes()))}


def clean(said) -> bool:
    return not fake_secrets.found_in((said.stdout + said.stderr).encode())


def ask(*words: str) -> str:
    done = CliRunner().invoke(main.main, [str(word) for word in words])
    assert done.exit_code in (0, 1, 2), done.output
    assert not fake_secrets.found_in(done.output.encode()), words
    return done.output


def test_there_are_forty_and_each_is_hidden_where_it_stands():
    assert len(fake_secrets.SAID) >= 40
    for kind, text in fake_secrets.SAID.items():
        assert fake_secrets.found_in(text.encode()) == [kind]
        hidden = without_secrets(text)
        assert not fake_secrets.found_in(hidden.encode()), kind
        assert without_secrets(hidden) == hidden, kind
    together = "\n".join(fake_secrets.SAID.values())
    assert not fake_secrets.found_in(without_secrets(together).encode())


def test_a_run_that_ends_well_leaves_none(planted, store, tmp_path, monkeypatch):
    recipe, environment = planted
    done = spawn(1, str(recipe), "--plugin", "toy", "--plugin", "leaky", "train.length=4 steps", **environment)
    assert done.returncode == 0, done.stderr
    assert "[hidden]" in done.stdout and "reading with" in done.stderr, "it did speak of them"
    assert clean(done) and left(store) == {}
    name = Store(store, f"sqlite:///{store}/mlflow.db").runs()[-1].name
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    for folder in (PLUGIN, ROOT / "tests" / "support"):
        monkeypatch.syspath_prepend(str(folder))
    for words in (
        ["show", name], ["compare", name, name], ["promote", name],
        ["export", name, tmp_path / "exported", "--plugin", "toy", "--plugin", "leaky"], ["ls"], ["sync"],
        ["check", recipe, "--plugin", "toy", "--plugin", "leaky"],
    ):  # fmt: skip
        ask(*words)
    assert left(store) == {}
    assert not (tmp_path / "exported").exists() or left(tmp_path / "exported") == {}


def test_a_run_that_crashes_in_its_loop_leaves_none_and_says_where_it_was(planted, store):
    recipe, environment = planted
    words = [str(recipe), "--plugin", "toy", "--plugin", "leaky", "data.fails_at=11"]
    done = spawn(1, *words, **environment)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr and "OSError: cannot open" in done.stderr
    assert "[hidden]" in done.stderr and clean(done) and left(store) == {}
    (folder,) = Store(store, f"sqlite:///{store}/mlflow.db").runs()
    assert folder.info().status == "FAILED"
    (told,) = store.glob("artifacts/**/error.txt")
    assert "OSError: cannot open" in told.read_text() and "leaky.py" in told.read_text()


@pytest.mark.slow  # the end of a run waits for its server
def test_a_server_that_is_away_is_named_without_them(planted, store):
    recipe, environment = planted
    secret = fake_secrets.SECRETS["password of a URI"]
    environment["MLFLOW_TRACKING_URI"] = f"http://{fake_secrets.SECRETS['user of a URI']}:{secret}@127.0.0.1:9/x"
    done = spawn(1, str(recipe), "--plugin", "toy", "--plugin", "leaky", **environment)
    assert done.returncode == 0 and "does not answer" in done.stderr
    assert clean(done) and left(store) == {}


def test_a_recipe_that_holds_one_is_refused_before_anything_is_made(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("HF_TOKEN", "GitHub", "password of a URI", "JWT"):
        said = ask("run", "adadistill", f"log.experiment={fake_secrets.SAID[kind]!r}")
        assert "log.experiment" in said and "holds a secret" in said, kind
    said = ask("run", "adadistill", "data.hub_token=canary12345678", f"name={fake_secrets.SECRETS['HF_TOKEN']}")
    assert said.count("holds a secret") == 2 and "canary12345678" not in said
    assert list(Path("mlruns").rglob("*")) == [Path("mlruns/mlflow.db")]


@pytest.mark.parametrize(
    ("key", "value", "is_one"),
    [
        ("hub_token", "x1", True), ("apiKey", "x1", True), ("db.password", "x1", True), ("client_secret", "x1", True),
        ("aws_secret_access_key", "x1", True), ("credentials", "x1", True), ("note", "hf_" + "a" * 34, True),
        ("uri", "postgres://me:pw@host/x", True), ("token", "", False), ("token", None, False), ("token", 3, False),
        ("token", "[hidden]", False), ("key", "label", False), ("image_key", "jpg", False), ("max_tokens", "77", False),
        ("tokenizer", "words", False), ("train", "hf://owner/name@v1", False), ("train", "/data/faces", False),
        ("author", "x1", False), ("url", "https://models.example/a@b", False), ("name", "keep", False),
    ],
)  # fmt: skip
def test_what_counts_as_a_secret_in_a_recipe(key, value, is_one):
    assert holds_secret(key, value) is is_one


@pytest.mark.parametrize(
    "text",
    [
        "step 3/40  loss 0.5312  812.4 samples/s", "data.train: nowhere does not exist", "task.net.tokens: unknown key",
        "KeyError: 'image'", "sqlite:////abs/mlflow.db", "run best-s0-1121 in use by process 7 on host", "PWD is /root",
        "https://arxiv.org/abs/2102.06171", "the key of a block: a word", "tokens per second: 300", "--key-frames 3",
        "a password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        "signature: (image, label)", "anna/0.png,ben/1.png,1", "sk-learn 1.9", "hf://some/faces@v1",
    ],
)  # fmt: skip
def test_what_is_no_secret_is_shown(text):
    assert without_secrets(text) == text


@pytest.mark.slow
def test_hiding_takes_time_in_proportion():
    """However a text is made up: otherwise a recipe could keep a machine busy."""
    begins = ("-----BEGIN PRIVATE KEY-----", "eyJaaaaaaaa.", "cookie", "a@", "login x password ")
    for piece in ("a.a-", "token", "a://", "://@", "--a-", *begins):
        seconds = []
        for size in (20_000, 200_000):
            text = piece * (size // len(piece))
            began = time.process_time()
            without_secrets(text)
            seconds.append(time.process_time() - began)
        assert seconds[1] < 40 * seconds[0] + 0.5, piece


def test_logs_of_any_library_show_none(caplog, monkeypatch):
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    redact.hide_in_logs()
    redact.hide_in_logs()  # once is enough
    log = logging.getLogger("urllib3.somewhere")
    with caplog.at_level(logging.DEBUG):
        log.debug("GET %s %d", "https://me:pa55@host/x", 3)
        try:
            raise OSError(fake_secrets.SAID["HF_TOKEN"])
        except OSError:
            log.exception("token=%s", fake_secrets.SECRETS["JWT"])
    assert "GET https://host/x 3" in caplog.messages[0]
    assert not fake_secrets.found_in(caplog.text.encode()) and "HF_TOKEN=[hidden]" in caplog.text
    assert "Traceback" in caplog.text


MISTYPED = (
    "https//alice:hunter2@host", "http:/alice:hunter2@host", "//alice:hunter2@host", "alice:hunter2@host",
    "http//:hunter2@host", "http:alice:hunter2@host/ml", "http;//alice:hunter2@host", "http:\\\\alice:hunter2@host",
    "file:alice:hunter2@host", "https//hunter2@host", "https:/hunter2@host", "//hunter2@host",
    "htp://alice:hunter2@host", "alice:hunter2@host:5000/ml", "postgresql:/alice:hunter2@host/db",
    "postgresql//alice:hunter2@host/db", "sqlite:/alice:hunter2@host/db", "alice:hun@hunter2@host",
)  # fmt: skip
SPLIT = (
    "http://alice:hunter2/x@host", "https://alice:hunter2#@host", "mysql://alice:hunter2?x@host",
    "http://a@b:hunter2/@host",
)  # fmt: skip
"""With a password in which the address seems to end."""


@pytest.mark.parametrize("uri", [*MISTYPED, *SPLIT])
def test_a_mistyped_address_of_a_store_shows_no_password(uri, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    redact.hide_in_logs()
    logging.getLogger("urllib3").warning("no connection to %s, said %s.", uri, repr(uri))
    if uri in MISTYPED:  # where a password ends that holds a slash nobody knows within a text
        assert "hunter2" not in caplog.text and "host" in caplog.text
        assert "hunter2" not in without_secrets(f"Invalid URL '{uri}/api': no scheme")
        assert holds_secret("log.experiment", uri) or ":hunter2" not in uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    said = CliRunner().invoke(main.main, ["sync", "x"]).output + CliRunner().invoke(main.main, ["ui"]).output
    assert "hunter2" not in said
    if not uri.startswith("htp:"):  # SQLAlchemy's to refuse
        with pytest.raises(UserError, match=r"^MLFLOW_TRACKING_URI: .*host.* expected .*://") as caught:
            Store.locate().prepare()
        assert "hunter2" not in str(caught.value)


# What would be found otherwise


def test_without_hiding_they_are_found_where_this_looks(store, monkeypatch):
    for folder in (PLUGIN, ROOT / "tests" / "support"):
        monkeypatch.syspath_prepend(str(folder))
    for name in ("without_secrets", "is_secret_name"):
        monkeypatch.setattr(tracker, name, (lambda text: text) if name == "without_secrets" else (lambda name: False))
    with pytest.raises(OSError, match="cannot open"):
        run_leaky("data.fails_at=11")
    found = left(store)
    assert any("mlflow.db" in file for file in found) and any("error.txt" in file for file in found), found
    kinds = {kind for kinds in found.values() for kind in kinds}
    assert len(kinds) > 30


def run_leaky(*words: str):
    from trainkit.config.run_request import RunRequest
    from trainkit.experiments.launch import launch

    return launch(RunRequest(TOY, ("data={name: leaky}", *words), ("toy", "leaky")), lambda: False)
