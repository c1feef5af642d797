"""Training: one linear probe a site, the best one chosen, calibrated, and measured once on rows that chose nothing.

part        from                                     what it decides
fit         train prompts, 80 % of their groups      the weights
selection   train prompts, 20 % of their groups      site, penalty, calibration, threshold
test        validation prompts                       nothing: every reported number
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from activations.provenance import provenance
from activations.target import Fingerprint
from probes.artifact import Probe, ProbeConfig, ProbeError
from probes.baselines import FITS, baseline_scores
from probes.evaluation import Evaluation, auc_difference, best_f1_threshold, evaluate, reliability
from probes.linear import LinearProbe
from probes.result import SiteResult, TrainResult
from probes.rows import (
    PARTS,
    Label,
    Mask,
    Rows,
    Store,
    check_classes,
    choose_sites,
    labels_of,
    manifest_hash,
    split_rows,
)

SERVING_KINDS = ("resid_post", "resid_pre")
"""Block boundaries: the only states that serving engines hand out."""
SELECTION_RESAMPLES = 200
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TrainConfig:
    """How a probe is trained."""

    label: Label = "span_2"
    """What the probe predicts: span_0, span_1 or span_2 (is the anchor's own token, the pending one, or the first
    drafted one copied?) or follow (does the target follow the candidate for at least follow_m tokens?). Where there is
    a suffix match, span_1 is always 1 (unless its span is longer than the match) and cannot guide a switch."""
    follow_m: int = 1
    """Accepted length from which `follow` is 1."""
    sites: tuple[str, ...] = ()
    """Sites to fit, such as resid_mid.*; all of the store's if empty."""
    keep: tuple[str, ...] = ()
    """Sites that get an artifact of their own beside the best and the serving one."""
    conditional: bool = False
    """Fit and select on rows with a suffix match only."""
    match: int = 5
    """Shortest match length that counts as a suffix match: what the copy drafter is asked with (its kappa)."""
    l2: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2)
    """Penalties to choose from at each site."""
    bias: bool = True
    """Whether the probe has a bias."""
    select_by: Literal["roc_auc", "average_precision", "f1"] = "roc_auc"
    """The selection part's metric that chooses penalty and site."""
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
        if not self.l2 or not all(0 < penalty < math.inf for penalty in self.l2):
            raise ValueError(f"l2 is {self.l2}; at least one penalty is needed, and each must be above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")
        if not 0 < self.selection_share < 1:
            raise ValueError(f"selection_share is {self.selection_share}; it must lie between 0 and 1")
        if self.resamples < 1:
            raise ValueError(f"resamples is {self.resamples}; it must be 1 or more")


def train(store: Store, config: TrainConfig | None = None, progress: Progress | None = None) -> TrainResult:
    """Fit a probe at every chosen site of the store and evaluate the best one, the serving one and the baselines.

    `progress(done, total, what)` is called as the work goes on. Raises ProbeError where the store does not allow it.
    """
    return _Training(store, config or TrainConfig(), progress or (lambda done, total, what: None)).run()


