"""README and docs: the files they name exist, the commands they show parse, and the recipes they show load."""

import functools
import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from trainkit.cli import main, train
from trainkit.cli.options import recipe_file
from trainkit.config import loader
from trainkit.environment.version import __version__

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [README, CONTRIBUTING, ROOT / "README_zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN = (
    "my_faces",
    "mine",
    "flowers",
    "dots",
    "shoes",
    "streets",
    "organs",
    "crew",
    "faces",
)  # recipes that the pages have their reader make
ENDING = r"\.(?:py|yaml|md|txt|toml|lock|cff)"


def blocks(page: Path, language: str = "") -> list[str]:
    """Fenced blocks of one language; of none by default."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


def commands(page: Path) -> list[list[str]]:
    """The words of every command line in the blocks of a page, without what is set before it."""
    lines = []
    for line in "".join(blocks(page)).split("\n"):
        if re.match(r"(\w+=\S+ )*(\.venv/bin/)?(trainkit|accelerate|python3?|pytest|mlflow|make) (?!-s)", line):
            words = shlex.split(line, comments=True)
            while "=" in words[0]:
                words.pop(0)
            lines.append([words[0].removeprefix(".venv/bin/"), *words[1:]])
    return lines


def tree(text: str) -> set[str]:
    """Paths in an annotated tree: folders end in /, indentation is depth, and a line may name several files."""
    paths, above = set(), []
    for line in text.split("\n"):
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 4
        first = line.split()[0].rstrip(",")
        del above[depth:]
        if first.endswith("/"):
            above.append(first)
            paths.add("".join(above))
        named = re.findall(rf"(?<![\w/.])[\w.]+{ENDING}(?!\w)", line)
        paths.update("".join(above) + name for name in named)
        if not first.endswith("/"):
            paths.add("".join(above) + first)
        paths.update(re.findall(r"\.ci/run", line))
    return paths


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: what git tracks cannot be asked")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def the_tree() -> set[str]:
    (text,) = [text for text in blocks(CONTRIBUTING) if text.startswith("trainkit/\n")]
    assert len(text.splitlines()) <= 30
    return tree(text)


def test_the_layout_names_every_top_level_entry_and_every_package_and_nothing_that_is_not_there():
    files = tracked()
    entries = {path.split("/")[0] for path in files} - {"README.md", ".gitignore"}
    shown = the_tree()
    assert entries <= {path.split("/")[0] for path in shown}
    folders = {f"{parent}/" for path in files for parent in list(map(str, Path(path).parents))[:-1]}
    assert {path for path in shown if path.endswith("/")} <= folders
    assert {path for path in shown if path.endswith(".py")} <= set(files)
    assert {f for f in folders if f.startswith("trainkit/") and f.count("/") == 2} <= shown


@pytest.mark.parametrize("folder", ["recipes", "accelerate_configs", "docs"])
def test_every_recipe_accelerate_config_and_page_is_mentioned(folder):
    text = "".join(page.read_text(encoding="utf-8") for page in (*PAGES, ROOT / "recipes" / "README.md"))
    files = [file.name for file in (ROOT / folder).rglob("*") if file.is_file() and file.suffix in (".md", ".yaml")]
    assert files and not [name for name in files if name not in text]


def test_every_relative_link_leads_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        relative = [link.split("#")[0] for link in links if "://" not in link]
        assert not [link for link in relative if not (page.parent / link).exists()], page


@functools.cache
def anchors(page: Path) -> set[str]:
    """What a link into a page may lead to: what GitHub makes of its headings, and the anchors of generated pages."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)"', text))


def test_every_link_into_a_page_leads_to_a_heading():
    for page in PAGES:
        links = re.findall(r"\]\(([^)\s:]*\.md|)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
        assert not [(to, part) for to, part in links if part not in anchors(page.parent / to if to else page)], page


def test_every_file_of_the_repository_that_a_page_names_exists():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(rf"\b(?:trainkit|tests|benchmarks|accelerate_configs)/[\w/]+{ENDING}", text))
        assert not [path for path in named if not (ROOT / path).exists()], page


