"""The claims ledger: what five training guides promise about speed, and what was measured on this machine.

`table.yaml` has one record for each statement about speed or memory. A claim is measured on the recipe that it is
about, or the nearest one whose data are available (`measurements`). Results are kept in `claims/` of the store, by
machine and versions: an interrupted ledger continues where it stopped, and each machine has its own.
`docs/project/claims.md` is written from them by `python -m benchmarks.claims --write`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import trainkit
from benchmarks.claims.bench import GUIDES, Bench, Found, Unable
from benchmarks.claims.table import CLAIMS, Claim
from trainkit.errors import UserError, few, number_of
from trainkit.files import write_aside
from trainkit.tracking.store import Store

LEAST = 1.01
"""A gain below this is none: what promises no number must bring as much."""
HOLDS, FALSE, UNDECIDED = "holds", "does not hold", "inconclusive"
NEEDS_GPU, CANNOT, FAILED, MISSING = "needs a GPU", "cannot be measured", "failed", "not measured yet"
COMPUTED = {True: "true", False: "not true"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a claim on one machine."""

    claim: str
    digest: str
    verdict: str
    text: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    recipe: str = ""
    """On which it was measured."""
    instead: str = ""
    """Why not on the one before it."""
    load: float | None = None
    """Load average over one minute when it ended."""
    date: str = ""


# ---- Judging ---------------------------------------------------------------------------------------------------------


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


def measure(claim: Claim, bench: Bench) -> Outcome:
    """Measure one claim; what cannot be measured says why."""
    verdict, text, found, recipe, instead = NEEDS_GPU, "", Found(), "", ""
    if bench.gpu or not claim.way.gpu:
        try:
            if claim.way.recipe:
                path, instead = bench.chosen(claim.guide)
                recipe = path.stem
            found = claim.way(bench, claim.guide)
            verdict, text = judge(claim, found), found.text
        except (Unable, UserError) as error:
            verdict, text = CANNOT, str(error)
        except Exception as error:  # one claim of many: said, and measured again next time
            verdict, text = FAILED, f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    return Outcome(
        claim=claim.id,
        digest=claim.digest,
        verdict=verdict,
        text=text,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        recipe=recipe,
        instead=instead,
        load=round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        date=time.strftime("%Y-%m-%d"),
    )


# ---- What is kept ----------------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """What was measured on one machine with one set of versions; a file in the store."""

    machine: dict[str, str]
    outcomes: dict[str, Outcome]

    @property
    def name(self) -> str:
        """Of its file: a digest of machine and versions."""
        return hashlib.sha256(json.dumps(self.machine, sort_keys=True).encode()).hexdigest()[:16]

    def path(self, store: Store) -> Path:
        """Where it is kept."""
        return store.home / "claims" / f"{self.name}.json"

    def save(self, store: Store) -> None:
        """Write it; a crash leaves the old one."""
        file = self.path(store)
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = {"machine": self.machine, "outcomes": [asdict(outcome) for outcome in self.outcomes.values()]}
        write_aside(file, json.dumps(kept, indent=1) + "\n")

    def found(self, claim: Claim) -> Outcome | None:
        """What was found of a claim as it stands now in the table."""
        found = self.outcomes.get(claim.id)
        return found if found is not None and found.digest == claim.digest else None

    def known(self, claim: Claim) -> Outcome | None:
        """The same, if it need not be measured again."""
        found = self.found(claim)
        return found if found and found.verdict != FAILED else None

    @staticmethod
    def read(file: Path) -> Ledger | None:
        """One that was kept; None for a file that cannot be read."""
        known = {f.name for f in fields(Outcome)}
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            outcomes = [Outcome(**{k: v for k, v in row.items() if k in known}) for row in kept["outcomes"]]
            return Ledger({str(k): str(v) for k, v in kept["machine"].items()}, {o.claim: o for o in outcomes})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    @staticmethod
    def of(store: Store, machine: dict[str, str]) -> Ledger:
        """That of this machine, as far as it has come."""
        fresh = Ledger(machine, {})
        found = Ledger.read(fresh.path(store))
        return found if found is not None and found.machine == machine else fresh


def here() -> dict[str, str]:
    """This machine and what is installed on it, as far as it bears on figures."""
    import torch

    from trainkit.environment.record import cpu_name

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "processor": cpu_name(),
        "cores": f"{_cores():g}",
        "threads": str(torch.get_num_threads()),
        "gpu": " + ".join(gpus) or "none",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainkit": trainkit.__version__,
        "data": os.environ.get("TRAINKIT_DATA", "") and "TRAINKIT_DATA",
    }


