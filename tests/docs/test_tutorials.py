"""The tutorials: every command of theirs runs on data like that which they describe, up to an exported model."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import organ_volumes
import people_sets
import pytest
import scene_sets
from click.testing import CliRunner
from runs import ROOT, stripes

from trainkit.cli import main
from trainkit.tracking.store import Store

PAGES = sorted(page for page in (ROOT / "docs" / "tutorials").glob("*.md") if page.stem != "index")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def commands(page: Path) -> list[list[str]]:
    """The words of the commands of a page, in their order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = "".join(text for kind, text in fenced if not kind).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def nothing(home: Path) -> None:
    """The recipes of this page have data of their own."""


def flowers(home: Path) -> None:
    stripes(home / "flowers", 20, 1, (40, 48))
    stripes(home / "new_images", 2, 2, (40, 48))


def shoes(home: Path) -> None:
    for seed, kind in enumerate(("sandals", "boots", "slippers")):
        stripes(home / "shoes" / kind, 8, seed, (32, 32))
    stripes(home / "new_images", 2, 3, (32, 32))


def faces(home: Path) -> None:
    for person in range(13):
        for n in range(4):
            people_sets.picture(home / "faces" / f"p{person}" / f"{n}.png", 10 * person + n, (32, 32))
    people_sets.picture(home / "new_images" / "a.png", 1, (112, 112))


def streets(home: Path) -> None:
    scene_sets.folders(home / "streets", 12, (64, 96), splits=())
    people_sets.picture(home / "new_images" / "a.jpg", 1, (64, 96))


def organs(home: Path) -> None:
    organ_volumes.put_set(home / "scans", 5, shape=(24, 20, 12))
    organ_volumes.put_set(home / "others", 1, shape=(24, 20, 12))
    (home / "others" / "image").rename(home / "new_scans")


def crew(home: Path) -> None:
    people_sets.index(home / "crew", 8, (4, 2, 2, 2, 2))
    for n, file in enumerate(sorted((home / "crew").rglob("*.png"))):
        people_sets.picture(file, n, (64, 32))
    people_sets.picture(home / "new_images" / "a.png", 1, (64, 32))


DATA: dict[str, tuple[Callable[[Path], None], str]] = {
    "first-run": (nothing, "train={length: 6 steps, batch_size: 8, ema: 0.9}"),
    "images": (flowers, "train={length: 6 steps, batch_size: 8, ema: 0.9}"),
    "embeddings": (shoes, "train={length: 6 steps, batch_size: 8}"),
    "faces": (faces, "train={length: 6 steps, batch_size: 8}"),
    "segmentation": (streets, "train={length: 4 steps, batch_size: 4}"),
    "volumes": (organs, "train={length: 4 steps, batch_size: 2}"),
    "reid": (crew, "train={length: 4 steps, batch_size: 30, micro_batch: 30}"),
}
"""By page: the function that writes its data, and the override that makes its runs short."""

OWN_DATA = ["cp", "check", "run", "run", "compare", "export", "predict"]
"""Commands of every page but the first, in their order."""


def test_every_page_leads_in_seven_commands_from_data_to_two_compared_runs_and_predictions():
    assert {page.stem for page in PAGES} == set(DATA)
    for page in PAGES:
        every = commands(page)
        assert all(words[0] == "trainkit" for words in every) and len(every) <= 10, page
        (first, second), (one, other) = (
            [words for words in every if words[1] == "run"],
            next(words[2:] for words in every if words[1] == "compare"),
        )
        assert one == Path(first[2]).stem and f"name={other}" in second and f"log.experiment={one}" in second
        if page.stem == "first-run":
            assert [words[1] for words in every] == ["run", "show", "run", "compare"]
            continue
        assert [words[1] for words in every] == OWN_DATA, page
        copied = every[0]
        assert (ROOT / "recipes" / f"{copied[2]}.yaml").is_file() and copied[4] == "--data"
        assert all(words[2] == copied[3] for words in every if words[1] in ("check", "run"))
        assert every[-2][2] == every[-1][2] == one


@each_page
def test_every_link_of_a_page_leads_somewhere_and_the_page_is_linked(page):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))]
    assert links and not [link for link in links if "://" not in link and not (page.parent / link).exists()]
    others = [other for other in (ROOT / "docs").rglob("*.md") if other != page] + [ROOT / "README.md"]
    assert any(page.name in other.read_text(encoding="utf-8") for other in others)


@each_page
def test_a_page_makes_a_recipe_of_its_data_that_check_understands(page, tmp_path, monkeypatch, cache):
    if page.stem == "volumes":
        pytest.importorskip("nibabel")
    monkeypatch.chdir(tmp_path)
    DATA[page.stem][0](tmp_path)
    for words in commands(page):
        if words[1] not in ("cp", "check"):
            continue
        said = CliRunner().invoke(main.main, words[1:], catch_exceptions=False)
        assert said.exit_code == 0, said.output
        if words[1] == "check":
            assert "# to decide: line " in said.output and "not there yet" not in said.output


@pytest.fixture
def signals() -> Iterator[None]:
    """What signals do in this process, which a training changes, is as it was afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.usefixtures("signals")
@pytest.mark.timeout(900)
@each_page
def test_the_commands_of_a_page_run(page, tmp_path, monkeypatch, store, cache):
    if page.stem == "volumes":
        pytest.importorskip("monai")
    monkeypatch.chdir(tmp_path)
    write, short = DATA[page.stem]
    write(tmp_path)
    for words in commands(page):
        more = [short] if words[1] == "run" else []
        said = CliRunner().invoke(main.main, [*words[1:], *more], catch_exceptions=False)
        assert said.exit_code == 0, f"{shlex.join(words)}\n{said.output}"
        if words[1] == "run":
            assert {run.info().status for run in Store.locate().runs()} == {"FINISHED"}
        if words[1] == "compare":
            assert "\nchanges in B\n" in said.output and "\nverdict  " in said.output
        if words[1] == "export":
            assert (tmp_path / words[3] / "model.onnx").is_file()
        if words[1] == "predict":
            assert (tmp_path / words[4]).exists()
    assert len(Store.locate().runs()) == 2