class _Training:
    """One run: the rows, their labels and parts, and the steps over them."""

    def __init__(self, store: Store, config: TrainConfig, progress: Progress) -> None:
        self.store, self.config, self._progress = store, config, progress
        try:
            self.target = Fingerprint(**store.manifest["target"])
            self.target_name = str(store.manifest["target_name"])
        except (KeyError, TypeError) as error:
            raise ProbeError(f"the store does not say whose states it holds ({error!r}): capture them again") from error
        self.sites = choose_sites(store, config.sites)
        self.kept = choose_sites(store, config.keep) if config.keep else []
        self.rows: Rows = store.rows()
        self.y = labels_of(self.rows, config.label, config.follow_m)
        self.split = split_rows(self.rows, config.selection_share, config.seed)
        known = self.y >= 0
        match = known & (self.rows["match_length"] >= config.match)
        self.only_matches = config.conditional or config.label == "follow"
        self.scope: Mask = match if self.only_matches else known
        check_classes(self.y, self.split.part, self.scope, config.label)
        fit, selection, test = (self.split.part == part for part in PARTS)
        self.fit, self.selection = self.scope & fit, self.scope & selection
        # A gate asks only where there is a match: threshold and calibration are for those rows.
        self.asked = match & selection if len(np.unique(self.y[match & selection])) == 2 else self.selection
        self.tests: dict[str, Mask] = {}
        if config.label != "follow":
            self.tests["all"] = known & test
        if (match & test).any():
            self.tests["match"] = match & test
        self.done, self.total = 0, len(self.sites) + 2 * len(self.kept) + 2 + FITS

    def run(self) -> TrainResult:
        started = time.perf_counter()
        fitted: dict[str, tuple[LinearProbe, SiteResult]] = {}
        for site in [*self.sites, *(s for s in self.kept if s not in self.sites)]:
            self._say(f"fitting {site}")
            fitted[site] = self._fit_site(site)
        ranked = sorted(self.sites, key=lambda site: self._value(fitted[site][1]), reverse=True)
        chosen = {"best": ranked[0]}
        if boundaries := [site for site in ranked if site.split(".")[0] in SERVING_KINDS]:
            chosen["serving"] = boundaries[0]
        chosen |= {site: site for site in self.kept}

        scores: dict[str, NDArray[np.floating]] = {}
        probes: dict[str, Probe] = {}
        evaluations: dict[str, dict[str, Evaluation]] = {}
        for name, site in chosen.items():
            self._say(f"evaluating {site}")
            probes[name], scores[name], evaluations[name] = self._finish(*fitted[site])
        for name, score in baseline_scores(self.rows, self.y, self.fit, self.config.seed, self._say).items():
            evaluations[name] = self._evaluate(score)
        self._progress(self.total, self.total, "done")
        asked = list(self.tests.values())[-1]  # rows with a match, where there are any
        return TrainResult(
            config=asdict(self.config),
            target_name=self._target_name(),
            store=manifest_hash(self.store),
            split=self.split.counts(self.rows, self.scope),
            sites=[fitted[site][1] for site in self.sites],
            probes=probes,
            evaluations=evaluations,
            behind={
                name: {scope: auc_difference(evaluations["best"][scope], e) for scope, e in found.items()}
                for name, found in evaluations.items()
                if name != "best"
            },
            reliability={name: reliability(self.y[asked], scores[name][asked]) for name in probes},
            provenance=provenance(seed=self.config.seed),
            seconds=time.perf_counter() - started,
        )

    def _say(self, what: str) -> None:
        self._progress(self.done, self.total, what)
        self.done = min(self.done + 1, self.total)

    # -- fitting, on the fit and selection parts ------------------------------------------------------

    def _states(self, site: str) -> torch.Tensor:
        states = self.store.states(site)
        if states.ndim != 2 or len(states) != len(self.y):
            raise ProbeError(f"the store has {len(self.y)} rows, but states of shape {list(states.shape)} at {site}")
        broken = int((~torch.isfinite(states)).any(dim=1).sum())
        if broken:
            raise ProbeError(
                f"{broken} rows have states at {site} that are not finite: leave the site out with --sites, or capture "
                "again in bfloat16 or float32"
            )
        return states

    def _fit_site(self, site: str) -> tuple[LinearProbe, SiteResult]:
        """The best penalty's probe."""
        states = self._states(site)
        fit, selection = (states[torch.from_numpy(rows)].float().numpy() for rows in (self.fit, self.selection))
        tried = []
        for l2 in self.config.l2:
            probe = LinearProbe(l2=l2, fit_intercept=self.config.bias).fit(fit, self.y[self.fit])
            tried.append((probe, self._select(site, probe, probe.decision_function(selection))))
        return max(tried, key=lambda one: self._value(one[1]))

    def _select(self, site: str, probe: LinearProbe, score: NDArray[np.floating]) -> SiteResult:
        rows, seed = self.selection, self.config.seed
        threshold = best_f1_threshold(self.y[rows], score)
        found = evaluate(
            self.y[rows],
            score,
            self.rows["document"][rows],
            threshold=threshold,
            resamples=min(SELECTION_RESAMPLES, self.config.resamples),
            seed=seed,
        )
        assert found.f1 is not None
        average_precision, f1 = found.average_precision.estimate, found.f1.estimate
        return SiteResult(site, probe.l2, found.roc_auc, average_precision, f1, probe.n_iter_)

    def _value(self, result: SiteResult) -> float:
        """What a site is chosen by."""
        value = getattr(result, self.config.select_by)
        return float(getattr(value, "estimate", value))

    # -- artifacts and the test part --------------------------------------------------------------------

    def _finish(
        self, fitted: LinearProbe, selected: SiteResult
    ) -> tuple[Probe, NDArray[np.floating], dict[str, Evaluation]]:
        """The artifact of a fitted site, its scores of all rows, and its evaluation on the test part."""
        site, states = selected.site, self._states(selected.site)
        weight = torch.from_numpy(fitted.coef_[0] * fitted.rms_)
        parts = (weight, float(fitted.intercept_[0]), 1 / fitted.rms_)
        config = self._probe_config(site, states.shape[1])
        logits = Probe(config, *parts).logit(states).numpy().astype(np.float64)
        asked = self.asked
        sigmoid = LinearProbe(l2=1e-6).fit(logits[asked, None], self.y[asked])
        probe = Probe(config, *parts, (float(sigmoid.coef_[0, 0]), float(sigmoid.intercept_[0])))
        score = probe.score(states).numpy()  # what is measured below is the artifact itself
        threshold = best_f1_threshold(self.y[asked], score[asked])
        evaluations = self._evaluate(score, threshold)
        metrics: dict[str, Any] = {
            {"all": "all rows", "match": "rows with a suffix match"}[scope]: found.to_dict()
            for scope, found in evaluations.items()
        }
        metrics["selection part"] = {"roc_auc": selected.roc_auc.to_dict(), "l2": selected.l2}
        probe.config = replace(config, threshold=threshold, metrics=metrics)
        return probe, score, evaluations

    def _probe_config(self, site: str, width: int) -> ProbeConfig:
        """All of a probe's config but threshold and metrics."""
        config, manifest = self.config, self.store.manifest
        asked = "all rows" if self.asked is self.selection and not self.only_matches else "rows with a suffix match"
        settings = {
            **manifest.get("config", {}).get("labels", {}),
            "follow_m": config.follow_m,
            "match": config.match,
            "rows": "with a suffix match" if self.only_matches else "all",
        }
        return ProbeConfig(
            site=site,
            width=width,
            label=config.label,
            label_settings=settings,
            threshold=0.5,
            threshold_rule=f"best F1 on {asked} of the selection part",
            target=self.target,
            target_name=self._target_name(),
            store=manifest_hash(self.store),
            split=self.split.counts(self.rows, self.scope),
            metrics={},
            provenance=provenance(seed=config.seed),
        )

    def _target_name(self) -> str:
        """The target as it was named, without the place of a folder."""
        name = self.target_name
        return PurePath(name).name if name.startswith(("/", "~", ".")) else name

    def _evaluate(self, score: NDArray[np.floating], threshold: float | None = None) -> dict[str, Evaluation]:
        """On each scope of the test part."""
        return {
            scope: evaluate(
                self.y[rows],
                score[rows],
                self.rows["document"][rows],
                threshold=threshold,
                resamples=self.config.resamples,
                seed=self.config.seed,
            )
            for scope, rows in self.tests.items()
        }
