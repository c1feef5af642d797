"""Measuring finished probes the way a reviewer asks: beside baselines, in strata, against controls, on other text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from probes import baselines as base
from probes.artifact import ProbeError
from probes.baselines import LEAK, PLAIN, Baseline, baselines, with_probe
from probes.calibration import METHODS, Reliability, calibrate, reliability
from probes.controls import Control, controls, leaks
from probes.curves import curves
from probes.evaluation import Evaluation, Interval, differences
from probes.reading import is_held, states_at
from probes.rows import Store
from probes.strata import Stratum, loops, strata
from probes.strata import skipped as strata_skipped
from probes.sweep import Recipe, unseen_scores
from probes.task import SCOPES, Scopes, Task
from probes.thresholds import RULES, ThresholdConfig, choose, rate_at
from probes.transfer import Transfer, to_store, transfer

Say = Callable[[str], None]
BEST = "best"
STATE_L2 = 1e-3
"""Penalty of the state beside surface and logits, where the probe has none of its own."""


@dataclass(frozen=True)
class StudyConfig:
    """What is measured beside the probes."""

    folds: int = 5
    """Folds of documents in which a probe is fitted again for what is stacked on its score; and in a store that fitted
    nothing, those of the baselines."""
    controls: bool = True
    """Fit the controls: shuffled labels, control tasks, random directions, random rows."""
    transfer: bool = True
    """Fit a probe for each domain, and for short and long contexts."""

    def __post_init__(self) -> None:
        if self.folds < 2:
            raise ValueError(f"folds is {self.folds}; it must be 2 or more")


@dataclass(frozen=True)
class Subject:
    """A finished probe."""

    recipe: Recipe
    """How it was fitted."""
    logit: NDArray[np.float64]
    """Its calibrated log-odds of every row [rows]."""
    threshold: float
    """From which probability on it says copy."""
    raw: NDArray[np.float64] | None = None
    """Log-odds before calibration [rows]; None where only the artifact is known."""

    @property
    def score(self) -> NDArray[np.float64]:
        """Probabilities [rows]."""
        found: NDArray[np.float64] = 1 / (1 + np.exp(-np.clip(self.logit, -700, 700)))
        return found


@dataclass(frozen=True)
class Calibration:
    """How one way to calibrate does, on the test rows of the headline (see `Task`)."""

    probe: str
    """Which probe."""
    method: str
    """`as saved` (the probe as it is), none, and sigmoid, isotonic and temperature, each fitted on the selection part
    where the store has one."""
    brier: Interval
    """Mean squared distance of probability and label."""
    ece: Interval
    """Expected calibration error."""
    bins: Reliability
    """The reliability diagram."""


@dataclass(frozen=True)
class Operating:
    """What one rule makes of the best probe: its threshold is chosen on the selection part, the rest is measured on the
    test rows that a gate asks about."""

    rule: str
    """The rule in words, and with what it was chosen."""
    threshold: float | None
    """Copy from this probability on; None: never."""
    precision: Interval
    """Share of the called rows that are positive."""
    recall: Interval
    """Share of the positive rows that are called."""
    f1: Interval
    """Harmonic mean of both."""
    called: float
    """Share of the rows that are called."""
    tokens_per_ms: float
    """Expected tokens per millisecond under the costs given, each row being one step."""
    gain: float
    """That over never copying."""


@dataclass(frozen=True)
class Findings:
    """What was measured on one task. Keys of `evaluations` are names of probes (`best`, `serving`, ...) and of
    baselines; scopes are `all` rows and those with a suffix `match`."""

    evaluations: Mapping[str, Scopes]
    """Test part: of each score on each scope."""
    differences: Mapping[str, Mapping[str, Mapping[str, Interval]]]
    """Test part: by score, scope and metric, the best probe minus that score on the same rows."""
    gains: Mapping[str, Mapping[str, Mapping[str, Interval]]] = field(default_factory=dict)
    """Test part: by `surface + logits + ...` score, scope and metric, that score minus `gain_over`: what a probe adds
    to what is there without one."""
    gain_over: str = ""
    """The better of the two surface + logits baselines: on the selection part, or where there is none on the test rows
    themselves, which favours the baseline."""
    curves: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Test part: by score and scope, points of `roc` (fpr, tpr) and `pr` (recall, precision)."""
    reliability: Mapping[str, Reliability] = field(default_factory=dict)
    """Test part: of each probe on the rows that a gate asks about."""
    calibration: list[Calibration] = field(default_factory=list)
    """Test part: ways to calibrate."""
    thresholds: list[Operating] = field(default_factory=list)
    """Test part: the best probe under every rule that chooses a threshold."""
    loops: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    """By scope: the share of `rows`, of `positives` and of `negatives` that are the target repeating itself."""
    strata: Mapping[str, list[Stratum]] = field(default_factory=dict)
    """Test part: by scope, the best probe in each kind of row; its baseline is `gain_over`."""
    controls: list[Control] = field(default_factory=list)
    """Controls of the best probe, on the test rows that a gate asks about."""
    transfer: list[Transfer] = field(default_factory=list)
    """Cells of the transfer matrices."""
    skipped: list[str] = field(default_factory=list)
    """What could not be measured, and what it would need."""
    warnings: list[str] = field(default_factory=list)
    """What a reader must know before believing a number."""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: NaN becomes null."""
        return {name: plain(value) for name, value in vars(self).items()}


def plain(value: Any) -> Any:
    """Dataclasses, intervals, arrays and mappings as JSON has them."""
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if hasattr(value, "__dataclass_fields__"):
        return {k: plain(v) for k, v in vars(value).items()}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def measure(
    task: Task, store: Store, subjects: Mapping[str, Subject], say: Say
) -> tuple[Findings, dict[str, Baseline]]:
    """Probes and baselines side by side, and the baselines' scores."""
    found = {n: task.measure(s.score, s.threshold, probability=True) for n, s in subjects.items()}
    beside = baselines(task, store, say)
    found |= {name: task.measure(b.score, probability=b.probability) for name, b in beside.items()}
    return (
        Findings(
            evaluations=found,
            differences=_behind(found),
            reliability={n: reliability(task.y[task.test], s.score[task.test]) for n, s in subjects.items()},
            skipped=[*base.skipped(task.rows, store), *_no_match(task), *_one_class(task)],
            warnings=[
                *leaks(task, {name: e[task.headline] for name, e in found.items()}),
                *(
                    f"the best probe is not shown to be better than chance on {SCOPES[s]}: capture more "
                    "prompts, and until then decode with --gate match"
                    for s, e in found[BEST].items()
                    if np.isfinite(e.roc_auc.estimate) and not e.roc_auc.lower > 0.5
                ),
            ],
        ),
        beside,
    )