def _cores() -> float:
    from trainkit.tracking.system.cgroup import cores

    return cores()


# ---- The page --------------------------------------------------------------------------------------------------------

_HEAD = """# Speed claims of training guides, measured

Five guides to faster training promise speed-ups, most of which were never measured. This page lists what trainkit
measured for their statements about speed or memory, each on the recipe that it is about, or on the small one of its
task where the data of that recipe were not there.
"""
_READING = """**How to read it.** A figure is the improvement with the guide's advice, as a factor, with its 95 %
confidence interval over paired repeats: samples/s after / before, or memory before / after. A claim **holds** if its
whole interval reaches the least value that was promised, and **does not hold** if none of it does; otherwise it is
**inconclusive**. A promise without a number must bring at least 1 %. Statements that follow from numbers are computed:
**true** or **not true**. A claim about GPUs **needs a GPU** and is measured on one.

`python -m benchmarks.claims` measures what is missing here, `python -m benchmarks.claims people-norms` one claim; with
`--list` the command shows all claims, also those that need a GPU. How each is measured stands in
`benchmarks/claims/table.yaml`. Generated by `python -m benchmarks.claims --write docs/project/claims.md`; do not edit.
"""


def summary(claims: Sequence[Claim], ledger: Ledger | None) -> str:
    """Count the outcomes of all claims on a machine, in a sentence."""
    states = [state(claim, ledger) for claim in claims]
    good = sum(one.startswith(HOLDS) or one == COMPUTED[True] for one in states)
    bad = sum(one in (FALSE, COMPUTED[False]) for one in states)
    text = f"Of {len(claims)} claims {good} hold or are true, {bad} do not hold or are not true, and "
    text += f"{states.count(UNDECIDED)} are inconclusive"
    others = {NEEDS_GPU: "need a GPU", CANNOT: CANNOT, FAILED: FAILED, MISSING: "are not measured yet"}
    rest = [f"{states.count(one)} {words}" for one, words in others.items() if one in states]
    return f"{text}; {', '.join(rest)}." if rest else f"{text}."


def page(claims: Sequence[Claim], ledgers: Sequence[Ledger]) -> str:
    """The table as markdown, of all machines that there are ledgers of."""
    lines = [_HEAD]
    for number, ledger in enumerate(ledgers, 1):
        where = f" on machine {number}" if len(ledgers) > 1 else ""
        lines.append(f"**Result{where}.** {summary(claims, ledger)}\n")
        lines.append(f"**Machine {number}.** {_machine(ledger)}\n")
    if not ledgers:
        lines.append("Nothing is measured yet.\n")
    lines.append(_READING)
    for guide, about in GUIDES.items():
        tested = [claim for claim in claims if claim.guide == guide and _is_tested(claim, ledgers)]
        if tested:
            lines += [f"## {about.title}\n", *_table(tested, ledgers), ""]
    return "\n".join(lines).rstrip() + "\n"


def _is_tested(claim: Claim, ledgers: Sequence[Ledger]) -> bool:
    """Whether any machine has an outcome of a claim."""
    return any(state(claim, ledger) not in (NEEDS_GPU, CANNOT, MISSING) for ledger in ledgers)


def _machine(ledger: Ledger) -> str:
    m = ledger.machine
    device = f"{m.get('gpu')}, " if m.get("gpu", "none") != "none" else ""
    text = (
        f"{device}{m.get('processor')}, {m.get('cores')} cores, {m.get('threads')} threads; {m.get('system')}, Python "
    )
    text += f"{m.get('python')}, torch {m.get('torch')}, trainkit {m.get('trainkit')}"
    text += ", with the data of TRAINKIT_DATA" if m.get("data") else ", without TRAINKIT_DATA"
    loads = [outcome.load for outcome in ledger.outcomes.values() if outcome.load is not None]
    dates = sorted({outcome.date for outcome in ledger.outcomes.values()})
    if loads:
        text += f"; {dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}, load {min(loads):g} to {max(loads):g}"
    return f"{text}."


