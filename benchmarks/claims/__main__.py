"""Measure the claims of training guides on their recipes and this machine.

python -m benchmarks.claims                       measures what is not measured yet, and writes docs/project/claims.md
python -m benchmarks.claims people-norms faces    one claim, and all of one guide
python -m benchmarks.claims --list                lists the claims, and measures nothing
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import click

from benchmarks import results
from benchmarks.claims.bench import GUIDES, Bench, Found
from benchmarks.claims.table import CLAIMS, Claim, Known
from trainkit.cli.options import Plain, echo
from trainkit.errors import UserError
from trainkit.tracking.store import Store

PAGE = results.ROOT / "docs" / "project" / "claims.md"
LEAST = 1.01
"""A gain below this is none: what promises no number must bring as much."""
HOLDS, FALSE, UNDECIDED, NEEDS_GPU = "holds", "does not hold", "inconclusive", "needs a GPU"
COMPUTED = {True: "true", False: "not true"}
HEAD = """# Speed claims of training guides, measured

What five guides to faster training promise, each measured on the recipe that it is about, or on the small one of its
task where the data of that recipe are not there. Figures are the improvement as a factor with its 95 % confidence
interval over paired repeats: samples/s after / before, or memory before / after. A claim **holds** if its whole
interval reaches the least value that was promised, and **does not hold** if none of it does. A promise without a number
must bring 1 %. What follows from numbers is **true** or **not true**. Claims about GPUs are measured on one.

`python -m benchmarks.claims` measures them again and writes this page; `--list` shows all, with how each is measured
(`benchmarks/claims/table.yaml`).
"""


def judge(claim: Claim, found: Found) -> str:
    """Compare a measurement with what was promised.

    A gain holds when its whole interval reaches the least that was promised, and does not when none of it does.
    """
    if found.true is not None:
        return COMPUTED[found.true]
    least = claim.least if claim.least != 1 else LEAST
    if found.low >= least:
        return f"{HOLDS}, and more" if claim.most is not None and found.low > claim.most else HOLDS
    return FALSE if found.high < least else UNDECIDED


def measure(claim: Claim, bench: Bench) -> tuple[str, str]:
    """Measure one claim; returns its outcome, and the figure with what was seen. Raises `Skipped`."""
    if claim.way.gpu and not bench.gpu:
        raise results.Skipped(NEEDS_GPU)
    try:
        recipe = f"{bench.chosen(claim.guide).stem}: " if claim.way.recipe else ""
        found = claim.way(bench, claim.guide)
    except UserError as error:
        raise results.Skipped(str(error)) from error
    figure = f"{_ratio(found.ratio)} ({_ratio(found.low)} to {_ratio(found.high)})" if found.ratio is not None else ""
    return judge(claim, found), "; ".join(filter(None, (figure, f"{recipe}{found.text or claim.how}")))


def checks(claims: Sequence[Claim], bench: Bench) -> Iterator[results.Check]:
    """Yield the claims as measurements."""
    for claim in claims:
        yield claim.id, claim.promised, partial(measure, claim, bench)


def page(on: Mapping[str, str], rows: Sequence[results.Row]) -> str:
    """Return the page: of each claim that was measured the statement, the promise, the figure and the outcome."""
    said = {claim.id: claim.said for claim in CLAIMS}
    shown = [
        results.Row(
            what=f"`{row.what}` {said[row.what]}",
            expected=row.expected,
            measured=row.measured.partition(";")[0] if row.measured[:1].isdigit() else "",
            result=row.result,
        )
        for row in rows
        if row.result not in (results.SKIPPED, results.FAILS)
    ]
    lines = results.table(("claim", "promised", "measured", "outcome"), on, shown)
    return "\n".join([HEAD, *lines]) + "\n"


def chosen(words: Sequence[str], claims: Sequence[Claim] = CLAIMS) -> list[Claim]:
    """Return the claims that are named by id or guide, without words all. Raises UserError for another word."""
    known = {claim.id for claim in claims} | set(GUIDES)
    if unknown := [word for word in words if word not in known]:
        expected = f"a guide ({', '.join(GUIDES)}) or a claim"
        remedy = "`python -m benchmarks.claims --list` lists them"
        raise UserError("claims", f"no claim {', '.join(unknown)}", expected, remedy)
    return [claim for claim in claims if not words or claim.id in words or claim.guide in words]


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.3f}"


@click.command(cls=Plain, name="python -m benchmarks.claims")
@click.argument("claim", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="List the claims, and measure nothing.")
def main(claim: tuple[str, ...], listed: bool) -> None:
    """Measure the claims of training guides on their recipes and this machine."""
    asked = chosen(claim)
    if listed:
        for one in asked:
            how = COMPUTED[one.way.true] if isinstance(one.way, Known) else NEEDS_GPU if one.way.gpu else ""
            echo(f"{one.id:26} {one.promised:>12}  {how:12} {one.said}{f' ({one.how})' if one.how else ''}")
        return
    if not hasattr(os, "killpg"):
        raise UserError("claims", "this system cannot freeze processes", remedy="run it on Linux or macOS")
    on = results.machine()
    bench = Bench(Store.locate(), on["gpu"] != "none", cores=float(on["cores"]))
    rows, _ = results.measure("claims", checks(asked, bench), on)
    if not claim:
        order = [one.id for one in CLAIMS]
        PAGE.write_text(page(on, sorted(rows, key=lambda row: order.index(row.what))), encoding="utf-8")
        echo(f"wrote {os.path.relpath(PAGE, Path.cwd())}")


if __name__ == "__main__":
    main()
