"""Training: one linear probe a site, the best one chosen, calibrated, and measured once on rows that chose nothing.

part        from                                     what it decides
fit         train prompts, 80 % of their groups      the weights
selection   train prompts, 20 % of their groups      site, estimator, penalty, calibration, threshold
test        validation prompts                       nothing: every reported number
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal

from activations.provenance import provenance
from activations.target import Fingerprint
from probes.artifact import ChoiceError, Probe, ProbeConfig, ProbeError
from probes.baselines import FITS
from probes.calibration import sigmoid_parts
from probes.estimators import ESTIMATORS
from probes.reading import is_serving, logits_at, sites_of
from probes.result import Chosen, Report, TrainResult
from probes.rows import Label, Store, choose_sites, is_site, manifest_hash
from probes.study import BEST, Findings, StudyConfig, Subject, measure, study
from probes.sweep import Fitted, Recipe, sweep
from probes.task import SCOPES, LabelOf, Task, check_match, logit, task_of
from probes.thresholds import ThresholdConfig, best_f1_threshold, choose

Progress = Callable[[int, int, str], None]
SAVED = ("linear", "means", "mlp", "mlp2")
"""Estimators that an artifact can hold."""
READS_SITES = "where text is decoded, a probe only gets the anchor's own states, at sites such as resid_mid.18"
STUDY_STEPS = 60
"""About how many steps a study tells of."""


@dataclass(frozen=True)
class TrainConfig:
    """How a probe is trained."""

    label: Label = "span_2"
    """What the probe predicts: span_0, span_1 or span_2 (is the anchor's own token, the pending one, or the first
    drafted one copied?) or follow (does the target follow the candidate for at least follow_m tokens?). Where there is
    a suffix match, span_1 is always 1 (unless its span is longer than the match) and cannot guide a switch."""
    follow_m: int = 1
    """Accepted length from which `follow` is 1."""
    labels: tuple[str, ...] = ()
    """Further labels of the sweep, such as span_0, span_1 or follow_4; each is measured at its own best site."""
    sites: tuple[str, ...] = ()
    """Sites to fit, such as resid_mid.*; all of the store's if empty. Sites joined by + are read side by side:
    resid_mid.18+resid_mid.20. Other states of the store (resid_mid.18@candidate) are only compared: what is saved
    reads sites."""
    estimators: tuple[str, ...] = ("linear",)
    """Estimators to fit at each site; the first is the probe that is saved, the others are compared with it."""
    keep: tuple[str, ...] = ()
    """Sites that get an artifact of their own beside the best and the serving one."""
    conditional: bool = False
    """Fit and select on rows with a suffix match only."""
    match: int = 5
    """Shortest match length that counts as a suffix match: what the copy drafter is asked with (its kappa)."""
    l2: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2)
    """Penalties of the linear probe to choose from at each site."""
    bias: bool = True
    """Whether the probe has a bias."""
    select_by: Literal["roc_auc", "average_precision", "f1"] = "roc_auc"
    """The selection part's metric that chooses penalty and site."""
    threshold: ThresholdConfig = field(default_factory=ThresholdConfig)
    """How the threshold is chosen, on the selection part."""
    calibration: Literal["sigmoid", "temperature"] = "sigmoid"
    """How the saved probes are calibrated, on the selection part."""
    selection_share: float = 0.2
    """Share of the train groups that is kept for selection."""
    resamples: int = 1000
    """Bootstrap resamples of documents behind each interval."""
    seed: int = 0
    """Decides the split, the bootstrap and the boosted trees."""

    def __post_init__(self) -> None:
        if self.follow_m < 1:
            raise ValueError(f"follow_m is {self.follow_m}; it must be 1 or more")
        if self.match < 1:
            raise ValueError(f"match is {self.match}; it must be 1 or more")
        for label in self.labels:
            LabelOf.parse(label, self.match)  # checks itself
        if unknown := [e for e in self.estimators if e not in ESTIMATORS]:
            raise ValueError(f"no estimator {unknown[0]!r}: choose of {', '.join(ESTIMATORS)}")
        if not self.estimators or self.estimators[0] not in SAVED:
            raise ValueError(f"the first estimator is saved as a probe, and must be one of {', '.join(SAVED)}")
        if not self.l2 or not all(0 < penalty < math.inf for penalty in self.l2):
            raise ValueError(f"l2 is {self.l2}; at least one penalty is needed, and each must be above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")
        if not 0 < self.selection_share < 1:
            raise ValueError(f"selection_share is {self.selection_share}; it must lie between 0 and 1")
        if self.resamples < 1:
            raise ValueError(f"resamples is {self.resamples}; it must be 1 or more")


