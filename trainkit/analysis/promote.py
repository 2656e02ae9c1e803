"""`trainkit promote`: an alias of MLflow's model registry moves to a run that beats the one that has it.

Checked are, in this order: that the deciding score was taken of the same data, that it is better beyond chance, and
that the training is not slower by more than is allowed, where both ran on the same hardware. The first run of a name
has to beat the chance level alone. The decision and its numbers become an artifact and tags of the run, and of the
model version where one is made: a refused run is not registered.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trainkit.config import diff, loader
from trainkit.config.schema import Promote
from trainkit.errors import UserError
from trainkit.redact import without_secrets
from trainkit.tracking import journal, logged_model, run_folder
from trainkit.tracking.markdown import plain
from trainkit.tracking.mlflow_errors import Away
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import send_rest
from trainkit.tracking.upload_queue import left

HARDWARE = ("device", "gpu", "cpu", "cpu_cores", "processes")
"""Parameters `machine.*` that two runs must share for their speeds to be compared."""


@dataclass(frozen=True)
class Check:
    """One check of a run."""

    name: str
    """`data`, `score`, `chance` or `speed`."""
    passed: bool | None
    """None where it could not be made, which refuses no run."""
    why: str


@dataclass(frozen=True)
class Decision:
    """Decision on a run that asked for an alias."""

    run: str
    model: str
    alias: str
    weights: str
    """Which of the run's: `best of step 400`."""
    held: str = ""
    """Who had the alias: `version 3, of run RUN`; empty where no one had."""
    checks: tuple[Check, ...] = ()
    """Empty where the run has the alias already."""
    version: str = ""
    """Of the model, where the run has the alias now."""

    @property
    def refused(self) -> bool:
        """True where the alias stays where it is."""
        return any(check.passed is False for check in self.checks)

    @property
    def headline(self) -> str:
        """The decision in one line."""
        what = f"{self.model}@{self.alias}"
        if not self.checks:
            return f"{what} is version {self.version}, of this run, already"
        if self.refused:
            return f"{what}: run {self.run} is refused; " + (f"it stays {self.held}" if self.held else "no one has it")
        before = f"; it was {self.held}" if self.held else ""
        return f"{what} is now version {self.version}, of run {self.run}, {self.weights}{before}"

    def lines(self) -> list[str]:
        """The decision, and why."""
        marks = {True: "  ", False: "! ", None: "- "}
        return [self.headline, *(f"{marks[check.passed]}{check.name:8}{check.why}" for check in self.checks)]


@dataclass(frozen=True)
class _Candidate:
    """A run as the gate sees it."""

    folder: RunFolder
    run_id: str
    metric: str
    weights: str
    """`best` or `last`, the name of its LoggedModel."""
    step: int
    model_id: str
    history: journal.History

    @property
    def score(self) -> str:
        """Evaluation and name under which a comparison has the deciding score of these weights."""
        return f"best/{self.metric}" if self.weights == "best" else self.metric

    def value(self, name: str) -> float | None:
        """A score of the weights that are to be promoted."""
        return next((p.value for p in self.history.metrics.get(name, []) if p.step == self.step), None)

    @property
    def rank(self) -> float:
        """Its deciding score, turned so that more is better; what is no number is worst."""
        from trainkit.metrics.bootstrap import lower_is_better

        value = self.value(self.metric)
        best = diff.read(self.folder.recipe).get("best") or {}
        less = lower_is_better(self.metric.rpartition("/")[2])
        less = best.get("mode") == "min" if best.get("metric") == self.metric else less
        return -math.inf if value is None or math.isnan(value) else -value if less else value


def asked(run: RunFolder, given: Mapping[str, Any]) -> Promote:
    """Return the `promote` block of a run's recipe, changed by the options of the command line that are not None.

    Raises UserError for invalid options.
    """
    said = {key: value for key, value in given.items() if value is not None}
    known = {field.name for field in fields(Promote)}
    own = {key: value for key, value in (diff.read(run.recipe).get("promote") or {}).items() if key in known}
    try:
        return Promote(**{**own, **said})
    except ValueError as error:
        raise UserError("promote", str(error)) from None