def _no_match(task: Task) -> list[str]:
    if "match" in task.tests:
        return []
    return [f"{SCOPES['match']}: no test row has a match of {task.asked.match} tokens or more"]


def _one_class(task: Task) -> list[str]:
    return [
        f"ranking on {SCOPES[name]}: the label {task.asked.name} is {int(task.y[where][0])} on all {int(where.sum())}"
        for name, where in task.tests.items()
        if len(np.unique(task.y[where])) == 1
    ]


def _behind(found: Mapping[str, Scopes]) -> dict[str, dict[str, dict[str, Interval]]]:
    return {
        name: {scope: differences(found[BEST][scope], e) for scope, e in scopes.items()}
        for name, scopes in found.items()
        if name != BEST
    }


def study(
    task: Task,
    store: Store,
    subjects: Mapping[str, Subject],
    config: StudyConfig,
    say: Say,
    threshold: ThresholdConfig | None = None,
    random_init: tuple[Store, Task] | None = None,
    others: Mapping[str, tuple[Task, NDArray[np.float64]]] | None = None,
) -> Findings:
    """Everything there is to say about the best of the subjects.

    threshold: the precision floor and the costs of the rules that choose a threshold. random_init: a store of a
    randomly initialised target, and the same question put to it. others: by name, the
    question put to another store, and the best probe's scores [rows] there.
    """
    found, beside = measure(task, store, subjects, say)
    best = subjects[BEST]
    site, held = best.recipe.site, is_held(store, best.recipe.site, len(task.y))
    states = states_at(store, site, len(task.y)).float().numpy() if held else None
    skipped = [*found.skipped, *strata_skipped(task.rows)]
    stacked: dict[str, Baseline] = {}
    try:
        if states is None:
            raise ProbeError(f"the states at {site} do not fit into memory: measure on a smaller store")
        unseen = _unseen(task, best, states, config.folds)
    except ProbeError as error:
        skipped.append(f"what a probe adds: {error}")
    else:
        stacked = with_probe(task, unseen, states, best.recipe.l2 or STATE_L2, say)
    evaluations = {**found.evaluations}
    evaluations |= {name: task.measure(b.score, probability=True) for name, b in stacked.items()}
    over = _better(task, beside)
    gains = {
        name: {scope: differences(e, evaluations[over][scope]) for scope, e in evaluations[name].items()}
        for name in stacked
    }
    cells: list[Transfer] = []
    tried: list[Control] = []
    probe, leak = evaluations[BEST][task.headline], evaluations.get(LEAK, {}).get(task.headline)
    if states is not None:
        cells += transfer(task, states, best.recipe, say) if config.transfer else []
        tried += controls(task, store, states, best.recipe, probe, leak, random_init, say) if config.controls else []
    cells += [to_store(name, other, score) for name, (other, score) in (others or {}).items()]
    return Findings(
        evaluations=evaluations,
        differences=_behind(evaluations),
        gains=gains,
        gain_over=over,
        curves={
            name: {s: curves(task.y[where], score[where]) for s, where in task.tests.items()}
            for name, score in _drawn(subjects, beside, stacked, over).items()
        },
        reliability=found.reliability,
        calibration=_calibrations(task, subjects),
        thresholds=_thresholds(task, best.score, threshold or ThresholdConfig()),
        loops={s: _loops(task, where) for s, where in task.tests.items()},
        strata=strata(task, best.score, beside[over].score),
        controls=tried,
        transfer=cells,
        skipped=skipped,
        warnings=found.warnings,
    )