def train(
    store: Store,
    config: TrainConfig | None = None,
    progress: Progress | None = None,
    measured: StudyConfig | None = None,
) -> TrainResult:
    """Fit a probe at every chosen site of the store and evaluate the best one, the serving one and the baselines.

    With `measured`, the best one is also put to the tests of a reviewer (strata, controls, transfer, and what it adds
    to surface and logits). `progress(done, total, what)` is called as the work goes on. Raises ProbeError where the
    store does not allow it.
    """
    return _Training(store, config or TrainConfig(), progress or (lambda done, total, what: None), measured).run()


class _Training:
    """One run: the question, and the steps to its answer."""

    def __init__(self, store: Store, config: TrainConfig, progress: Progress, measured: StudyConfig | None) -> None:
        self.store, self.config, self._progress, self.measured = store, config, progress, measured
        self.target, self.target_name = target_of(store)
        check_match(store, config.match, "the store")
        self.sites = sites_of(store, config.sites)
        self.estimators = list(dict.fromkeys(config.estimators))
        self.kept = choose_sites(store, config.keep) if config.keep else []
        if foreign := [site for site in self.kept if not is_site(site)]:
            raise ChoiceError(f"{foreign[0]} cannot be kept as a probe: {READS_SITES}")
        self.readable = [site for site in self.sites if is_site(site)]
        if not self.readable:
            raise ChoiceError(f"no probe can be made of {', '.join(self.sites)} alone: {READS_SITES}; name a site, too")
        share, resamples, seed = config.selection_share, config.resamples, config.seed
        asked = LabelOf(config.label, config.follow_m, config.match, config.conditional)
        self.task = task_of(store, asked, share, resamples, seed)
        others = dict.fromkeys(LabelOf.parse(text, config.match) for text in config.labels)
        self.tasks = [self.task]
        self.tasks += [task_of(store, o, share, resamples, seed) for o in others if o.name != asked.name]
        self.done, cells = 0, len(self.sites) * len(self.estimators)
        self.total = cells + len(self.kept) + 2 + len(self.kept) + FITS + (STUDY_STEPS if measured else 0)

    def run(self) -> TrainResult:
        started = time.perf_counter()
        first, *compared = self.estimators
        every = [*self.sites, *(s for s in self.kept if s not in self.sites)]
        recipes = [self._recipe(site, first) for site in every]
        recipes += [self._recipe(site, other) for site in self.sites for other in compared]
        penalties = {name: self.config.l2 if name == "linear" else (None,) for name in self.estimators}
        cells = sweep(self.store, self.tasks, recipes, penalties, self.config.select_by, self._say)
        asked = self.task.asked.name
        mine = {c.recipe.site: c for c in cells if c.result.label == asked and c.recipe.estimator == first}
        ranked = sorted(self.readable, key=lambda site: self._value(mine[site]), reverse=True)
        chosen = {BEST: ranked[0]}
        if boundaries := [site for site in ranked if is_serving(site)]:
            chosen["serving"] = boundaries[0]
        chosen |= {site: site for site in self.kept}

        probes: dict[str, Probe] = {}
        subjects: dict[str, Subject] = {}
        for name, site in chosen.items():
            self._say(f"evaluating {site}")
            probes[name], subjects[name] = self._finish(mine[site])
        findings = (
            measure(self.task, self.store, subjects, self._say)[0]
            if self.measured is None
            else study(self.task, self.store, subjects, self.measured, self._say, self.config.threshold)
        )
        for name, probe in probes.items():
            probe.config = replace(probe.config, metrics=card_metrics(findings, name, mine[chosen[name]]))
        self._progress(self.total, self.total, "done")
        report = Report(
            label={"name": asked, **asdict(self.task.asked)},
            target=self.target_name,
            store=manifest_hash(self.store),
            split=self.task.split.told(self.task.rows, self.task.scope),
            config=asdict(self.config) | (asdict(self.measured) if self.measured else {}),
            probes={
                name: {
                    "site": p.config.site,
                    "estimator": mine[chosen[name]].recipe.estimator,
                    "threshold": p.config.threshold,
                    "threshold_rule": p.config.threshold_rule,
                    "l2": mine[chosen[name]].recipe.l2,
                }
                for name, p in probes.items()
            },
            findings=findings,
            provenance=provenance(seed=self.config.seed),
            seconds=time.perf_counter() - started,
            sites=[c.result for c in cells if c.recipe.site in self.sites],
            chosen=[self._chosen(task, [c for c in cells if c.result.label == task.asked.name]) for task in self.tasks],
        )
        return TrainResult(probes, report)

    def _say(self, what: str) -> None:
        self._progress(self.done, self.total, what)
        self.done = min(self.done + 1, self.total - 1)

    def _recipe(self, site: str, estimator: str) -> Recipe:
        return Recipe(site, estimator, None, self.config.bias, self.config.seed)

    def _value(self, cell: Fitted) -> float:
        return cell.result.value(self.config.select_by)

    def _chosen(self, task: Task, cells: list[Fitted]) -> Chosen:
        """The best cell of a label on the test part."""
        cells = [c for c in cells if c.recipe.site in self.sites]
        best = max(cells, key=self._value)
        score = logits_at(self.store, best.recipe.site, len(task.y), lambda states: logit(best.probe, states.numpy()))
        threshold = best_f1_threshold(task.y[task.selection], score[task.selection])
        return Chosen(
            task.asked.name, best.recipe.site, best.recipe.estimator, len(cells), task.measure(score, threshold)
        )

    def _finish(self, cell: Fitted) -> tuple[Probe, Subject]:
        """The artifact of a cell, and its scores of all rows."""
        task, site, count = self.task, cell.recipe.site, len(self.task.y)
        config = self._probe_config(cell.recipe)
        raw = logits_at(self.store, site, count, Probe.from_estimator(config, cell.probe).logit)
        gate = task.gate
        parts = sigmoid_parts(self.config.calibration, raw[gate], task.y[gate])
        probe = Probe.from_estimator(config, cell.probe, parts)
        subject = Subject(cell.recipe, logits_at(self.store, site, count, probe.logit), 0.5, raw)
        score = subject.score  # what is measured is the artifact itself
        try:
            chosen = choose(self.config.threshold, task.y[gate], score[gate], task.rows["accepted"][gate])
        except ValueError as error:
            raise ProbeError(f"the probe at {cell.recipe.site}: {error}") from error
        asked = "all rows" if gate is task.selection and not self._only_matches else SCOPES["match"]
        threshold = min(chosen.threshold, 1.0)  # never copying is infinite
        probe.config = replace(
            config, threshold=threshold, threshold_rule=f"{chosen.rule} on {asked} of the selection part"
        )
        return probe, replace(subject, threshold=threshold)

    @property
    def _only_matches(self) -> bool:
        return self.config.conditional or self.config.label == "follow"

    def _probe_config(self, recipe: Recipe) -> ProbeConfig:
        """All of a probe's config but threshold and metrics."""
        config, manifest = self.config, self.store.manifest
        settings = {
            **manifest.get("config", {}).get("labels", {}),
            "follow_m": config.follow_m,
            "match": config.match,
            "rows": "with a suffix match" if self._only_matches else "all",
        }
        return ProbeConfig(
            site=recipe.site,
            width=self.target.width,
            kind="mlp" if recipe.estimator in ("mlp", "mlp2") else "linear",
            label=config.label,
            label_settings=settings,
            threshold=0.5,
            threshold_rule="",
            target=self.target,
            target_name=self.target_name,
            store=manifest_hash(self.store),
            split=self.task.split.counts(self.task.rows, self.task.scope),
            metrics={},
            provenance=provenance(seed=config.seed),
        )


