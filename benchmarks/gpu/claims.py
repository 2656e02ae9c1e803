"""The claims of guides to faster training that were said of a GPU, each measured as `benchmarks.claims` does it."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from benchmarks.claims import ledger
from benchmarks.claims.bench import Bench
from benchmarks.claims.table import CLAIMS, Claim, Switch
from benchmarks.gpu.report import Row, Scale
from trainkit.tracking.store import Store

TITLE = "Claims of guides to faster training that need a GPU"
SECONDS = 440.0
"""After so many no further claim is begun: the next call continues."""
RESULTS: dict[str, Literal["fails", "skipped"]] = {ledger.FAILED: "fails", ledger.CANNOT: "skipped"}
"""A claim that does not hold is the guide's failure and not this program's: it has no goal here."""


class OnCpu(Bench):
    """Stands in for a GPU where there is none, so that what measures can be tested: what a CPU has not is swapped."""

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Halves in bf16 instead of fp16, no CUDA graphs, batches of a sixteenth."""
        return tuple(map(self._swapped, super().words(words)))

    @staticmethod
    def _swapped(word: str) -> str:
        key, _, value = word.partition("=")
        if key in ("train.batch_size", "train.micro_batch"):
            value = str(max(4, int(value) // 16))
        return f"{key}={ {'fp16': 'bf16', 'reduce-overhead': 'off', 'default': 'off'}.get(value, value) }"


def chosen() -> list[Claim]:
    """Return the claims that need a GPU, in the order of the table."""
    return [claim for claim in CLAIMS if claim.way.gpu]


def rows(scale: Scale, done: Collection[str]) -> Iterator[Row]:
    """Measure each claim that is neither done nor in the ledger of this machine, until time is up."""
    ends, store = time.monotonic() + SECONDS, Store.locate()
    book = ledger.Ledger.of(store, ledger.here())
    gpu, cores = scale.device.type == "cuda", float(book.machine["cores"])
    settings = {"repeats": 2, "block": 0.01} if scale.tiny else {"repeats": 5, "block": 0.5}
    bench = (Bench if gpu else OnCpu)(store, gpu, cores=cores, **settings)
    left = [claim for claim in chosen() if named(claim) not in done]
    try:
        for at, claim in enumerate(left):
            found = book.known(claim, quick=False)
            if found is None:
                if time.monotonic() > ends:
                    print(f"{len(left) - at} claims left: run the same command again to continue", file=sys.stderr)
                    return
                found = ledger.measure(claim if gpu else _of_cpu(claim), bench, quick=scale.tiny)
                if gpu and not scale.tiny:
                    book.outcomes[claim.id] = found
                    book.save(store)
            on = f" on {found.recipe}" if found.recipe else ""
            measured = ledger.spoken(claim, found).removeprefix(f"{claim.id:26} {claim.promised}: ") + on
            yield Row(what=named(claim), expected=claim.promised, measured=measured, result=_result(found.verdict))
    finally:
        bench.close()


def named(claim: Claim) -> str:
    """Return the name of a claim's row."""
    return f"{claim.id}: {claim.said}"


def _result(verdict: str) -> Literal["no goal", "fails", "skipped"]:
    return RESULTS.get(verdict, "no goal")


def _of_cpu(claim: Claim) -> Claim:
    if not isinstance(claim.way, Switch):
        raise TypeError(f"{claim.id} is measured by {type(claim.way).__name__}: say how on a CPU")
    return replace(claim, way=replace(claim.way, gpu=False, cores=1))