def _unseen(task: Task, best: Subject, states: NDArray[np.floating], folds: int) -> NDArray[np.float64]:
    """The probe's log-odds [rows]: on the rows that fitted it, those of refits that did not see the row's group."""
    score = best.logit if best.raw is None else best.raw
    if not task.fit.any():  # fitted on another store
        return score
    refitted = unseen_scores(task, states, best.recipe, folds)
    return np.where(np.isnan(refitted), score, refitted)


def _better(task: Task, beside: Mapping[str, Baseline]) -> str:
    where = task.gate if task.gate.any() else task.test
    return max(PLAIN, key=lambda name: task.on(where, beside[name].score, resamples=1).roc_auc.estimate)


def _drawn(
    subjects: Mapping[str, Subject], beside: Mapping[str, Baseline], stacked: Mapping[str, Baseline], over: str
) -> dict[str, NDArray[np.float64]]:
    """Scores whose curves are drawn."""
    found = {name: s.score for name, s in subjects.items()}
    wanted = {**beside, **stacked}
    return found | {name: wanted[name].score for name in (base.LENGTH, LEAK, over, *stacked) if name in wanted}


def _calibrations(task: Task, subjects: Mapping[str, Subject]) -> list[Calibration]:
    found = []
    for name, subject in subjects.items():
        ways = {"as saved": subject.score}
        if subject.raw is not None and len(np.unique(task.y[task.gate])) == 2:
            raw, gate = subject.raw, task.gate
            ways |= {"none": 1 / (1 + np.exp(-np.clip(raw, -700, 700)))}
            ways |= {method: calibrate(method, raw[gate], task.y[gate])(raw) for method in METHODS}
        for method, score in ways.items():
            e: Evaluation = task.on(task.test, score, probability=True)
            assert e.brier is not None and e.ece is not None
            bins = reliability(task.y[task.test], score[task.test])
            found.append(Calibration(name, method, e.brier, e.ece, bins))
    return found


def _thresholds(task: Task, score: NDArray[np.float64], config: ThresholdConfig) -> list[Operating]:
    found, gate, test, accepted = [], task.gate, task.test, task.rows["accepted"]
    if len(np.unique(task.y[gate])) < 2:
        return []
    for rule in RULES:
        try:
            chosen = choose(replace(config, threshold_rule=rule), task.y[gate], score[gate], accepted[gate])
        except ValueError:  # no threshold is precise enough
            continue
        e = task.on(test, score, chosen.threshold)
        assert e.precision is not None and e.recall is not None and e.f1 is not None
        rate = rate_at(accepted[test], score[test], chosen.threshold, config.costs)
        never = config.costs.other_tokens / config.costs.other_ms
        called, at = float((score[test] >= chosen.threshold).mean()), chosen.to_dict()["threshold"]
        found.append(Operating(chosen.rule, at, e.precision, e.recall, e.f1, called, rate, rate / never))
    return found


def _loops(task: Task, where: NDArray[np.bool_]) -> dict[str, float | None]:
    loop, y = loops(task.rows), task.y
    parts = {"rows": where, "positives": where & (y == 1), "negatives": where & (y == 0)}
    return {name: float(loop[rows].mean()) if rows.any() else None for name, rows in parts.items()}