def promote(store: Store, run: RunFolder, asked: Promote) -> Decision:
    """Move the alias to a run if it beats the run that has it, and write down what was decided.

    Of a run above the seeds of a recipe, the weights of the best seed stand for all: asked is whether the seeds
    together beat those of the run that has the alias, or that run.

    Raises UserError for what cannot be decided: a run that did not finish or has no models, a score that it does not
    have, an alias that belongs to a model of no run here, a store that does not answer.
    """
    seeds = _seeds(store, run)
    candidates = [_candidate(store, one, asked) for one in seeds or [run]]
    candidate = max(candidates, key=lambda one: one.rank)
    name = asked.name or candidate.folder.info().recipe
    client = store.client()
    with store.asking():
        held = _holder(client, name, asked.alias)
        about: dict[str, Any] = {"run": run.name, "model": name, "alias": asked.alias}
        about["weights"] = f"{candidate.weights} of step {candidate.step}"
        if seeds:
            about["weights"] += f" of {candidate.folder.name}, the best of {len(seeds)} seeds"
        if held is not None and held.run_id == candidate.run_id:
            return Decision(**about, version=str(held.version))
        evidence: dict[str, Any] = {"metric": candidate.metric, "model_id": candidate.model_id}
        if held is None:
            checks: list[Check] = [_above_chance_level(min(candidates, key=lambda one: one.rank))]
        else:
            holder = _run_of(store, held, asked.alias)
            about["held"] = f"version {held.version}, of run {holder.name}"
            checks, found = _against(store, client, holder, run, candidate, asked)
            evidence |= {"holder": {"run": holder.name, "version": str(held.version)}, **found}
        decision = Decision(**about, checks=tuple(checks))
        if not decision.refused:
            version = _registered(client, candidate, name, run)
            decision = Decision(**about, checks=tuple(checks), version=version)
        run_id = _run_id(run)
        path = _write_down(client, run_id, decision, evidence)
        if not decision.refused:
            now = _holder(client, name, asked.alias)
            if (now and str(now.version)) != (held and str(held.version)):
                raise UserError(f"{name}@{asked.alias}", "moved while it was decided", remedy="promote again")
            # Last: an alias never stands at a version whose evidence is not there.
            client.set_registered_model_alias(name, asked.alias, decision.version)
        client.set_tag(run_id, "trainkit.promotion", decision.headline)
        client.set_tag(run_id, "trainkit.promotion.evidence", path)
    return decision


def at_end(store: Store, run: RunFolder, asked: Promote) -> str:
    """Promote a run that has just finished: what was decided, in lines. Whatever goes wrong is said, not raised."""
    try:
        return "\n".join(promote(store, run, asked).lines())
    except Away as error:
        return f"not promoted: {error.where} {error.found}; later: trainkit promote {run.name}"
    except UserError as error:
        return f"not promoted: {error}"
    except Exception as error:  # the training is done, and nothing of it is lost
        return f"not promoted: {type(error).__name__}: {without_secrets(str(error))[:300]}"


# ---- Who asks, and who has it ----------------------------------------------------------------------------------------


def _finished(run: RunFolder) -> None:
    info = run.info()
    if info.status != "FINISHED":
        raise UserError(f"run {run.name}", f"is {info.status}", "a finished run", "continue it with --resume")


def _run_id(run: RunFolder) -> str:
    if (run_id := run.info().run_id) is None:
        raise UserError(f"run {run.name}", "is not in MLflow", remedy=f"trainkit sync {run.name}")
    return run_id


def _seeds(store: Store, run: RunFolder) -> list[RunFolder]:
    """The runs beneath one that repeats a recipe with several seeds; none of another run."""
    titles = run_folder.members(run)
    if not titles or not all(title.startswith("seed ") for title in titles):
        return []
    _finished(run)
    return [store.find(name) for name in titles.values()]


