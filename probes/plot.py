"""Pictures of a training run."""

from __future__ import annotations

import os
from pathlib import Path

from activations.sites import Site
from probes.artifact import JOIN
from probes.result import TrainResult


def plot(result: TrainResult, file: str | os.PathLike[str]) -> Path:
    """AUC by block for each kind of site (selection part), and the probes' reliability (test part), as one picture.

    The ending of `file` decides the format (png, svg, pdf).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    sweep, calibration = figure.subplots(1, 2, width_ratios=[3, 2])
    first = result.config["estimators"][0]
    plain = [row for row in result.sites if JOIN not in row.site and row.estimator == first]
    parsed = [(Site.parse(row.site), row) for row in plain]
    for kind in dict.fromkeys(site.kind for site, _ in parsed):
        line = sorted((site.block, row.roc_auc) for site, row in parsed if site.kind == kind)
        blocks, values = [block for block, _ in line], [value for _, value in line]
        sweep.plot(blocks, [v.estimate for v in values], marker="o", markersize=3, label=kind)
        sweep.fill_between(blocks, [v.lower for v in values], [v.upper for v in values], alpha=0.15)
    sweep.set(xlabel="block", ylabel="ROC AUC, selection part", title=f"{result.target_name}: {result.config['label']}")
    sweep.legend()
    calibration.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="--")
    for name, bins in result.reliability.items():
        site = result.probes[name].config.site
        label = f"{name} ({site}), error {bins.error:.3f}"
        calibration.plot(bins.predicted, bins.observed, marker="o", markersize=3, label=label)
    calibration.set(xlabel="copy intent", ylabel="share with label 1, test part", title="Reliability")
    calibration.legend()
    figure.savefig(file, dpi=150)
    return Path(file)
