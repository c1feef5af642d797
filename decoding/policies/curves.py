"""How a training went, as one picture: reward, entropy, divergence and loss over the decisions trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from activations.figures import COLOURS, GREY

PANELS = (
    ("reward", "mean return of an episode"),
    ("entropy", "entropy of a decision (nats)"),
    ("approx_kl", "divergence of an update (nats)"),
    ("loss", "loss of PPO"),
)


def draw_curves(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the records of a training (`train_ppo`) into a PNG, whole or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.8, 5.6), layout="constrained")
    for (name, label), colour, axes in zip(PANELS, COLOURS[:4], figure.subplots(2, 2, sharex=True).flat, strict=True):
        points = [(r["timesteps"], r[name]) for r in records if r.get(name) is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], ".-" if len(points) < 30 else "-", color=colour)
        axes.set_ylabel(label, fontsize=9)
        axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, labelbottom=True)
        axes.set_xlabel("decisions trained on", fontsize=9)
        axes.ticklabel_format(axis="x", style="plain")
    scratch = file.with_name(f"{file.name}.tmp")
    figure.savefig(scratch, dpi=120, format="png")
    os.replace(scratch, file)
