"""Settings of every test: no network, one thread, a store of its own, no painting; and what many tests share."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ["OMP_NUM_THREADS"] = "1"
for name in ("MLFLOW_TRACKING_URI", "TRAINKIT_DATA", "ACCELERATE_MIXED_PRECISION"):
    os.environ.pop(name, None)

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# The same examples in every run; with FUZZ others each time. A busy machine is no fault of a test.
hypothesis.settings.register_profile(
    "tests",
    derandomize=not os.environ.get("FUZZ"),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("tests")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from the recipes")
    parser.addoption("--soak", action="store_true", help="only tests that make trials, with many of them")
    parser.addoption("--seeds", type=lambda text: [int(word) for word in text.split(",")], help="these trials: 17,23")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a soak, keep the tests that make trials, and give each half a day."""
    if config.getoption("--soak"):
        items[:] = [item for item in items if "trials" in getattr(item, "fixturenames", ())]
        for item in items:
            item.add_marker(pytest.mark.timeout(12 * 3600), append=False)


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> Callable[[int, int], Iterator[int]]:
    """Yield seeds of trials: `few`, in a soak `many`; of a test that failed the last one printed."""

    def seeds(few: int, many: int) -> Iterator[int]:
        for seed in request.config.getoption("--seeds") or range(many if request.config.getoption("--soak") else few):
            print(f"trial {seed}", flush=True)
            yield seed

    return seeds


@pytest.fixture(scope="session")
def _stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New folders, one after another; pytest would look at all that there are for a free number."""
    home = tmp_path_factory.mktemp("stores")
    return (home / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_store(_stores: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to the store of the checkout."""
    home = next(_stores)
    home.mkdir()
    monkeypatch.setenv("TRAINKIT_STORE", str(home))


@pytest.fixture(autouse=True)
def _no_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install no handler of a training in the process of the tests, whose commands run there."""
    from trainkit.distributed import stop_signal
    from trainkit.environment import process

    monkeypatch.setattr(stop_signal, "stop_flag", stop_signal.Stop)
    monkeypatch.setattr(process, "die_with_parent", lambda: None)


@pytest.fixture(autouse=True)
def _unwatched() -> Iterator[None]:
    """Check that no test leaves a thread behind that may end the process: a watchdog, or one that hears signals."""
    yield
    assert not {thread.name for thread in threading.enumerate()} & {
        "trainkit-watchdog",
        "trainkit-stop",
        "trainkit-leave",
    }


@pytest.fixture(scope="session", autouse=True)
def _unpainted() -> Iterator[pytest.MonkeyPatch]:
    """Figures of runs are not painted, but for tests that ask for `painted`; those of the figures themselves are."""
    from unpainted_figures import leave_unpainted

    patch = pytest.MonkeyPatch()
    leave_unpainted(patch.setattr)
    yield patch
    patch.undo()


@pytest.fixture
def painted(_unpainted: pytest.MonkeyPatch) -> Iterator[None]:
    """Figures of runs are painted after all."""
    from unpainted_figures import leave_unpainted

    _unpainted.undo()
    yield
    leave_unpainted(_unpainted.setattr)


@pytest.fixture
def unsent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of the test are not sent to MLflow, which took half of a small run's time; but for those of tests `sent`."""
    from unsent_runs import leave_unsent

    if "sent" not in request.fixturenames:
        leave_unsent(monkeypatch.setattr)


@pytest.fixture
def sent() -> None:
    """Runs of the test are sent, though those of its module are not."""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small images of three classes: four of each to train on, seven to be scored."""
    from runs import stripes

    root = tmp_path_factory.mktemp("pictures")
    stripes(root / "train", 4, 0)
    stripes(root / "val", 7, 1)
    return root


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """What is there before a file of tests is left out of collections: a run collects, over all modules, in 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of packed data of the test's own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data sets beside the checkout."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("the real data sets (../shared/data) are not here")
    return path


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database, made once: making one takes a second or more, copying it nothing."""
    from trainkit.tracking.store import Store

    home = tmp_path_factory.mktemp("database")
    Store(home, f"sqlite:///{home}/mlflow.db").prepare()
    return home / "mlflow.db"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Path) -> Path:
    """A store of the test's own, its database in place."""
    home = tmp_path / "mlruns"
    home.mkdir()
    shutil.copy(database, home / "mlflow.db")
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    return home
