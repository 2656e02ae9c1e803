"""Write the pages of docs/reference that are generated from the code: `make docs`, or

python -m docs.generate_reference
"""

from __future__ import annotations

from collections.abc import Callable

from docs.generators import commands, keys, metrics
from docs.generators.markdown import REFERENCE

PAGES: dict[str, Callable[[], str]] = {
    "cli": commands.page,
    "keys": keys.page,
    "metrics": metrics.page,
}


def main() -> None:
    """Write those that differ from what is there."""
    for name, page in PAGES.items():
        file, text = REFERENCE / f"{name}.md", page()
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"{file.relative_to(REFERENCE.parents[1])}: written")


if __name__ == "__main__":
    main()