def known_options(command: click.Command) -> set[str]:
    return {word for parameter in command.params for word in parameter.opts} | {"--help"}


def test_every_command_that_is_shown_is_understood():
    """Its verb and options exist, and a shipped recipe takes the words that change it."""
    seen = 0
    for page in PAGES:
        for words in commands(page):
            if words[0] == "trainkit":
                command: click.Command = main.main
                rest = words[1:]
                while isinstance(command, click.Group):
                    assert rest[0] in command.commands, words
                    command, rest = command.commands[rest[0]], rest[1:]
            elif "trainkit/run.py" in words:
                command, at = train.run, words.index("trainkit/run.py")
                rest = words[at + 1 :]
                if "--config_file" in words:
                    assert (ROOT / words[words.index("--config_file") + 1]).is_file(), words
            else:
                continue
            seen += 1
            assert {word.split("=")[0] for word in rest if word.startswith("--")} <= known_options(command), words
            recipe = recipe_file(rest[0]) if rest else Path()
            if command.name in ("run", "check") and (ROOT / recipe).is_file() and "--plugin" not in rest:
                loader.load(ROOT / recipe, [word for word in rest[1:] if re.match(r"[\w.]+=", word)])
            takes_a_recipe = any(parameter.name == "recipe" for parameter in command.params)
            if takes_a_recipe and re.fullmatch(r"(recipes/)?[a-z]\w*(\.yaml)?", rest[0]) and recipe.stem not in OWN:
                assert (ROOT / recipe).is_file(), words
    assert seen >= 15


def test_every_verb_is_explained():
    text = "".join(" ".join(words) + "\n" for page in PAGES for words in commands(page))
    text += "".join(re.findall(r"`(trainkit [^`]*)`", "".join(page.read_text() for page in PAGES)))
    verbs = [verb for verb in main.main.commands if verb not in ("run", "data")]
    verbs += [f"data {verb}" for verb in main.main.commands["data"].commands]
    assert not [verb for verb in verbs if f"trainkit {verb}" not in text]


def shown_recipes() -> list[tuple[str, str]]:
    """All but Kubernetes manifests (test_distributed.py), and that of docs/how-to/extend.md (test_extending.py)."""
    pages = [page for page in PAGES if page.stem not in ("clusters", "extend")]
    return [(page.name, text) for page in pages for text in blocks(page, "yaml")]


@pytest.mark.parametrize("page, text", shown_recipes(), ids=lambda value: value.split("\n")[0])
def test_every_recipe_that_is_shown_loads(page, text, tmp_path):
    """A whole one as it stands; blocks of one in place of those of a shipped recipe."""
    if not text.startswith("name:"):
        own = yaml.safe_load(text)
        whole = (ROOT / "recipes" / "adadistill.yaml").read_text(encoding="utf-8")
        # What is not shown must go with what is: the evaluations of the shipped recipe are those of its own data.
        gone = {*own, *(("evaluations", "best") if "data" in own or "evaluations" in own else ())}
        kept = [part for part in re.split(r"^(?=\w)", whole, flags=re.MULTILINE) if part.split(":")[0] not in gone]
        text = "".join([*kept[1:], text])
    (tmp_path / "shown.yaml").write_text(text, encoding="utf-8")
    assert loader.load(tmp_path / "shown.yaml").name == yaml.safe_load(text)["name"]


def test_the_readme_is_short_shows_an_image_first_and_names_the_number_of_recipes():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150 and max(map(len, text.splitlines())) < 260 and "<!--" not in text
    assert text.index("![") < text.index("\n## ")
    (number,) = re.findall(r"All (\d+) recipes", text)
    assert int(number) == len(list((ROOT / "recipes").glob("*.yaml")))


def test_the_version_is_in_the_changelog_and_in_the_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__ and citation["cff-version"] == "1.2.0" and citation["authors"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)[0] == __version__