def _candidate(store: Store, run: RunFolder, asked: Promote) -> _Candidate:
    _finished(run)
    where = f"run {run.name}"
    recipe = diff.read(run.recipe)
    best = (recipe.get("best") or {}).get("metric")
    metric = asked.metric or best
    if metric is None:
        raise UserError(where, "its recipe names no best score", remedy="name one with --metric")
    history = journal.read(run.journal)
    if metric not in history.metrics:
        sets = tuple(f"{name}/" for name in recipe.get("evaluations") or {})
        known = [name for name in history.metrics if name.startswith(sets)] if sets else []
        near = difflib.get_close_matches(metric, known, n=3, cutoff=0.4) or known[:3]
        raise UserError(where, f"has no score {metric!r}", remedy=f"the nearest are {', '.join(near)}" if near else "")
    if run.info().unsent or left(run)[1]:  # among it may be its models
        send_rest(run, store)
    weights, step, model_id = _model(run)
    candidate = _Candidate(run, _run_id(run), metric, weights, step, model_id, history)
    chosen = _title(best or "") if weights == "best" else metric.partition("/")[0]
    if _title(metric) != chosen:
        raise UserError(where, f"{metric} is not of the weights that would be promoted", f"a score {chosen}/...")
    if candidate.value(metric) is None:
        raise UserError(where, f"{metric} was not measured at step {step}, whose weights would be promoted")
    return candidate


