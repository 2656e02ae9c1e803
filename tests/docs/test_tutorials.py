"""The tutorials: every command of theirs runs on data like that which they speak of, up to an exported model."""

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

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def commands(page: Path) -> list[list[str]]:
    """The words of the commands of a page, in their order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = "".join(text for kind, text in fenced if not kind).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def flowers(home: Path) -> None:
    stripes(home / "flowers", 20, 1, (40, 48))


def shoes(home: Path) -> None:
    for seed, kind in enumerate(("sandals", "boots", "slippers")):
        stripes(home / "shoes" / kind, 8, seed, (32, 32))


def faces(home: Path) -> None:
    for person in range(13):
        for n in range(4):
            people_sets.picture(home / "faces" / f"p{person}" / f"{n}.png", 10 * person + n, (32, 32))


def streets(home: Path) -> None:
    scene_sets.folders(home / "streets", 12, (64, 96), splits=())


def organs(home: Path) -> None:
    organ_volumes.put_set(home / "scans", 5, shape=(24, 20, 12))


def crew(home: Path) -> None:
    people_sets.index(home / "crew", 8, (4, 2, 2, 2, 2))
    for n, file in enumerate(sorted((home / "crew").rglob("*.png"))):
        people_sets.picture(file, n, (64, 32))


TOLD: dict[str, tuple[Callable[[Path], None], str]] = {
    "images": (flowers, "train={length: 6 steps, batch_size: 8, ema: 0.9}"),
    "embeddings": (shoes, "train={length: 6 steps, batch_size: 8}"),
    "faces": (faces, "train={length: 6 steps, batch_size: 8}"),
    "segmentation": (streets, "train={length: 4 steps, batch_size: 4}"),
    "volumes": (organs, "train={length: 4 steps, batch_size: 2}"),
    "reid": (crew, "train={length: 4 steps, batch_size: 30, micro_batch: 30}"),
}
"""Of each page what writes its data, and what makes its runs short."""


def test_every_page_was_seen_and_leads_in_six_commands_to_a_comparison_and_an_exported_model():
    assert {page.stem for page in PAGES} == set(TOLD)
    for page in PAGES:
        every = commands(page)
        assert all(words[0] == "trainkit" for words in every), page
        assert [words[1] for words in every] == ["cp", "check", "run", "run", "compare", "export"], page
        copied = next(words for words in every if words[1] == "cp")
        assert (ROOT / "recipes" / f"{copied[2]}.yaml").is_file() and copied[4] == "--data"
        assert all(words[2] == copied[3] for words in every if words[1] in ("check", "run"))
        (first, second), (one, other) = [w for w in every if w[1] == "run"], every[-2][2:]
        assert every[-1][2] == one
        assert one == Path(first[2]).stem and f"name={other}" in second and f"log.experiment={one}" in second


@each_page
def test_every_link_of_a_page_leads_somewhere_and_the_page_is_linked(page):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))]
    assert links and not [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert f"tutorials/{page.name}" in (ROOT / "README.md").read_text(encoding="utf-8")


@each_page
def test_a_page_makes_a_recipe_of_its_data_that_check_understands(page, tmp_path, monkeypatch, cache):
    if page.stem == "volumes":
        pytest.importorskip("nibabel")
    monkeypatch.chdir(tmp_path)
    TOLD[page.stem][0](tmp_path)
    for words in commands(page):
        if words[1] in ("run", "compare", "export"):
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
    write, short = TOLD[page.stem]
    write(tmp_path)
    for words in commands(page):
        more = [short] if words[1] == "run" else []
        said = CliRunner().invoke(main.main, [*words[1:], *more], catch_exceptions=False)
        assert said.exit_code == 0, f"{shlex.join(words)}\n{said.output}"
        if words[1] == "run":
            assert {run.info().status for run in Store.locate().runs()} == {"FINISHED"}
        if words[1] == "compare":
            assert "\nchanges in B\n" in said.output and "\nverdict  " in said.output
    assert len(Store.locate().runs()) == 2 and (tmp_path / words[3] / "model.onnx").is_file()
