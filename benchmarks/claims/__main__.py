"""Measure the claims of training guides on their recipes and this machine.

python -m benchmarks.claims                              measures what is not measured yet
python -m benchmarks.claims people-norms faces           one claim, and all of one guide
python -m benchmarks.claims --list                       lists the claims, and measures nothing
python -m benchmarks.claims --write docs/project/claims.md       writes the table as markdown
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.claims import ledger
from trainkit.cli.options import Plain, echo


@click.command(cls=Plain, name="python -m benchmarks.claims")
@click.argument("claim", nargs=-1)
@click.option("--list", "listed", is_flag=True, help="List the claims, and measure nothing.")
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Write the table as markdown to FILE.")
def main(claim: tuple[str, ...], listed: bool, write: Path | None) -> int:
    """Measure the claims of training guides on their recipes and this machine."""
    return ledger.command(claim, listed=listed, write=write, say=echo)


if __name__ == "__main__":
    main()