def _model(run: RunFolder) -> tuple[str, int, str]:
    """Name, step and id of the LoggedModel that a run hands on: its best, or its last where there is no best."""
    try:
        made = json.loads((run.path / "models.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        made = {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(run.path / "models.json"), f"cannot be read: {error}") from None
    for name in ("best", "last"):
        # Of a run that was interrupted there may be earlier ones.
        steps = [int(key.removeprefix(f"{name}@")) for key in made if key.startswith(f"{name}@")]
        if steps:
            return name, max(steps), made[f"{name}@{max(steps)}"]
    raise UserError(
        f"run {run.name}", "has no model", remedy="of a run above folds or settings, promote one beneath it"
    )


def _holder(client: Any, name: str, alias: str) -> Any:
    """The model version that has an alias, or None."""
    from mlflow.exceptions import MlflowException

    try:
        versions = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return client.get_model_version(name, str(versions[alias])) if alias in versions else None


def _run_of(store: Store, held: Any, alias: str) -> RunFolder:
    """The run that a model version is of, or that above its seeds, whose folder must be here: rows are compared."""
    for word in filter(None, (held.tags.get("trainkit.above"), held.run_id)):
        with contextlib.suppress(UserError):
            return store.find(word)
    found = f"version {held.version} is of no run in {store.home / 'runs'}, so that nothing can be compared with it"
    remedy = "promote where the folder of its run is, or take the alias off it in the MLflow page"
    raise UserError(f"{held.name}@{alias}", found, remedy=remedy)


# ---- What is asked ---------------------------------------------------------------------------------------------------


def _above_chance_level(candidate: _Candidate) -> Check:
    """Check that the scores of the weights are above the chance level, where that is known.

    Where it is not known of the deciding score, as of an accuracy with a threshold, the others of its evaluation are
    checked: an AUC.
    """
    metric, value = candidate.metric, candidate.value(candidate.metric)
    if value is None or not math.isfinite(value):
        return Check("chance", False, f"{metric} is {value}, no number")
    kept = [event.data for event in candidate.history.events if event.name == "chance"]
    bounds = {name: float(bound) for each in kept for name, bound in each.items()}
    names = [metric] if metric in bounds else [name for name in bounds if _title(name) == _title(metric)]
    if not names:
        return Check("chance", None, f"{metric} {value:.4f}; what guessing could reach is not known, and no one has it")
    scores = {name: candidate.value(name) for name in names}
    above = {name: score is not None and score > bounds[name] for name, score in scores.items()}
    said = [f"{name} {_said(score)}, guessing stays below {bounds[name]:.4f}" for name, score in scores.items()]
    return Check("chance", all(above.values()), "; ".join(said) + " in 999 of 1,000 cases")


def _against(
    store: Store, client: Any, holder: RunFolder, run: RunFolder, candidate: _Candidate, asked: Promote
) -> tuple[list[Check], dict[str, Any]]:
    """Check a run against the one that has the alias; return the checks and the numbers behind them."""
    from trainkit.analysis.compare import compare

    theirs = (diff.read(holder.recipe).get("best") or {}).get("metric") or ""
    if _title(theirs) != (_title(candidate.metric) if candidate.weights == "best" else ""):
        which = f"those that {theirs} chose" if theirs else "its last"
        return [Check("score", False, f"of run {holder.name} other weights have it, {which}")], {}
    found = compare(store, [holder, run])
    evidence: dict[str, Any] = {"changes": [str(change) for change in found.changes]}
    score = next((s for s in found.scores if f"{s.evaluation}/{s.metric}" == candidate.score), None)
    if score is None:
        return [Check("score", False, f"run {holder.name} has no {candidate.score} to compare with")], evidence
    ends = {"difference": score.difference, "low": score.low, "high": score.high}
    evidence["score"] = {
        "values": [float(value) for value in score.values],
        **{key: None if value is None else float(value) for key, value in ends.items()},
        "draws": score.draws,
        "units": str(score.units),
        "verdict": score.verdict,
    }
    evaluation = candidate.metric.partition("/")[0]
    evidence["digests"] = [side.digest(evaluation) for side in found.sides]
    same = found.same_data.get(evaluation, False) and score.verdict != "not comparable"
    data = Check("data", same, f"{evaluation} is the same for both" if same else f"{evaluation}: {score.why}")
    if not same:
        return [data], evidence
    one, other = (_said(value) for value in score.values)
    said = f"{candidate.metric} {one} -> {other}, {score.difference:+.4f}"
    if score.low is not None and score.high is not None:
        said += f" ({score.low:+.4f} to {score.high:+.4f}; {score.draws} draws of {score.units})"
    why = f" ({score.why})" if score.why else ""
    better = Check("score", score.verdict == "better", f"{said}: {score.verdict}{why}")
    sides = [_seeds(store, one) or [one] for one in (holder, run)]
    speeds, hardware = [_throughput(side) for side in sides], [_shared(client, side) for side in sides]
    evidence["speed"] = {"samples_per_s": speeds, "hardware": hardware}
    return [data, better, speed(speeds, hardware, asked.max_slower)], evidence


def speed(rates: Sequence[float | None], hardware: Sequence[Mapping[str, str]], max_slower: float | None) -> Check:
    """Check that a training is not slower than another by more than a share.

    `rates` are samples/s and `hardware` the machines, of the one before and of the new one; where machines differ, or
    are not known, nothing is checked.
    """
    before, after = rates
    if max_slower is None:
        return Check("speed", None, "not asked: max_slower is null")
    if before is None or after is None or not before > 0:
        return Check("speed", None, "not asked: not known of both")
    if not all(hardware):
        return Check("speed", None, "not asked: one of them was continued on other hardware, or does not say on which")
    other = [key for key in HARDWARE if hardware[0].get(key) != hardware[1].get(key)]
    if other:
        words = ", ".join(f"{key} {hardware[0].get(key)} -> {hardware[1].get(key)}" for key in other)
        return Check("speed", None, f"not asked: other hardware ({words})")
    slower = 1 - after / before
    change = f"{100 * abs(slower):.1f} % {'slower' if slower > 0 else 'faster'}"
    allowed = f"{100 * max_slower:g} % slower is allowed"
    return Check("speed", slower <= max_slower, f"{before:.4g} -> {after:.4g} samples/s, {change}; {allowed}")


def _throughput(runs: Sequence[RunFolder]) -> float | None:
    """Mean of their samples/s; None where one has none."""
    rates = [rate for run in runs if (rate := _speed(journal.read(run.journal))) is not None]
    return sum(rates) / len(rates) if len(rates) == len(runs) else None


def _speed(history: journal.History) -> float | None:
    points = history.metrics.get("final/speed/samples_per_s")
    return points[-1].value if points else None


def _shared(client: Any, runs: Sequence[RunFolder]) -> dict[str, str]:
    """Return the hardware of all of them; empty where that differs, or is not known of one."""
    first, *others = [_hardware(client.get_run(run.info().run_id)) for run in runs]
    return first if all(other == first for other in others) else {}


def _hardware(run: Any) -> dict[str, str]:
    """Return the hardware of a run, by its parameters; empty where that changed on resume, or is not known."""
    if '"machine.' in run.data.tags.get("trainkit.changed_params", ""):
        return {}
    named = {key: run.data.params.get(f"machine.{key}") for key in HARDWARE}
    return {key: value for key, value in named.items() if value is not None}


# ---- What is written -------------------------------------------------------------------------------------------------


def _registered(client: Any, candidate: _Candidate, name: str, run: RunFolder) -> str:
    """The version of the model that is of the candidate's weights, made where it is not there yet.

    `run` is that which asked: the candidate's, or that above it, whose name the version then has as a tag.
    """
    from mlflow.exceptions import MlflowException

    model = client.get_logged_model(candidate.model_id)
    _complete(client, candidate, model)
    # Of an attempt that was cut short there is one already.
    for made in client.search_model_versions(f"run_id = '{candidate.run_id}'"):
        if made.name == name and made.tags.get("trainkit.model") == candidate.model_id:
            return str(made.version)
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    version = client.create_model_version(
        name,
        # Where its files are. `models:/<id>` MLflow 3.17 would look up in the store of its global settings.
        source=model.artifact_location,
        run_id=candidate.run_id,
        model_id=candidate.model_id,
        tags={
            "trainkit.model": candidate.model_id,
            "trainkit.run": candidate.folder.name,
            **({"trainkit.above": run.name} if run != candidate.folder else {}),
            "trainkit.weights": f"{candidate.weights}@{candidate.step}",
            f"trainkit.score.{candidate.metric}": repr(candidate.value(candidate.metric)),
        },
    )
    known = json.loads(model.tags.get("mlflow.modelVersions", "[]"))
    if not any(entry["name"] == name and str(entry["version"]) == str(version.version) for entry in known):
        # The page of the model names its versions by this tag; only a server sets it by itself.
        known.append({"name": name, "version": version.version})
        client.set_logged_model_tags(candidate.model_id, {"mlflow.modelVersions": json.dumps(known)})
    return str(version.version)


def _complete(client: Any, candidate: _Candidate, model: Any) -> None:
    """Add what MLflow loads a model by to one that an older trainkit logged as weights alone."""
    from trainkit.inference import mlflow_model

    files = {file.path: file.file_size for file in client.list_logged_model_artifacts(model.model_id)}
    weights = [name for name in files if name.endswith(".safetensors")]
    if logged_model.MLMODEL in files or len(weights) != 1:
        return
    scores = {metric.key: metric.value for metric in model.metrics or []}
    try:
        recipe = loader.load(candidate.folder.recipe)
    except UserError:  # a plug-in's: it stays a file of weights
        return
    described = mlflow_model.describe(recipe, candidate.folder, weights[0], candidate.step, scores)
    if described is not None:
        with tempfile.TemporaryDirectory() as folder:
            about = {"name": model.name, "model_id": model.model_id, "run_id": candidate.run_id}
            size = files[weights[0]] or 0
            for file in logged_model.write_files(Path(folder), asdict(described), size=size, **about):
                client.log_model_artifact(model.model_id, str(file))


def _write_down(client: Any, run_id: str, decision: Decision, evidence: Mapping[str, Any]) -> str:
    """Keep a decision and its evidence as an artifact of the run and with the version; returns where it is."""
    now = time.gmtime()
    word = re.sub(r"[^\w.-]", "-", f"{decision.model}-{decision.alias}")
    path = f"promotion/{word}-{time.strftime('%Y%m%d-%H%M%S', now)}.json"
    text = {
        "decision": "refused" if decision.refused else "promoted",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        **{key: value for key, value in asdict(decision).items() if key != "checks"},
        **evidence,
        "checks": [asdict(check) for check in decision.checks],
    }
    client.log_dict(run_id, text, path)
    if decision.version:
        # As markdown each line is a paragraph.
        client.update_model_version(decision.model, decision.version, "\n\n".join(map(plain, decision.lines())))
        for key, value in {"decision": decision.headline, "evidence": path}.items():
            client.set_model_version_tag(decision.model, decision.version, f"trainkit.promotion.{key}", value)
    return path


def _title(metric: str) -> str:
    """Return the part before the score: an evaluation, or EMA weights on it (`val/ema`)."""
    return metric.rpartition("/")[0]


def _said(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