def target_of(store: Store) -> tuple[Fingerprint, str]:
    """Whose states a store holds: its fingerprint, and its name without the place of a folder.

    Raises ProbeError if its manifest does not say.
    """
    try:
        target, name = Fingerprint(**store.manifest["target"]), str(store.manifest["target_name"])
    except (KeyError, TypeError) as error:
        raise ProbeError(f"the store does not say whose states it holds ({error!r}): capture them again") from error
    return target, PurePath(name).name if name.startswith(("/", "~", ".")) else name


def card_metrics(findings: Findings, name: str, cell: Fitted) -> dict[str, Any]:
    """What the model card tells of a probe: the numbers of the report."""
    found: dict[str, Any] = {SCOPES[s]: e.to_dict() for s, e in findings.evaluations[name].items()}
    if name == BEST and findings.gains:
        found[f"AUC over {findings.gain_over}"] = {
            f"{stacked}, {SCOPES[s]}": gain["roc_auc"].to_dict()
            for stacked, scopes in findings.gains.items()
            for s, gain in scopes.items()
        }
        found["AUC of controls"] = {c.name: c.roc_auc.to_dict() for c in findings.controls if c.roc_auc}
    found["selection part"] = {"roc_auc": cell.result.roc_auc.to_dict(), "l2": cell.result.l2}
    return found
