"""Check the data of a run for train/test leakage and suspicious samples.

Each data digest is checked once, before training; the report is kept in `<store>/integrity/`. Findings are printed and
logged with every run: `tables/integrity.json`. The recipe's `integrity.policy` decides whether they
stop the run. `trainkit data check` runs the same checks without training.

A split takes part through its method `held()`; `trainkit.data.leakage` compares sets.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from trainkit.config.run_request import RunRequest, load
from trainkit.data import kinds, leakage
from trainkit.data.leakage import Held, Thumbnails
from trainkit.data.record import UNKNOWN_CONTENT
from trainkit.errors import UserError, few, number_of
from trainkit.files import write_aside
from trainkit.interfaces import ChecksLeakage, ComparableSplit, Dataset
from trainkit.paths import make_private
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Silent, Tracker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainkit.config.schema import Recipe
    from trainkit.distributed.runtime import Runtime

_log = logging.getLogger(__name__)

FOLDER = "integrity"
"""Folder of the store for reports and thumbnails."""
ARTIFACT = "tables/integrity.json"
FIGURE = "figures/look_alikes.png"
_VERSION = 2
_EXAMPLES = 20
_TILE = 128

Verdict = Literal["ok", "odd", "leak", "wrong", "unknown"]
"""Outcome of a check: nothing found; worth a look; leakage between training and evaluation; an error that should stop
training; not known."""


@dataclass(frozen=True)
class Finding:
    """Result of one check of one set."""

    where: str
    """Recipe key of the set."""
    check: str
    """`subjects`, `copies`, `look-alikes`: also in data.train; `unlabelled`; `two classes`: equal samples with two
    labels; `damaged`."""
    verdict: Verdict
    count: int
    """Number of samples found."""
    of: int
    """Number of samples compared."""
    said: str
    """The finding as a sentence."""
    examples: list[str] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    """Positions of both images of each pair of look-alikes, each in its own set."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings in the sets of a run."""

    mark: str
    """Identity of the data: equal marks have equal findings."""
    whole: bool
    """True if all images were compared, regardless of their number."""
    seconds: float
    sets: dict[str, dict[str, Any]]
    """By recipe key: digest, samples, and number of images compared."""
    findings: list[Finding]

    @property
    def bad(self) -> list[Finding]:
        """Findings that should stop training."""
        return [one for one in self.findings if one.verdict in ("leak", "wrong")]

    @property
    def summary(self) -> str:
        """Summary: `clean`, or `2 leaks, 1 odd`."""
        many = {verdict: sum(one.verdict == verdict for one in self.findings) for verdict in ("leak", "wrong", "odd")}
        words = [number_of(many["leak"], "leaks")] if many["leak"] else []
        words += [f"{many[verdict]} {verdict}" for verdict in ("wrong", "odd") if many[verdict]]
        return ", ".join(words) or "clean"

    def json(self) -> str:
        """Return the report as it is stored."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def sentences(self) -> list[str]:
        """Return the lines for the start of a run: leaks and errors, and the number of other findings."""
        scores: dict[str, str] = dict.fromkeys(("subjects", "copies"), "; its metrics are too optimistic")
        scores["look-alikes"] = f"; if they are the same image, its metrics are too optimistic: look at {FIGURE}"
        said = [f"{one.where}: {one.said}{scores.get(one.check, '')}" for one in self.bad]
        odd = sum(one.verdict == "odd" for one in self.findings)
        return said + ([f"{number_of(odd, 'more findings', 'more finding')} in {ARTIFACT}"] if odd and said else [])

    def refuse(self) -> None:
        """Raise UserError if a finding should stop training."""
        if self.bad:
            listing = "".join(f"\n  {one.where}: {one.said}" for one in self.bad)
            remedy = "fix the sets (trainkit data check lists more), or continue with integrity.policy=warn"
            found = f"integrity.policy=refuse stops this run:{listing}\n"
            raise UserError("data", found, "each sample in one split only, and readable", remedy)


def ensure(recipe: Recipe, data: Dataset, runtime: Runtime, store: Store) -> Report | None:
    """Return the report on the data of a run, on rank 0 only; None where its policy is `off`.

    Call it on every process. Raises UserError on all of them if the policy is `refuse` and a finding should stop
    training.
    """
    found: list[Report] = []

    def act() -> None:
        report = of(data, store.home / FOLDER)
        if report is not None:
            if recipe.integrity.policy == "refuse":
                report.refuse()
            found.append(report)

    if recipe.integrity.policy != "off":
        runtime.on_main(act)
    return found[0] if found else None


def note(report: Report | None, data: Dataset, tracker: Tracker | Silent, say: Callable[[str], None]) -> None:
    """Log a report on data as artifacts of a run, and print leaks and errors."""
    if report is None:
        return
    if (drawn := pictures(report, data)) is not None:
        tracker.figure(FIGURE, drawn)
    tracker.artifact_text(ARTIFACT, report.json())
    tracker.tags({"trainkit.integrity": report.summary})
    for sentence in report.sentences():
        say(f"integrity: {sentence}")


def check(request: RunRequest, whole: bool = False) -> tuple[Report, Dataset]:
    """Return the report on the data of a recipe, and the data. Raises UserError where they cannot be opened.

    Findings for which `data.leakage` would stop a run are part of the report.
    """
    recipe = load(request)
    if isinstance(recipe.data, ChecksLeakage):
        recipe.data.leakage = "allow"
    data = recipe.data.open(recipe.seed)
    report = of(data, Store.locate().home / FOLDER, whole)
    if report is None:
        raise UserError(
            str(request.path),
            f"data {kinds.name(recipe.data)} cannot be checked",
            "splits with `held()`",
        )
    return report, data


def of(data: Dataset, cache: Path | None = None, whole: bool = False) -> Report | None:
    """Return the report on opened data: from the folder `cache`, or made and stored there now.

    `whole`: compare all images, regardless of their number. None where no split has the method `held()`.
    """
    sets = held(data)
    if not sets:
        return None
    for complete in (True,) if whole else (True, False):
        kept = _read(cache, _mark(sets, complete))
        if kept is not None:
            return kept
    begin = time.perf_counter()
    findings, looked = _examined(sets, cache, whole)
    described = {
        _key(name): {"digest": digest, "samples": len(one), "looked_at": looked[name]}
        for name, (digest, one) in sets.items()
    }
    seconds = time.perf_counter() - begin
    report = Report(mark=_mark(sets, whole), whole=whole, seconds=seconds, sets=described, findings=findings)
    if many := sum(looked.values()):
        _log.info("compared %d images in %.1f s, once for this data", many, seconds)
    # A repaired set may have the same digest, so a report of damaged files is not stored.
    if cache is not None and all(one.check != "damaged" for one in findings):
        with contextlib.suppress(OSError):
            make_private(cache)
            write_aside(cache / f"{report.mark}.json", report.json())
    return report


def held(data: Dataset) -> dict[str, tuple[str, Held]]:
    """Return digest and content of the training set and of each evaluation set that has `held()`, by name.

    Other protocols on a set (`val.retrieval`) count as that set. Empty where the training set has no `held()`.
    """
    splits = {"train": data.train}
    for name, split in data.evaluations.items():
        splits.setdefault(name.partition(".")[0], split)
    able = {name: split for name, split in splits.items() if isinstance(split, ComparableSplit)}
    return {name: (split.digest, split.held()) for name, split in able.items()} if "train" in able else {}


def lines(report: Report) -> list[str]:
    """Return a report for the terminal: a table of all checks, and a sentence for each that is not `ok`."""
    from trainkit.terminal import aligned

    rows = [["set", "check", "found", "of", "verdict"]]
    rows += [[one.where, one.check, str(one.count), str(one.of), one.verdict] for one in report.findings]
    width = max(len(row[1]) for row in rows)
    table = aligned([[row[0], row[1].ljust(width), *row[2:]] for row in rows])
    told = [f"{one.where}: {one.said}" for one in report.findings if one.verdict != "ok"]
    part = [
        f"{key}: {one['looked_at']} of {one['samples']} images were compared; --all compares all"
        for key, one in report.sets.items()
        if one["looked_at"] and one["looked_at"] < one["samples"] and not report.whole
    ]
    return [*table, *([""] if told or part else []), *told, *part]


def pictures(report: Report, data: Dataset) -> Figure | None:
    """Draw the pairs of look-alikes side by side; None where there are none, or an image cannot be read."""
    sets = {_key(name): one for name, (_, one) in held(data).items()}
    tiles, captions = [], []
    for one in report.findings:
        mine = sets[one.where]
        for places, words in zip(one.places, one.examples, strict=False):
            try:
                both = [_picture(some, k) for some, k in zip((mine, sets["data.train"]), places, strict=True)]
            except UserError:
                return None
            size = (_TILE, round(_TILE * both[0].shape[0] / both[0].shape[1]))
            tiles.append(np.concatenate([np.asarray(Image.fromarray(some).resize(size)) for some in both], 1))
            pair, _, how = words.rpartition(" (")
            head = f"{one.where.removeprefix('data.evaluate.')}: {how.removesuffix(')')}"
            captions.append(head + "\n" + pair.replace(" = ", "\n"))
    if not tiles:
        return None
    from trainkit.plots.embeddings import sheet

    return sheet(tiles, captions, f"{number_of(len(captions), 'pairs')} of images look the same")


def _picture(one: Held, place: int) -> np.ndarray:
    if one.packed is None or one.rows is None:
        raise UserError("data", f"its {one.noun} cannot be compared")
    return one.packed.picture(int(one.rows[place]))


def _key(name: str) -> str:
    return "data.train" if name == "train" else f"data.evaluate.{name}"


def _mark(sets: Mapping[str, tuple[str, Held]], whole: bool) -> str:
    settings = [_VERSION, leakage.VERSION, leakage.ALIKE, leakage.PLAIN, whole]
    settings += [] if whole else [leakage.PICTURES, leakage.BYTES, leakage.PAIRS]
    # A digest does not cover which subjects are known.
    content = [[name, digest, len(one.subjects)] for name, (digest, one) in sets.items()]
    return hashlib.sha256(json.dumps([settings, content]).encode()).hexdigest()[:32]


def _read(cache: Path | None, mark: str) -> Report | None:
    try:
        words = json.loads((cache / f"{mark}.json").read_text(encoding="utf-8")) if cache is not None else {}
        report = Report(**{**words, "findings": [Finding(**one) for one in words.get("findings", ())]})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return report if report.mark == mark else None


# ---- The checks ------------------------------------------------------------------------------------------------------


def _examined(
    sets: Mapping[str, tuple[str, Held]], cache: Path | None, whole: bool
) -> tuple[list[Finding], dict[str, int]]:
    """Return the findings in all sets, and the number of images compared in each."""
    looks: dict[str, Thumbnails] = {}
    for _, one in sets.values():
        if one.packed is not None and one.packed.digest not in looks:
            looks[one.packed.digest] = leakage.thumbnails(one.packed, cache, whole)
    seen = {name: _Seen.of(one, looks) for name, (_, one) in sets.items()}
    train, findings = sets["train"][1], []
    for name, (_, one) in sets.items():
        where = _key(name)
        if name != "train":
            findings += _shared(where, train, one)
            findings.append(_look_alikes(where, train, one, seen["train"], seen[name], whole))
        findings += _labels(where, one)
        if one.packed is not None and (damaged := looks[one.packed.digest].damaged):
            of = len(damaged) + len(seen[name].places)
            findings.append(
                Finding(where, "damaged", "wrong", len(damaged), of, few(damaged, 3), list(damaged[:_EXAMPLES]))
            )
    return findings, {name: len(some.places) for name, some in seen.items()}


@dataclass(frozen=True)
class _Seen:
    """The compared samples of a set."""

    places: np.ndarray
    cells: np.ndarray

    @staticmethod
    def of(one: Held, looks: Mapping[str, Thumbnails]) -> _Seen:
        if one.packed is None or one.rows is None:
            return _Seen(np.empty(0, np.int64), np.empty((0, leakage.CELLS, leakage.CELLS), np.uint8))
        return _Seen(*looks[one.packed.digest].of(one.rows))


def _shared(where: str, train: Held, one: Held) -> Iterator[Finding]:
    """Find samples that are also in data.train, by name and by content."""
    found = {shared.what: shared for shared in leakage.leaks(train, one)}
    for check, many, what in (("subjects", len(one.subjects), one.kind), ("copies", len(one), one.noun)):
        if shared := found.get(check):
            yield Finding(where, check, "leak", shared.count, many, shared.said, shared.examples[:_EXAMPLES])
        elif check == "subjects" and not (one.subjects and train.subjects):
            said = f"the {what} of its {one.noun} or of those of data.train are unknown"
            yield Finding(where, check, "unknown", 0, 0, said)
        elif check == "copies" and (unknown := int((train.prints == UNKNOWN_CONTENT).sum())):
            said = f"the content of {unknown} {train.noun} of data.train, read in place, is not known; "
            said += "copies are found among those compared by look, or after trainkit data import"
            yield Finding(where, check, "unknown", 0, many, said)
        else:
            yield Finding(where, check, "ok", 0, many, f"none of its {many} {what} is in data.train")


def _look_alikes(where: str, train: Held, one: Held, trained: _Seen, seen: _Seen, whole: bool) -> Finding:
    """Find images that look like one in data.train; equal content is a finding of its own."""
    if not (len(seen.places) and len(trained.places)):
        said = f"its {one.noun} were compared by content only"
        return Finding(where, "look-alikes", "unknown", 0, 0, said)
    twins = leakage.look_alikes(seen.cells, trained.cells, mirrored=True, whole=whole)
    pairs = np.stack([seen.places[twins.here], trained.places[twins.there]], 1)
    other = ~leakage.equal(one.prints[pairs[:, 0]], train.prints[pairs[:, 1]])
    pairs, of = pairs[other], f"{twins.compared} {one.noun}"
    if twins.plain:
        of += f" ({twins.plain} too uniform to compare)"
    whose = "data.train"
    if len(trained.places) < len(train):
        whose += f" ({len(trained.places)} of its {len(train)} were compared)"
    if not len(pairs):
        said = f"none of {of} looks like one in {whose}"
        return Finding(where, "look-alikes", "ok", 0, twins.compared, said)
    words = leakage.sample_names(one, train, pairs)
    how = zip(words, twins.alike[other].tolist(), twins.mirrored[other].tolist(), strict=True)
    words = [f"{word} ({alike:.3f}{', mirrored' if flip else ''})" for word, alike, flip in how]
    said = f"{len(pairs)} of {of} look like one in {whose}: {few(words)}"
    examples, places = words[:_EXAMPLES], pairs[:_EXAMPLES].tolist()
    return Finding(where, "look-alikes", "leak", len(pairs), twins.compared, said, examples, places)


def _labels(where: str, one: Held) -> Iterator[Finding]:
    """Find samples without a class, and equal samples that are labelled with two classes."""
    if one.label is not None:
        count = int((one.label < 0).sum())
        wrong = count and where == _key("train")  # gallery people may have no class
        said = f"{count} of {len(one)} {one.noun} have no class"
        yield Finding(where, "unlabelled", "wrong" if wrong else "ok", count, len(one), said)
        pairs = leakage.label_conflicts(one.prints, one.label)
        words = leakage.sample_names(one, one, pairs)
        said = f"{number_of(len(pairs), 'pairs')} of {one.noun} that are the same with two different classes"
        said += f": {few(words)}" if words else ""
        yield Finding(where, "two classes", "odd" if words else "ok", len(pairs), len(one), said, words[:_EXAMPLES])
