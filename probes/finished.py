"""Measuring finished probes on a store: the one that fitted them, or another."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from activations.provenance import provenance
from activations.target import Fingerprint
from probes.artifact import ChoiceError, Probe, ProbeConfig, ProbeError
from probes.joined import Joined, joined_task
from probes.reading import logits_at, sites_of
from probes.result import JSON_FILE, Report
from probes.rows import Split, Store, check_classes, group_keys, manifest_hash
from probes.study import BEST, StudyConfig, Subject, study
from probes.sweep import Recipe
from probes.task import (
    NONE_LEFT,
    LabelOf,
    Task,
    check_match,
    check_rows,
    measured_task,
    task_of,
    unfitted_task,
    was_seen,
)
from probes.thresholds import ThresholdConfig

Say = Callable[[str], None]
UNKNOWN_SEEN = (
    "which documents fitted the probe is not written down: where the store holds some of them, the numbers are too "
    "good; name the store that fitted it (--fitted), or measure on other prompts"
)


@dataclass(frozen=True)
class EvaluateConfig:
    """How a finished probe is measured."""

    study: StudyConfig = field(default_factory=StudyConfig)
    """What is measured beside it."""
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)
    """Of the rules that choose a threshold; the probe's own threshold stays."""
    resamples: int = 1000
    """Bootstrap resamples of documents behind each interval."""

    def __post_init__(self) -> None:
        if self.resamples < 1:
            raise ValueError(f"resamples is {self.resamples}; it must be 1 or more")


@dataclass(frozen=True)
class Run:
    """Finished probes, and what is known of their training."""

    probes: Mapping[str, Probe]
    """By name; `best` is among them."""
    recipes: Mapping[str, Recipe]
    """How each was fitted."""
    selection_share: float
    """Of the split."""
    seed: int
    """Of the split."""
    groups_seen: frozenset[str] | None = None
    """Keys of the groups that fitted or selected; None where nobody wrote them down."""


def load_run(name: str) -> Run:
    """A folder that `switchsd train probe` wrote, or one probe: a folder, a shipped name or a hub id.

    Raises ProbeError for a folder without its best probe, and for damaged files.
    """
    root = Path(name)
    told: dict[str, Any] = {}
    if (root / JSON_FILE).is_file() or (root / BEST / "config.json").is_file():
        if not (root / BEST / "config.json").is_file():
            raise ProbeError(f"{root} has no probe named {BEST}: train again, or name one probe's folder")
        told = _told(root)
        folders = sorted(file.parent for file in root.glob("*/config.json"))
        if told:  # others are of an earlier run
            folders = [folder for folder in folders if folder.name in {BEST, *told["probes"]}]
        probes = {folder.name: Probe.from_pretrained(folder) for folder in folders}
    else:
        probes = {BEST: Probe.from_pretrained(name)}
        beside = _told(root.parent) if root.is_dir() else {}
        told = beside if root.resolve().name in beside.get("probes", {}) else {}
    settings = told.get("config", {})
    recipes = {}
    for key, probe in probes.items():
        config = probe.config
        known: list[Any] = list(told.get("probes", {}).values())
        entry: dict[str, Any] = next((p for p in known if p.get("site") == config.site), {})
        l2 = config.metrics.get("selection part", {}).get("l2")
        seed = int(config.provenance.get("seed") or 0)
        recipes[key] = Recipe(config.site, entry.get("estimator", config.kind), l2, settings.get("bias", True), seed)
    seed = int(settings.get("seed", recipes[BEST].seed))
    seen = told.get("split", {}).get("groups_seen")
    if told.get("store") != probes[BEST].config.store:  # an evaluation on another store
        seen = None
    share = float(settings.get("selection_share", 0.2))
    return Run(probes, recipes, share, seed, None if seen is None else frozenset(map(str, seen)))