def row(claim: Claim, ledgers: Sequence[Ledger]) -> str:
    """A claim's row of the table."""
    cells = [f"`{claim.id}`", claim.said, claim.promised]
    for ledger in ledgers or [None]:
        cells += [_figure(ledger and ledger.found(claim)), state(claim, ledger)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def state(claim: Claim, ledger: Ledger | None) -> str:
    """A claim's verdict on a machine; some have theirs without a measurement."""
    found = ledger.found(claim) if ledger is not None else None
    if found is not None:
        return found.verdict
    return NEEDS_GPU if claim.way.gpu and (ledger is None or ledger.machine.get("gpu") == "none") else MISSING


def _table(claims: Sequence[Claim], ledgers: Sequence[Ledger]) -> list[str]:
    several = len(ledgers) > 1
    heads = ["claim", "statement", "promised"]
    for number in range(1, max(1, len(ledgers)) + 1):
        heads += [f"measured ({number})" if several else "measured", "outcome"]
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(row(claim, ledgers) for claim in claims)]


def _figure(found: Outcome | None) -> str:
    if found is None or found.ratio is None:
        return ""
    return f"{_ratio(found.ratio)} ({_ratio(found.low)} to {_ratio(found.high)})"


def _ratio(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 10 else f"{value:.3f}"


# ---- The verb --------------------------------------------------------------------------------------------------------


def command(
    claim: Sequence[str],
    *,
    listed: bool,
    write: Path | None,
    say: Callable[[str], Any],
    claims: Sequence[Claim] | None = None,
) -> int:
    """Measure what is not known yet of all claims, or of those that are named by id or guide.

    `listed` says what is claimed and known, and measures nothing. Returns 0. Raises UserError.
    """
    everything = CLAIMS if claims is None else claims
    chosen = _chosen(claim, everything)
    if write is not None and not write.absolute().parent.is_dir():
        raise UserError("--write", f"{write.parent} is not a folder")
    store = Store.locate()
    ledger = Ledger.of(store, here())
    if listed:
        for one in chosen:
            say(f"{one.id:26} {one.promised:>12}  {state(one, ledger):20} {one.said}")
    else:
        _measure(chosen, ledger, store, say)
    if write is not None:
        write.write_text(page(everything, _ledgers(store, ledger)), encoding="utf-8")
        say(f"wrote {write}")
    return 0


def _chosen(words: Sequence[str], claims: Sequence[Claim]) -> list[Claim]:
    ids = [claim.id for claim in claims]
    unknown = [word for word in words if word not in ids and word not in GUIDES]
    if unknown:
        near = [name for word in unknown for name in difflib.get_close_matches(word, [*ids, *GUIDES], 3)]
        expected = f"perhaps {few(near)}" if near else f"a guide ({', '.join(GUIDES)}) or a claim"
        raise UserError(
            "claims", f"no claim {', '.join(unknown)}", expected, "`python -m benchmarks.claims --list` lists them"
        )
    return [claim for claim in claims if not words or claim.id in words or claim.guide in words]


def _measure(chosen: Sequence[Claim], ledger: Ledger, store: Store, say: Callable[[str], Any]) -> None:
    if not hasattr(os, "killpg"):
        raise UserError("claims", "this system cannot freeze processes", remedy="run it on Linux or macOS")
    gpu = ledger.machine["gpu"] != "none"
    left = [claim for claim in chosen if ledger.known(claim) is None]
    say(f"{number_of(len(chosen), 'claims')}, {len(left)} to be measured: half a minute each, more where it compiles.")
    say("Results are kept: if it is interrupted, run the same command again to continue.")
    bench = Bench(store, gpu, cores=float(ledger.machine["cores"]))
    try:
        for claim in chosen:
            found = ledger.known(claim)
            if found is None:
                found = measure(claim, bench)
                ledger.outcomes[claim.id] = found
                ledger.save(store)
            say(spoken(claim, found))
    finally:
        bench.close()
    verdicts = [found.verdict for claim in chosen if (found := ledger.known(claim))]
    say("\n" + ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(sorted(verdicts))))


def spoken(claim: Claim, found: Outcome) -> str:
    """A claim and what was found of it, as a line."""
    figure = f" x {_figure(found)}" if found.ratio is not None else ""
    text = f"; {found.text}" if found.text else ""
    return f"{claim.id:26} {claim.promised}: {found.verdict}{figure}{text}"


def _ledgers(store: Store, own: Ledger) -> list[Ledger]:
    """All that the store holds, this machine's first."""
    others = [Ledger.read(file) for file in sorted((store.home / "claims").glob("*.json"))]
    found = [own] if own.outcomes else []
    return found + [other for other in others if other is not None and other.outcomes and other.name != own.name]
