"""reference/metrics.md: every metric by its name.

The definitions are in `trainkit.config.metric_definitions`. What stands above the line MARK is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from docs.generators.markdown import REFERENCE, code, prose, table
from trainkit.config.metric_definitions import CUSTOMARY, DEFINITIONS, GROUPS, Metric

FILE = REFERENCE / "metrics.md"
WITHOUT_NUMBER = ("standard definition", "trainkit")
"""Sources that are no publication."""
MARK = "<!-- All below is generated from the code by `make docs`. -->\n"
ABOVE = """\
# Metrics

Every metric that a run records, by its name.

The x axis is the optimizer step; of `system/` it is the number of the sample. The journal and the artifact
`tables/metrics.csv` have all metrics; MLflow gets those by which runs are compared, at most 40 unless `log.metrics`
asks for more ([key](keys.md#log-metrics)). In a name, `<...>` stands for the part that differs.

Metrics of `speed/`, `time/`, `cost/`, `device/` and `system/` are measurements, and differ from run to run.
All others are bitwise identical in a run that was interrupted and resumed.

"""


def page() -> str:
    """The text of the page."""
    there = FILE.read_text(encoding="utf-8") if FILE.is_file() else ""
    above = there.partition(MARK)[0] if MARK in there else ABOVE
    return above + MARK + "\n" + "".join(sections()).rstrip("\n") + "\n"


def sections() -> Iterator[str]:
    """A heading with its table for each group of metrics, and the list of the sources that the tables number."""
    better = {"higher": "higher", "lower": "lower", "none": "", None: "as the metric"}
    for title, group in DEFINITIONS.items():
        rows = [(code(name), one.unit, better[one.direction], prose(one.text)) for name, one in group.items()]
        yield f"## {title}\n\n{table(('metric', 'unit', 'better', 'meaning'), rows)}"
    sources: list[str] = []
    for group in (*GROUPS, CUSTOMARY):
        names: dict[Metric, list[str]] = {}
        for name, one in group.metrics.items():
            names.setdefault(one, []).append(code(name))
        sources += [one.source for one in names if one.source not in (*sources, *WITHOUT_NUMBER)]
        rows = [
            (", ".join(same), one.unit, better[one.direction], prose(one.text), numbered(one.source, sources))
            for one, same in names.items()
        ]
        head = ("metric", "unit", "better", "meaning", "source")
        yield f"## Scores: {group.title}\n\n{prose(group.about)}\n\n{table(head, rows)}"
    yield "## Sources\n\n" + "".join(f"{n}. {prose(source)}\n" for n, source in enumerate(sources, 1))


def numbered(source: str, sources: Sequence[str]) -> str:
    """The place of a publication in the list of sources; what is no publication stands for itself."""
    return source if source in WITHOUT_NUMBER else f"[{sources.index(source) + 1}](#sources)"
