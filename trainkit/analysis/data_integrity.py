"""Checks of the data of a run: train/test leakage, and odd samples.

Looked at once for each data digest, before the training, and kept in `<store>/integrity/`. What is found is said, and
is among the artifacts of every run: `tables/integrity.json` and `.csv`. `integrity.policy` of the recipe says
what follows from it. `trainkit data check` does the same without a training.

A split takes part by its method `held()`: see `trainkit.data.leakage`, where sets are compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image

from trainkit.config.run_request import RunRequest, load
from trainkit.data import kinds, leakage
from trainkit.data.leakage import Held, Thumbnails
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
"""Of the store, where reports and what images look like are kept."""
ARTIFACT = "tables/integrity.json"
FIGURE = "figures/look_alikes.png"
UNEVEN = 100
"""How many times as many samples the largest class has as the smallest, from which that is odd."""
_VERSION = 1
_EXAMPLES = 20
_TILE = 128

Verdict = Literal["ok", "odd", "leak", "wrong", "unknown"]
"""What a check came to: nothing found; something to look at; what is scored was trained on; what no training should
begin with; it could not be told."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check of one set."""

    where: str
    """The key of the recipe that names the set."""
    check: str
    """`subjects`, `copies`, `look-alikes`: what is in data.train too; `scored twice`: what is in another set that is
    scored; `classes`, `unlabelled`; `two classes`, and these `by look`: images of several; `damaged`."""
    verdict: Verdict
    count: int
    """How many there are of what was looked for."""
    of: int
    """How many were compared."""
    said: str
    """A sentence."""
    examples: list[str] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)
    """Of examples that look the same, the place of each of the two in its set."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings in the sets of a run."""

    mark: str
    """Names the data: equal marks, equal findings."""
    whole: bool
    """Whether all images were looked at, however many there are."""
    seconds: float
    sets: dict[str, dict[str, Any]]
    """By the key that names a set: its digest, samples, and how many images were looked at."""
    findings: list[Finding]

    @property
    def bad(self) -> list[Finding]:
        """Those that no training should begin with."""
        return [one for one in self.findings if one.verdict in ("leak", "wrong")]

    @property
    def summary(self) -> str:
        """In a few words: `clean`, or `2 leaks, 1 odd`."""
        many = {verdict: sum(one.verdict == verdict for one in self.findings) for verdict in ("leak", "wrong", "odd")}
        words = [number_of(many["leak"], "leaks")] if many["leak"] else []
        words += [f"{many[verdict]} {verdict}" for verdict in ("wrong", "odd") if many[verdict]]
        return ", ".join(words) or "clean"

    def json(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def columns(self) -> dict[str, list[Any]]:
        """The findings as columns of a table."""
        return {key: [getattr(one, key) for one in self.findings] for key in _COLUMNS}

    def sentences(self) -> list[str]:
        """Return the lines for the terminal when a run begins: what is bad, and how much more there is to look at."""
        scores = {"subjects": "; scores on it are too good", "copies": "; scores on it are too good"}
        scores["look-alikes"] = f"; where they are one image, scores on it are too good: look at {FIGURE}"
        said = [f"{one.where}: {one.said}{scores.get(one.check, '')}" for one in self.bad]
        odd = sum(one.verdict == "odd" for one in self.findings)
        return said + ([f"{odd} more to look at in {ARTIFACT}"] if odd and said else [])

    def refuse(self) -> None:
        """Raise UserError where something is bad."""
        if self.bad:
            listing = "".join(f"\n  {one.where}: {one.said}" for one in self.bad)
            remedy = "mend the sets (trainkit data check lists more), or go on with integrity.policy=warn"
            found = f"not to be trained on, by integrity.policy:{listing}\n"
            raise UserError("data", found, "each sample in one split, and whole", remedy)


_COLUMNS = ("where", "check", "verdict", "count", "of", "said")


def ensure(recipe: Recipe, data: Dataset, runtime: Runtime, store: Store) -> Report | None:
    """The report on the data of a run, by its policy: on rank 0 alone, and None where nothing is looked at.

    Called on every process. Raises UserError on all of them where the policy is to refuse, and something is bad.
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
    """Keep a report on data among the artifacts of a run, and say what is bad."""
    if report is None:
        return
    if (drawn := pictures(report, data)) is not None:
        tracker.figure(FIGURE, drawn)
    tracker.artifact_text(ARTIFACT, report.json())
    tracker.table("tables/integrity.csv", report.columns())
    tracker.tags({"trainkit.integrity": report.summary})
    for sentence in report.sentences():
        say(f"integrity: {sentence}")


def check(request: RunRequest, whole: bool = False) -> tuple[Report, Dataset]:
    """The report on the data of a recipe, and these, without a training. Raises UserError where they cannot be opened.

    What `data.leakage` would refuse is part of it, as all else.
    """
    recipe = load(request)
    if isinstance(recipe.data, ChecksLeakage):
        recipe.data.leakage = "allow"
    data = recipe.data.open(recipe.seed)
    report = of(data, Store.locate().home / FOLDER, whole)
    if report is None:
        raise UserError(
            str(request.path),
            f"data {kinds.name(recipe.data)}, which does not say what it holds",
            "splits with `held()`",
        )
    return report, data


def of(data: Dataset, cache: Path | None = None, whole: bool = False) -> Report | None:
    """The report on opened data, as it is kept in the folder `cache`, or made and kept now.

    `whole`: all images are looked at, however many there are. None where no split says what it holds.
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
        _log.info("looked at %d images in %.1f s, once for this data", many, seconds)
    # A damaged set may be mended, and has the same digest then.
    if cache is not None and all(one.check != "damaged" for one in findings):
        with contextlib.suppress(OSError):
            make_private(cache)
            write_aside(cache / f"{report.mark}.json", report.json())
    return report


def held(data: Dataset) -> dict[str, tuple[str, Held]]:
    """Digest and content of the training set and of each set that is scored, by name, as far as they say.

    Ways of scoring a set (`val.retrieval`) are that set. Empty where the training set does not say.
    """
    splits = {"train": data.train}
    for name, split in data.evaluations.items():
        splits.setdefault(name.partition(".")[0], split)
    able = {name: split for name, split in splits.items() if isinstance(split, ComparableSplit)}
    return {name: (split.digest, split.held()) for name, split in able.items()} if "train" in able else {}


def lines(report: Report) -> list[str]:
    """A report for the terminal: a table of all checks, and sentences about what is not well."""
    from trainkit.text_table import aligned

    rows = [["set", "check", "found", "of", ""]]
    rows += [[one.where, one.check, str(one.count), str(one.of), one.verdict] for one in report.findings]
    width = max(len(row[1]) for row in rows)
    table = aligned([[row[0], row[1].ljust(width), *row[2:]] for row in rows])
    told = [f"{one.where}: {one.said}" for one in report.findings if one.verdict != "ok"]
    part = [
        f"{key}: {one['looked_at']} of {one['samples']} images were looked at; --all looks at all"
        for key, one in report.sets.items()
        if one["looked_at"] and one["looked_at"] < one["samples"] and not report.whole
    ]
    return [*table, *([""] if told or part else []), *told, *part]


def pictures(report: Report, data: Dataset) -> Figure | None:
    """The examples of what looks the same, side by side; None where there are none, or one cannot be read."""
    sets = {_key(name): one for name, (_, one) in held(data).items()}
    tiles, captions = [], []
    for one in report.findings:
        mine = sets[one.where]
        other = sets["data.train"] if one.check == "look-alikes" else mine
        for places, words in zip(one.places, one.examples, strict=False):
            try:
                both = [_picture(some, k) for some, k in zip((mine, other), places, strict=True)]
            except UserError:
                return None
            size = (_TILE, round(_TILE * both[0].shape[0] / both[0].shape[1]))
            tiles.append(np.concatenate([np.asarray(Image.fromarray(some).resize(size)) for some in both], 1))
            pair, _, how = words.rpartition(" (") if other is not mine else (words, "", "two classes")
            head = f"{one.where.removeprefix('data.evaluate.')}: {how.removesuffix(')')}"
            captions.append(head + "\n" + pair.replace(" = ", "\n"))
    if not tiles:
        return None
    from trainkit.plots.embeddings import sheet

    tallest = max(len(tile) for tile in tiles)
    room = np.full((len(tiles), tallest, 2 * _TILE, 3), 255, np.uint8)
    for k, tile in enumerate(tiles):
        room[k, : len(tile)] = tile
    return sheet(room.transpose(0, 3, 1, 2), captions, "Images that look the same")


def _picture(one: Held, place: int) -> np.ndarray:
    if one.packed is None or one.rows is None:
        raise UserError("data", f"its {one.noun} cannot be looked at")
    return one.packed.picture(int(one.rows[place]))


def _key(name: str) -> str:
    return "data.train" if name == "train" else f"data.evaluate.{name}"


def _mark(sets: Mapping[str, tuple[str, Held]], whole: bool) -> str:
    settings = [_VERSION, leakage.VERSION, leakage.ALIKE, leakage.PLAIN, UNEVEN, whole]
    settings += [] if whole else [leakage.PICTURES, leakage.BYTES, leakage.PAIRS]
    # Whether what subjects there are count is no part of a digest.
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
    """The findings in all sets, and how many images of each were looked at."""
    looks: dict[str, Thumbnails] = {}
    for _, one in sets.values():
        if one.packed is not None and one.packed.digest not in looks:
            looks[one.packed.digest] = leakage.thumbnails(one.packed, cache, whole)
    seen = {name: _Seen.of(one, looks) for name, (_, one) in sets.items()}
    train, findings, before = sets["train"][1], [], {}
    for name, (digest, one) in sets.items():
        where = _key(name)
        if name != "train":
            findings += _shared(where, train, one)
            findings.append(_look_alikes(where, train, one, seen["train"], seen[name], whole))
            findings += _scored_twice(where, one, {key: two for key, (other, two) in before.items() if other != digest})
            before[where] = digest, one
        findings += [*_classes(where, one), *_two_classes(where, one, seen[name], whole)]
        if one.packed is not None and (damaged := looks[one.packed.digest].damaged):
            of = len(damaged) + len(seen[name].places)
            findings.append(_finding(where, "damaged", "wrong", len(damaged), of, few(damaged, 3), damaged[:_EXAMPLES]))
    return findings, {name: len(some.places) for name, some in seen.items()}


@dataclass(frozen=True)
class _Seen:
    """The samples of a set that were looked at."""

    places: np.ndarray
    cells: np.ndarray

    @staticmethod
    def of(one: Held, looks: Mapping[str, Thumbnails]) -> _Seen:
        if one.packed is None or one.rows is None:
            return _Seen(np.empty(0, np.int64), np.empty((0, leakage.CELLS, leakage.CELLS), np.uint8))
        return _Seen(*looks[one.packed.digest].of(one.rows))


def _shared(where: str, train: Held, one: Held) -> Iterator[Finding]:
    """Find samples that are in data.train too, by name and by content."""
    found = {shared.what: shared for shared in leakage.leaks(train, one)}
    for check, many, what in (("subjects", len(one.subjects), one.kind), ("copies", len(one), one.noun)):
        if shared := found.get(check):
            yield _finding(where, check, "leak", shared.count, many, shared.said, shared.examples[:_EXAMPLES])
        elif check == "subjects" and not (one.subjects and train.subjects):
            said = f"nothing says which {what} its {one.noun} are of, or those of data.train"
            yield _finding(where, check, "unknown", 0, 0, said)
        else:
            yield _finding(where, check, "ok", 0, many, f"none of its {many} {what} is in data.train")


def _scored_twice(where: str, one: Held, others: Mapping[str, Held]) -> Iterator[Finding]:
    """Find samples that are in the sets named before, by name and by content: both are optimistically biased."""
    shared = [some for whose, other in others.items() for some in leakage.leaks(other, one, whose)]
    said, examples = "; ".join(some.said for some in shared), [word for some in shared for word in some.examples]
    if others:
        said = said or f"shares nothing with {few(others)}"
        count = sum(some.count for some in shared)
        yield _finding(where, "scored twice", "odd" if shared else "ok", count, len(one), said, examples[:_EXAMPLES])


def _look_alikes(where: str, train: Held, one: Held, trained: _Seen, seen: _Seen, whole: bool) -> Finding:
    """Find images that look like one in data.train; those of the same content are named already."""
    if not (len(seen.places) and len(trained.places)):
        said = f"its {one.noun} were not looked at, only compared by their content"
        return _finding(where, "look-alikes", "unknown", 0, 0, said)
    twins = leakage.look_alikes(seen.cells, trained.cells, mirrored=True, whole=whole)
    pairs = np.stack([seen.places[twins.here], trained.places[twins.there]], 1)
    other = one.prints[pairs[:, 0]] != train.prints[pairs[:, 1]]
    pairs, of = pairs[other], f"{twins.compared} {one.noun}"
    if twins.plain:
        of += f" ({twins.plain} too plain to be compared)"
    whose = "data.train"
    if len(trained.places) < len(train):
        whose += f" ({len(trained.places)} of its {len(train)} were looked at)"
    if not len(pairs):
        said = f"none of {of} looks like one in {whose}"
        return _finding(where, "look-alikes", "ok", 0, twins.compared, said)
    words = leakage.sample_names(one, train, pairs[:_EXAMPLES])
    how = zip(words, twins.alike[other].tolist(), twins.mirrored[other].tolist(), strict=False)
    words = [f"{word} ({alike:.3f}{', mirrored' if flip else ''})" for word, alike, flip in how]
    said = f"{len(pairs)} of {of} look like one in {whose}: {_listed(words, len(pairs))}"
    return _finding(where, "look-alikes", "leak", len(pairs), twins.compared, said, words, pairs)


def _classes(where: str, one: Held) -> Iterator[Finding]:
    """How many classes there are, how evenly they are filled, and what is of none."""
    if one.counts is None or not len(one.counts):
        return
    counts, pictures = np.asarray(one.counts), one.unit == "images"
    empty, filled = np.flatnonzero(counts == 0), counts[counts > 0]
    said, uneven = f"{len(counts)} classes", False
    if len(filled):
        least, middle, most = (_number(value) for value in (filled.min(), np.median(filled), filled.max()))
        said += f" of {least} to {most} {one.unit}, {middle} in the median"
        uneven = pictures and filled.max() >= UNEVEN * filled.min()
    if uneven:
        fewest = int(np.where(counts > 0, counts, np.inf).argmin())
        said += f"; fewest of {one.classes[fewest]}, most of {one.classes[int(counts.argmax())]}"
    if len(empty):
        said += f"; {len(empty)} have none: {few(one.classes[k] for k in empty.tolist())}"
    yield _finding(where, "classes", "odd" if uneven or len(empty) else "ok", len(empty), len(counts), said)
    # Pixels and voxels may well be of no class, and so may people whom nobody looks for; what is trained on may not.
    total = float(counts.sum()) + one.unlabelled
    wrong = pictures and one.unlabelled and where == _key("train")
    said = f"{_number(one.unlabelled)} of {_number(total)} {one.unit} are of no class"
    yield _finding(where, "unlabelled", "wrong" if wrong else "ok", int(one.unlabelled), int(total), said)


def _two_classes(where: str, one: Held, seen: _Seen, whole: bool) -> Iterator[Finding]:
    """Images that stand under two classes: of the same content, and of the same look."""
    if one.label is None:
        return
    label = one.label[seen.places]
    twins = leakage.look_alikes(seen.cells, seen.cells, (label, label), whole=whole)
    alike = np.stack([seen.places[twins.here], seen.places[twins.there]], 1)
    alike = alike[one.prints[alike[:, 0]] != one.prints[alike[:, 1]]]
    alike = np.unique(np.sort(alike, 1), axis=0)  # each of two is found for the other
    same = leakage.label_conflicts(one.prints, one.label)
    for check, pairs, of in (("two classes", same, len(one)), ("two classes, by look", alike, twins.compared)):
        words = leakage.sample_names(one, one, pairs[:_EXAMPLES])
        listed = f": {_listed(words, len(pairs))}" if words else ""
        said = f"{len(pairs)} pairs of {one.noun} that {'are' if pairs is same else 'look'} the same "
        said += f"stand under two classes{listed}"
        places = pairs if pairs is alike else ()
        yield _finding(where, check, "odd" if words else "ok", len(pairs), of, said, words, places)


def _finding(
    where: str,
    check: str,
    verdict: Verdict,
    count: int,
    of: int,
    said: str,
    examples: Sequence[str] = (),
    pairs: np.ndarray | Sequence[Sequence[int]] = (),
) -> Finding:
    more = {"examples": list(examples), "places": np.asarray(pairs, np.int64).tolist()[:_EXAMPLES]}
    return Finding(where=where, check=check, verdict=verdict, count=count, of=of, said=said, **more)


def _listed(words: Sequence[str], many: int) -> str:
    """The first of so many, as `few` lists them."""
    return ", ".join(words[:5]) + (f" and {many - 5} more" if many > 5 else "")


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() or value >= 1000 else f"{value:.3g}"
