"""Messages that docs/how-to/troubleshoot.md explains are messages that are given."""

import ast
import re

from runs import ROOT

PAGE = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text(encoding="utf-8").partition("## Not an error")[0]
EXPLAINED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def test_every_message_that_is_explained_is_given_somewhere():
    """Every string of the source but docstrings, those of f-strings as they are written."""
    strings = []
    for file in sorted((ROOT / "trainkit").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                strings.append(ast.unparse(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                strings.append(node.value)
    said = "\n".join(strings)
    assert len(EXPLAINED) > 15 and len(set(EXPLAINED)) == len(EXPLAINED)
    assert not [fragment for fragment in EXPLAINED if fragment not in said]