def _told(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / JSON_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ProbeError(f"cannot read {folder / JSON_FILE} ({error}): train the probe again") from error
    if not isinstance(found, dict) or not all(
        isinstance(found.get(k, {}), dict) for k in ("config", "split", "probes")
    ):
        raise ProbeError(f"{folder / JSON_FILE} is damaged: train the probe again")
    return {"probes": {}, **found}


def evaluate_probes(
    run: Run,
    store: Store,
    config: EvaluateConfig | None = None,
    *,
    fitted: Store | None = None,
    sampled: Store | None = None,
    random_init: Store | None = None,
    say: Say = lambda what: None,
) -> Report:
    """Measure a run's probes on a store, the best one in every way.

    On the store that fitted them only the test part counts; of another one, rows of groups that fitted them are left
    out. On another store, with `fitted` (the store that fitted
    them), whatever is fitted here is fitted on that, so that probe and baselines know the same. Without it, baselines
    know the domain and the probe does not: on a store whose prompts have a train and a validation part they are fitted
    on the train part and the validation part counts; of any other store all rows count, cross-fitted by document.

    sampled: a store of the same target's sampled text; random_init: one of a randomly initialised target of the same
    shape. Raises ProbeError (ChoiceError where another choice is needed).
    """
    started, config = time.perf_counter(), config or EvaluateConfig()
    best = run.probes[BEST].config
    asked = LabelOf(best.label, int(best.label_settings.get("follow_m", 1)), best.kappa,  # type: ignore[arg-type]
                    best.label_settings.get("rows") == "with a suffix match")  # fmt: skip
    measured = store
    if fitted is not None and manifest_hash(store) != best.store:
        if manifest_hash(fitted) != best.store:
            raise ChoiceError("the store given as the one that fitted the probe is another one: its manifest differs")
        _check_store(best, store, "the store")
        store = joined = Joined(fitted, store)
        task = joined_task(joined, asked, run.selection_share, config.resamples, run.seed)
    else:
        task = _task(run, store, best, asked, config)
    subjects, missing = {}, []
    for name, probe in run.probes.items():
        _check_store(probe.config, store, "the store")
        if name != BEST and any(site not in store.sites for site in probe.config.sites):
            missing.append(f"the probe {name}: the store has no states at {probe.config.site}")
            continue
        subjects[name] = _subject(probe, run.recipes[name], store, len(task.y))
    others: dict[str, tuple[Task, NDArray[np.float64]]] = {}
    if sampled is not None:
        _check_store(best, sampled, "the sampled store")
        _check_sampled(sampled)
        seen = {*group_keys(task.rows["group"][task.split.part != "test"]).tolist(), *(run.groups_seen or ())}
        other = unfitted_task(sampled, asked, seen, config.resamples, run.seed)
        others["sampled"] = other, _subject(run.probes[BEST], run.recipes[BEST], sampled, len(other.y)).score
    initial = None
    if random_init is not None:
        _check_random(best, random_init)
        sites_of(random_init, [best.site])
        initial = random_init, task_of(random_init, asked, run.selection_share, config.resamples, run.seed)
    findings = study(task, store, subjects, config.study, say, config.threshold, initial, others)
    findings.skipped.extend(missing)
    if store is measured and manifest_hash(store) != best.store:
        if gone := np.unique(task.rows["group"][task.split.part == "other"].astype(str)).tolist():
            rows = int((task.split.part == "other").sum())
            findings.skipped.append(
                f"{rows} rows of {len(gone)} groups of documents: these fitted the probe or chose it"
            )
        if run.groups_seen is None:
            findings.warnings.append(UNKNOWN_SEEN)
    return Report(
        label={"name": asked.name, **asdict(asked)},
        target=best.target_name,
        store=manifest_hash(measured),
        split=task.split.told(task.rows, task.scope),
        config=asdict(config),
        probes={
            name: {
                "site": run.probes[name].config.site,
                "estimator": run.recipes[name].estimator,
                "threshold": run.probes[name].config.threshold,
                "threshold_rule": run.probes[name].config.threshold_rule,
                "l2": run.recipes[name].l2,
            }
            for name in subjects
        },
        findings=findings,
        provenance=provenance(seed=run.seed),
        seconds=time.perf_counter() - started,
    )


def _task(run: Run, store: Store, best: ProbeConfig, asked: LabelOf, config: EvaluateConfig) -> Task:
    rows = store.rows()
    check_rows(rows, asked.label)
    own = manifest_hash(store) == best.store
    seen = run.groups_seen or ()
    parts = {s for s in rows["split"].tolist() if isinstance(s, str)}
    if not own and parts != {"train", "validation"}:
        return measured_task(store, asked, config.study.folds, config.resamples, run.seed, seen)
    task = task_of(store, asked, run.selection_share, config.resamples, run.seed)
    if own:
        if task.split.counts(task.rows, task.scope) != dict(best.split):
            raise ProbeError(
                "the probe was fitted on this store, and which rows fitted it cannot be told: name the folder of the "
                f"run (with its {JSON_FILE}), or another store"
            )
        return task
    part = np.where(was_seen(rows, seen) & (task.split.part == "test"), "other", task.split.part).astype("<U9")
    if not (part == "test").any():
        raise ProbeError(NONE_LEFT)
    check_classes(task.y, part, task.scope, asked.name)
    rule = task.split.rule + "; the probe was fitted on another store"
    return Task(task.asked, task.rows, task.y, Split(part, rule), task.folds, task.resamples, task.seed)


def _check_store(config: ProbeConfig, store: Store, which: str) -> None:
    try:
        target = Fingerprint(**store.manifest["target"])
    except (KeyError, TypeError) as error:
        raise ProbeError(f"{which} does not say whose states it holds ({error!r}): capture them again") from error
    if differences := config.target.mismatch(target):
        raise ChoiceError(
            f"{which} holds states of another target than the probe's, {config.target_name} "
            f"({'; '.join(differences)}): choose a store of that target"
        )
    check_match(store, config.kappa, which)


def _check_sampled(store: Store) -> None:
    temperature = store.manifest.get("config", {}).get("temperature", 0)
    if not temperature > 0:
        raise ChoiceError(
            f"the sampled store was captured at temperature {temperature}, which is greedy: capture with --temperature"
        )


def _check_random(config: ProbeConfig, store: Store) -> None:
    """Other weights of the same shape."""
    try:
        there = Fingerprint(**store.manifest["target"])
    except (KeyError, TypeError) as error:
        raise ProbeError(f"the store of the control does not say whose states it holds ({error!r})") from error
    for name in ("architecture", "width", "blocks"):
        mine, theirs = getattr(config.target, name), getattr(there, name)
        if mine != theirs:
            raise ChoiceError(
                f"the store of a randomly initialised target is of another shape than the probe's target ({name}: "
                f"{mine} and {theirs}): capture it from a target of that shape"
            )
    if there.revision == config.target.revision:
        raise ChoiceError(
            f"the store of a randomly initialised target holds states of the probe's own target ({there.revision}): "
            "capture it from random weights"
        )


def _subject(probe: Probe, recipe: Recipe, store: Store, rows: int) -> Subject:
    sites_of(store, [probe.config.site])
    logits = logits_at(store, probe.config.site, rows, probe.logit)
    slope, offset = probe.tensors["calibration"].tolist()
    return Subject(recipe, logits, probe.config.threshold, (logits - offset) / slope if slope else None)
