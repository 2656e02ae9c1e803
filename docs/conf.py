"""Build the documentation site: `make docs`.

The pages are plain Markdown that GitHub shows too. What a site needs beyond that is added here, while a page is read:
tables of contents for the sidebar, links to files outside docs/, pages of the repository's root, the notebook, anchors.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "trainkit"
author = "the trainkit maintainers"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["_build", "images/README.md"]
nitpicky = True
smartquotes = False  # two dashes begin an option
highlight_language = "none"
myst_heading_anchors = 6
suppress_warnings: list[str] = []

html_theme = "furo"
html_title = "trainkit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_static" / "search_order.js")
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "native"

ORDER = {
    "index": ["tutorials/index", "how-to/index", "reference/index", "explanation/index", "project/index", "glossary"],
    "tutorials/index": ["first-run", "images", "embeddings", "faces", "segmentation", "volumes", "reid", "python"],
    "how-to/index": [
        *("run", "resume", "multi-gpu", "clusters", "sweep", "compare", "promote", "export", "serve", "tune-speed"),
        *("benchmark", "mlflow-server", "find-leakage", "extend", "platforms", "troubleshoot", "migrate/index"),
    ],
    "how-to/migrate/index": ["lightning", "timm", "insightface", "nnunet", "ultralytics", "guides"],
    "reference/index": [
        *("cli", "keys", "recipe-file", "recipes", "data/index", "classifiers", "metrics", "artifacts"),
        *("exit-codes", "launch-configs"),
    ],
    "reference/data/index": ["images", "faces", "segmentation", "volumes", "reid"],
    "explanation/index": ["training-loop", "exact-resume", "gated-evaluation", "significance", "speed-measurement"],
    "project/results/index": ["faces", "images", "volumes", "reid", "segmentation"],
    "project/index": [
        "results/index",
        "performance",
        "claims",
        "reliability",
        "scale",
        "changelog",
        "contributing",
        "security",
    ],
}
"""The pages below each index page, in the order of the sidebar. Pages that are not named follow in their own order."""

REPOSITORY_PAGES = {
    "README.md": "index",
    "CONTRIBUTING.md": "project/contributing",
    "SECURITY.md": "project/security",
    "CHANGELOG.md": "project/changelog",
    "recipes/README.md": "reference/recipes",
}
"""Files outside docs/ to the page that shows the same on the site."""
INCLUDED = {
    "project/contributing": "CONTRIBUTING.md",
    "project/security": "SECURITY.md",
    "project/changelog": "CHANGELOG.md",
    "reference/recipes": "recipes/README.md",
}
"""Pages that are a pointer on GitHub, and show the file itself on the site."""
SHOWN_LEVELS = {"reference/keys": 2}
"""Levels of headings in the contents of a page at its right."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_FENCED = re.compile(r"(^(?P<fence>`{3,}).*?^(?P=fence)\s*$)", re.MULTILINE | re.DOTALL)
_ANCHOR = re.compile(r'<a id="([\w.-]+)"(?: name="([^"]+)")?>')


def pages() -> set[str]:
    """Names of all pages, as Sphinx writes them: `how-to/run`."""
    found = [file for suffix in source_suffix for file in DOCS.rglob(f"*{suffix}")]
    shown = [file.relative_to(DOCS).with_suffix("") for file in found if "_build" not in file.parts]
    return {name.as_posix() for name in shown if f"{name.as_posix()}.md" not in exclude_patterns}


def planned() -> set[str]:
    """Names of the pages that the sidebar has a place for, written or not."""
    return {(Path(index).parent / name).as_posix() for index, names in ORDER.items() for name in names} | {"index"}


def contents(index: str) -> list[str]:
    """Pages below an index page: those of `ORDER` that are there, and what lies beside it and is in no other index."""
    folder, there = Path(index).parent, pages()
    listed = [(folder / name).as_posix() for name in ORDER[index]]
    beside = sorted(name for name in there - planned() if Path(name).parent == folder)
    return [name for name in (*listed, *beside) if name in there]


def toctree(index: str) -> str:
    """A hidden table of contents, with pages relative to the folder of the index."""
    lines = [os.path.relpath(name, Path(index).parent) for name in contents(index)]
    return "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(lines) + "\n```\n" if lines else ""


def notebook(text: str) -> str:
    """A notebook as Markdown: its text, its code, and what the code printed. Nothing is executed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"]).strip("\n")
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source:
            parts.append(f"```python\n{source}\n```")
            printed = "".join(_printed(output) for output in cell.get("outputs", [])).strip("\n")
            parts += [f"```text\n{printed}\n```"] if printed else []
    return "\n\n".join(parts) + "\n"


def _printed(output: dict[str, Any]) -> str:
    text = output.get("text") or output.get("data", {}).get("text/plain") or ""
    return "".join(text)


def rewritten(text: str, folder: Path, page: Path) -> str:
    """Make the links of a text work on the site. They are relative to `folder`; the text is shown on `page`."""
    parts = _FENCED.split(text)
    # `split` gives the text before a block, the block, its fence, and so on.
    return "".join(
        part if n % 3 == 1 else _LINK.sub(lambda found: _link(found, folder, page), part)
        for n, part in enumerate(parts)
        if n % 3 != 2
    )


def _link(found: re.Match[str], folder: Path, page: Path) -> str:
    image, text, target = found.groups()
    place, hash_, part = target.partition("#")
    if not place or re.match(r"[a-z]+:", place):
        return found[0]
    text = _LINK.sub(lambda inner: _link(inner, folder, page), text)
    file = Path(os.path.normpath(folder / place))
    try:
        named = file.relative_to(ROOT).as_posix()
    except ValueError:
        return text
    if f"{REPOSITORY_PAGES.get(named)}.md" == page.relative_to(DOCS).as_posix():
        return text
    if named in REPOSITORY_PAGES and (DOCS / f"{REPOSITORY_PAGES[named]}.md").is_file():
        file = DOCS / f"{REPOSITORY_PAGES[named]}.md"
        kept = hash_ + part if REPOSITORY_PAGES[named] in INCLUDED else ""
    elif file.is_file() and (file.suffix != ".md" or file.is_relative_to(DOCS)):
        kept = hash_ + part
    elif file.suffix == ".md" and not file.is_relative_to(DOCS):
        return text
    elif file.is_dir() or (
        file.is_relative_to(DOCS) and file.relative_to(DOCS).with_suffix("").as_posix() in planned()
    ):
        return text  # a folder cannot be shown; a page that is not written yet is held by tests/docs/test_site.py
    else:
        return found[0]
    return f"{image}[{title(file, text)}]({Path(os.path.relpath(file, page.parent)).as_posix()}{kept})"


def title(file: Path, text: str) -> str:
    """The title of a page in place of its file name, which is what GitHub's readers look for; else the text."""
    if text != file.name or file.suffix != ".md":
        return text
    heading = re.search(r"^# (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else text


def read_source(app: Any, name: str, source: list[str]) -> None:
    """Turn the file of a page into what the site shows of it."""
    page = Path(app.env.doc2path(name))
    text = notebook(source[0]) if page.suffix == ".ipynb" else source[0]
    folder = page.parent
    if name in INCLUDED and (ROOT / INCLUDED[name]).is_file():
        file = ROOT / INCLUDED[name]
        text, folder = file.read_text(encoding="utf-8"), file.parent
    text = rewritten(text, folder, page)
    if name in ORDER:
        text += toctree(name)
    source[0] = text


def find_anchors(app: Any, tree: nodes.document) -> None:
    """Let links and the search find what `<a id="..." name="...">` marks. A name is a key of recipes."""
    env = app.env
    name = env.docname
    if name in SHOWN_LEVELS:
        env.metadata[name]["tocdepth"] = SHOWN_LEVELS[name]
    slugs = dict(env.metadata[name].get("myst_slugs", {}))
    for raw in list(tree.findall(nodes.raw)):
        if raw.astext() == "</a>":
            raw.parent.remove(raw)
        elif found := _ANCHOR.fullmatch(raw.astext()):
            place, key = found.groups()
            if place in tree.ids:  # of a heading, where the link may lead as well
                raw.parent.remove(raw)
            else:
                raw.replace_self(nodes.target("", "", ids=[place]))
            slugs[place] = (raw.line or 0, place, key or place)
            if key:
                env.get_domain("std").note_object("recipe-key", key, place, location=raw)
    env.metadata[name]["myst_slugs"] = slugs


def setup(app: Any) -> None:
    """Connect the functions above with Sphinx."""
    app.add_object_type("recipe-key", "recipe-key", objname="recipe key")
    app.connect("source-read", read_source)
    app.connect("doctree-read", find_anchors)
