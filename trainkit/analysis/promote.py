"""`trainkit promote`: move an alias of MLflow's model registry to a run that is significantly better.

The checks: the primary metric was measured on the same data, and it is significantly better. The first run under a
model name only has to exceed the chance level. The decision and its numbers become an artifact and tags of the run, and
of the model version if there is one: a refused run is not registered.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from trainkit.config import diff, metric_rules
from trainkit.config.schema import Promote
from trainkit.errors import UserError
from trainkit.redact import without_secrets
from trainkit.tracking import journal, run_folder
from trainkit.tracking.markdown import plain
from trainkit.tracking.mlflow_client import Away
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.sync import send_rest
from trainkit.tracking.upload import left


@dataclass(frozen=True)
class Check:
    """One check of a run."""

    name: str
    """`data`, `score` or `chance`."""
    passed: bool | None
    """None where it was not possible, which refuses no run."""
    why: str


@dataclass(frozen=True)
class Decision:
    """Decision on the promotion of a run."""

    run: str
    model: str
    alias: str
    weights: str
    """Weights of the run: `best of step 400`."""
    held: str = ""
    """Version that had the alias: `version 3, of run RUN`; empty where there was none."""
    checks: tuple[Check, ...] = ()
    """Empty where the run already has the alias."""
    version: str = ""
    """Model version, where the run now has the alias."""

    @property
    def refused(self) -> bool:
        """True where the alias does not move."""
        return any(check.passed is False for check in self.checks)

    @property
    def headline(self) -> str:
        """The decision in one line."""
        what = f"{self.model}@{self.alias}"
        if not self.checks:
            return f"{what} is already version {self.version}, of this run"
        if self.refused:
            return f"{what}: run {self.run} is refused; " + (f"it stays {self.held}" if self.held else "it is not set")
        before = f"; it was {self.held}" if self.held else ""
        return f"{what} is now version {self.version}, of run {self.run}, {self.weights}{before}"

    def lines(self) -> list[str]:
        """The decision and its checks."""
        marks = {True: "  ", False: "! ", None: "- "}
        return [self.headline, *(f"{marks[check.passed]}{check.name:8}{check.why}" for check in self.checks)]


@dataclass(frozen=True)
class _Candidate:
    """A run that is to be promoted."""

    folder: RunFolder
    run_id: str
    metric: str
    """That of `best`, which chose the weights."""
    step: int
    model_id: str
    value: float
    """The metric of the weights that are to be promoted."""
    lower: bool = False
    """True where lower values of the metric are better."""
    chance: float | None = None
    """What guessing reaches in 999 of 1,000 cases; None where that is unknown."""


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
    """Move the alias to a run if it is significantly better than the run that has it, and record the decision.

    Raises UserError where no decision is possible: a run that did not finish or has no models, a metric that it lacks,
    an alias on a model of no run in this store, a store that does not answer.
    """
    candidate = _candidate(store, run)
    name = asked.name or run.info().recipe
    client = store.client()
    with store.asking():
        held = _holder(client, name, asked.alias)
        about: dict[str, Any] = {"run": run.name, "model": name, "alias": asked.alias}
        about["weights"] = f"best of step {candidate.step}"
        if held is not None and held.run_id == candidate.run_id:
            return Decision(**about, version=str(held.version))
        evidence: dict[str, Any] = {"metric": candidate.metric, "model_id": candidate.model_id}
        if held is None:
            checks = [_above_chance_level(candidate)]
        else:
            holder = _run_of(store, held, asked.alias)
            about["held"] = f"version {held.version}, of run {holder.name}"
            checks, found = _against(store, holder, candidate)
            evidence |= {"holder": {"run": holder.name, "version": str(held.version)}, **found}
        decision = Decision(**about, checks=tuple(checks))
        if not decision.refused:
            decision = replace(decision, version=_registered(client, candidate, name))
        path = _write_down(client, candidate.run_id, decision, evidence)
        if not decision.refused:
            now = _holder(client, name, asked.alias)
            if (now and str(now.version)) != (held and str(held.version)):
                raise UserError(f"{name}@{asked.alias}", "moved during the decision", remedy="run the command again")
            # Last: an alias never points to a version whose evidence is missing.
            client.set_registered_model_alias(name, asked.alias, decision.version)
        client.set_tag(candidate.run_id, "trainkit.promotion", decision.headline)
        client.set_tag(candidate.run_id, "trainkit.promotion.evidence", path)
    return decision


def at_end(store: Store, run: RunFolder, asked: Promote) -> str:
    """Promote a run that has just finished, and return the decision as lines. Errors are returned, not raised."""
    try:
        return "\n".join(promote(store, run, asked).lines())
    except Away as error:
        return f"not promoted: {error.where} {error.found}; run later: trainkit promote {run.name}"
    except UserError as error:
        return f"not promoted: {error}"
    except Exception as error:  # the training is done, and nothing of it is lost
        return f"not promoted: {type(error).__name__}: {without_secrets(str(error))[:300]}"


# ---- The run, and the holder of the alias ----------------------------------------------------------------------------


def _candidate(store: Store, run: RunFolder) -> _Candidate:
    where, info = f"run {run.name}", run.info()
    if titles := run_folder.members(run):
        found, remedy = f"is the parent run of {len(titles)} runs", f"trainkit show {run.name} lists them"
        raise UserError(where, found, "one of its child runs", remedy)
    if info.status != "FINISHED":
        raise UserError(where, f"is {info.status}", "a finished run", "continue it with --resume")
    recipe = diff.read(run.recipe)
    metric = (recipe.get("best") or {}).get("metric")
    if metric is None:
        found = "its recipe has no best.metric, which chooses the weights"
        raise UserError(where, found, remedy="train with best='{metric: EVALUATION/SCORE}'")
    history = journal.read(run.journal)
    lower = bool(metric_rules.lower_is_better(metric, recipe, info.directions))
    if info.unsent or left(run)[1]:  # its models may be among it
        send_rest(run, store)
    step, model_id = _model(run)
    if (run_id := run.info().run_id) is None:
        raise UserError(where, "is not in MLflow", remedy=f"trainkit sync {run.name}")
    value = next((point.value for point in history.metrics.get(metric, ()) if point.step == step), None)
    if value is None:
        raise UserError(where, f"{metric} was not measured at step {step}, whose weights would be promoted")
    bounds = [event.data[metric] for event in history.events if event.name == "chance" and metric in event.data]
    chance = float(bounds[-1]) if bounds else None
    return _Candidate(run, run_id, metric, step, model_id, value, lower, chance)


def _model(run: RunFolder) -> tuple[int, str]:
    """Return step and id of the LoggedModel with the best weights of a run."""
    try:
        made = json.loads((run.path / "models.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        made = {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(str(run.path / "models.json"), f"cannot be read: {error}") from None
    # An interrupted run may have earlier ones.
    steps = [int(key.removeprefix("best@")) for key in made if key.startswith("best@")]
    if not steps:
        raise UserError(f"run {run.name}", "has no model", "a run that kept its best weights")
    return max(steps), made[f"best@{max(steps)}"]


def _holder(client: Any, name: str, alias: str) -> Any:
    """Return the model version that has an alias, or None."""
    from mlflow.exceptions import MlflowException

    try:
        versions = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return client.get_model_version(name, str(versions[alias])) if alias in versions else None


def _run_of(store: Store, held: Any, alias: str) -> RunFolder:
    """Return the run of a model version; its folder must be here to be compared."""
    with contextlib.suppress(UserError):
        return store.find(held.run_id or "")
    found = f"version {held.version} has no run in {store.home / 'runs'}, so no comparison is possible"
    remedy = "promote where the folder of its run is, or remove the alias on the MLflow page"
    raise UserError(f"{held.name}@{alias}", found, remedy=remedy)


# ---- Checks ----------------------------------------------------------------------------------------------------------


def _above_chance_level(candidate: _Candidate) -> Check:
    """Check that the metric of the weights is better than guessing, where that is known."""
    metric, value, chance = candidate.metric, candidate.value, candidate.chance
    if not math.isfinite(value):
        return Check("chance", False, f"{metric} is {value}, not a finite number")
    if chance is None:
        why = "its chance level is unknown, and no champion exists to compare with"
        return Check("chance", None, f"{metric} {value:.4f}; {why}")
    bound = "lower" if candidate.lower else "upper"
    why = f"{metric} {value:.4f}, {bound} bound of chance level {chance:.4f} (99.9 %)"
    return Check("chance", value < chance if candidate.lower else value > chance, why)


def _against(store: Store, holder: RunFolder, candidate: _Candidate) -> tuple[list[Check], dict[str, Any]]:
    """Check a run against the one that has the alias; return the checks and their numbers."""
    from trainkit.analysis.compare import compare
    from trainkit.analysis.compare_report import method, verdict

    theirs = (diff.read(holder.recipe).get("best") or {}).get("metric") or ""
    if _title(theirs) != _title(candidate.metric):
        which = f"those with the best {theirs}" if theirs else "its last"
        return [Check("score", False, f"the alias is on other weights of run {holder.name}: {which}")], {}
    found = compare(store, [holder, candidate.folder])
    evidence: dict[str, Any] = {"changes": [str(change) for change in found.changes]}
    score = next((s for s in found.scores if f"{s.evaluation}/{s.metric}" == f"best/{candidate.metric}"), None)
    if score is None:
        return [Check("score", False, f"run {holder.name} has no best/{candidate.metric} to compare with")], evidence
    evidence["score"] = {key: getattr(score, key) for key in ("values", "difference", "low", "high", "draws", "units")}
    evidence["score"]["verdict"] = score.verdict
    evaluation = candidate.metric.partition("/")[0]
    evidence["digests"] = [side.digest(evaluation) for side in found.sides]
    if not found.same_data.get(evaluation, False) or score.verdict == "not comparable":
        return [Check("data", False, f"{evaluation}: not comparable: {score.why}")], evidence
    one, other = score.values
    said = f"{candidate.metric} {one:.4f} -> {other:.4f}, {score.difference:+.4f}"
    if score.low is not None and score.high is not None:
        said += f" (95 % CI {score.low:+.4f} to {score.high:+.4f}; {method(score)})"
    why = f" ({score.why})" if score.why else ""
    better = Check("score", score.verdict == "better", f"{said}: {verdict(score)}{why}")
    return [Check("data", True, f"{evaluation}: same data in both"), better], evidence


# ---- Registry and artifacts ------------------------------------------------------------------------------------------


def _registered(client: Any, candidate: _Candidate, name: str) -> str:
    """Return the model version of the candidate's weights, and create it if it does not exist."""
    from mlflow.exceptions import MlflowException

    model = client.get_logged_model(candidate.model_id)
    # An interrupted attempt has already created one.
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
        # Path of its files: MLflow 3.17 would look up `models:/<id>` in the store of its global settings.
        source=model.artifact_location,
        run_id=candidate.run_id,
        model_id=candidate.model_id,
        tags={
            "trainkit.model": candidate.model_id,
            "trainkit.run": candidate.folder.name,
            "trainkit.weights": f"best@{candidate.step}",
            f"trainkit.score.{candidate.metric}": repr(candidate.value),
        },
    )
    known = json.loads(model.tags.get("mlflow.modelVersions", "[]"))
    if not any(entry["name"] == name and str(entry["version"]) == str(version.version) for entry in known):
        # The page of the model lists its versions from this tag, which only a server sets on its own.
        known.append({"name": name, "version": version.version})
        client.set_logged_model_tags(candidate.model_id, {"mlflow.modelVersions": json.dumps(known)})
    return str(version.version)


def _write_down(client: Any, run_id: str, decision: Decision, evidence: Mapping[str, Any]) -> str:
    """Log a decision and its evidence as an artifact of the run, and in the version; returns the artifact's path."""
    now = time.gmtime()
    word = re.sub(r"[^\w.-]", "-", f"{decision.model}-{decision.alias}")
    path = f"promotion/{word}-{time.strftime('%Y%m%d-%H%M%S', now)}.json"
    text = {
        "decision": "refused" if decision.refused else "promoted",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        **asdict(decision),
        **evidence,
    }
    client.log_dict(run_id, text, path)
    if decision.version:
        # As markdown each line is a paragraph.
        client.update_model_version(decision.model, decision.version, "\n\n".join(map(plain, decision.lines())))
        for key, value in {"decision": decision.headline, "evidence": path}.items():
            client.set_model_version_tag(decision.model, decision.version, f"trainkit.promotion.{key}", value)
    return path


def _title(metric: str) -> str:
    """Return the part before the metric: an evaluation, or that of EMA weights (`val/ema`)."""
    return metric.rpartition("/")[0]
