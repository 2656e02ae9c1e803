"""reference/recipes.md: the recipes that come with trainkit, from the comments at their heads."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generators.markdown import prose, slug, table
from trainkit.config import loader, yaml_reader
from trainkit.config.loader import RECIPES

FIELDS = ("paper", "command", "runs", "figure", "cost", "result", "data", "reading", "teacher", "memory")
"""Words at the beginning of a line of a header."""
TASKS = {
    "classify": "Image classification",
    "embed": "Embeddings: faces and image retrieval",
    "adadistill": "Face distillation",
    "segment2d": "Semantic segmentation of images",
    "segment3d": "Segmentation of volumes",
    "reid": "Person re-identification",
}
LABELS = {"figure": "published", "result": "measured here", "runs": "length", "reading": "how the paper is read"}
ABOVE = """\
# Shipped recipes

The recipes that come with trainkit, by task. The page is generated from the comments at their heads by `make docs`;
[the README of that folder](../../recipes/README.md) has them in one table.

Train one by its name, print it with all its defaults, or copy it for data of your own:

```
trainkit run convnext
trainkit show convnext
trainkit cp convnext flowers.yaml --data flowers
```

[Recipe keys](keys.md) explains the keys; [results](../project/results/index.md) lists the runs behind the scores.

"""


def page() -> str:
    """The text of the page."""
    files = sorted(RECIPES.glob("*.yaml"))
    by_task: dict[str, list[Path]] = {}
    for file in files:
        by_task.setdefault(_tree(file)["task"]["name"], []).append(file)
    parts = [ABOVE]
    for task in (task for task in dict.fromkeys((*TASKS, *sorted(by_task))) if task in by_task):
        title = TASKS.get(task, task)
        rows = [
            (f"[{file.stem}](#{slug(file.stem)})", prose(parts_of(file)[""].split(". ")[0])) for file in by_task[task]
        ]
        parts.append(f"## {title}\n\n{table(('recipe', 'trains'), rows)}")
        parts += [section(file) for file in by_task[task]]
    return "".join(parts)


def section(file: Path) -> str:
    """The heading of a recipe and what its header has."""
    parts, tree = parts_of(file), _tree(file)
    text = f"### {file.stem}\n\n{prose(parts.pop(''))}\n\n"
    lines = [f"- **file**: [recipes/{file.name}](../../recipes/{file.name})\n"]
    lines += [f"- **training data**: `{tree['data']['train']}`\n"] if "data" not in parts else []
    for word in FIELDS:
        if word in parts:
            said = f"`{parts[word]}`" if word == "command" and "`" not in parts[word] else prose(parts[word])
            lines.append(f"- **{LABELS.get(word, word)}**: {said}\n")
    return text + "".join(lines) + "\n"


def parts_of(file: Path) -> dict[str, str]:
    """The parts of a header by the word that they begin with; the sentences above them under the empty word."""
    parts, word = {"": ""}, ""
    for line in loader.header(file).splitlines():
        if found := re.fullmatch(rf"# ({'|'.join(FIELDS)})\s+(\S.*)", line):
            word = found[1]
            parts[word] = found[2]
        elif text := line.lstrip("# "):
            parts[word] = f"{parts[word]} {text}".strip()
    return parts


def _tree(file: Path) -> dict:
    tree = yaml_reader.read(file.read_text(encoding="utf-8")).tree
    return tree if isinstance(tree, dict) else {}
