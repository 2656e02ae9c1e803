"""recipes/README.md: the table of the shipped recipes, generated from their headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from planned_recipes import runs

from trainkit.config import loader, yaml_reader
from trainkit.config.loader import RECIPES

PAGE = RECIPES / "README.md"
FILES = sorted(RECIPES.glob("*.yaml"))
WORDS = "paper|command|runs|figure|cost|result|data|reading|teacher|memory"
COLUMNS = ("recipe", "description", "task", "data", "paper", "runs", "cost", "measured here", "published")
ABOVE = (
    "# The recipes\n\n"
    "Each file is one experiment; this table is generated from the headers of the files. `trainkit show NAME` prints a "
    "recipe with all its defaults. `trainkit cp NAME mine.yaml --data FOLDER` copies one for your own data. See the "
    "[recipe file format](../docs/reference/recipe-file.md), the [tutorials](../docs/tutorials/images.md) and the runs "
    "behind the measured scores in [results](../docs/project/results/index.md). Every recipe runs "
    "in float32 on a CPU, and with 1, 2, 4, 8 and 16 processes; column `runs` adds precision and compilation "
    "on a GPU, and the processes that have no work.\n\n"
)


def said(path: Path) -> dict[str, str]:
    """The parts of a header by their word; what stands above them under `description`."""
    parts, word = {"description": ""}, "description"
    for line in loader.header(path).splitlines():
        if found := re.fullmatch(
            r"# (paper|command|runs|figure|cost|result|data|reading|teacher|memory)\s+(\S.*)", line
        ):
            word = found[1]
            parts[word] = found[2]
        elif text := line.lstrip("# "):
            parts[word] = f"{parts[word]} {text}".strip()
    return parts


def row(path: Path) -> list[str]:
    parts, tree = said(path), yaml_reader.read(path.read_text(encoding="utf-8")).tree
    task, data = tree["task"]["name"], f"`{tree['data']['train']}`"
    figures = [parts[word] for word in ("paper", "runs", "cost", "result", "figure")]
    figures[1] = figures[1].replace(" CPU: float32. 1, 2, 4, 8, 16 processes", "")
    figures[3] = re.sub(r"\.? Runs in docs/project/results/\w+\.md", ".", figures[3])
    return [f"[{path.stem}]({path.name})", parts["description"], task, data, *figures]


def page() -> str:
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(path) for path in FILES)]
    return ABOVE + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def test_the_page_says_what_the_headers_say(request):
    """`pytest --update-golden` writes it anew."""
    if request.config.getoption("--update-golden", default=False):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_header_says_what_the_recipe_runs_with(path):
    assert said(path)["runs"] == runs(path)


def test_every_recipe_has_a_row_in_which_nothing_is_empty():
    rows = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| [")]
    assert [cells[0] for cells in rows] == [f"[{path.stem}]({path.name})" for path in FILES] and len(rows) >= 23
    assert all(len(cells) == len(COLUMNS) and all(cell.strip("`") for cell in cells) for cells in rows)


def test_every_score_that_a_header_gives_as_measured_is_in_the_results():
    pages = (RECIPES.parent / "docs" / "project" / "results").glob("*.md")
    results = "".join(page.read_text(encoding="utf-8") for page in pages)
    given = {path.stem: re.findall(r"\b0\.\d+", said(path)["result"]) for path in FILES}
    assert sum(map(len, given.values())) > 40
    assert not {(name, score) for name, scores in given.items() for score in scores if score not in results}


def test_a_header_is_read_with_lines_that_go_on(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("# One.\n# Two.\n#\n# paper    A,\n#          B\n# cost     much\nname: x\n# paper    no\n")
    assert said(file) == {"description": "One. Two.", "paper": "A, B", "cost": "much"}
