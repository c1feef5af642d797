"""Pictures of a report, made from the values of evaluation.json alone. Each function returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from probes.tables import Values, score_name
from probes.task import SCOPES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Of Okabe and Ito, told apart by colour-blind people, on white and on black."""
DASHES = ("-", "--", ":", "-.")
WIDTH = 4.4
"""Inches: a figure is as wide as a phone, and its text then about as large as text on a page."""
WRAP = 28
"""Most letters in a line of a label."""
FEW = 9
"""Most columns of a heat map whose cells have room for their numbers."""
LEVELS = 40
"""Steps of the colour scale."""
LONGEST, LONGEST_TICK = 60, 24
"""Most letters of a label, and of one beside a heat map."""
TICKS = 20
"""Most columns of a heat map that are all named."""
GREY = "#808080"


def sweep_map(report: Values, label: str, estimator: str) -> Figure | None:
    """AUC on the selection part, by kind of site and block; None where no site has a block.

    The colours of one label mean the same for all of its estimators.
    """
    plain = [s for s in report["sites"] if s["label"] == label and s["block"] is not None]
    cells = {(s["kind"], s["block"]): s["roc_auc"]["estimate"] for s in plain if s["estimator"] == estimator}
    if not cells:
        return None
    kinds, blocks = list(dict.fromkeys(kind for kind, _ in cells)), sorted({block for _, block in cells})
    values = [[cells.get((kind, block)) for block in blocks] for kind in kinds]
    known = [s["roc_auc"]["estimate"] for s in plain if s["roc_auc"]["estimate"] is not None]
    figure, axes = _figure(1.1 + 0.42 * len(kinds), f"{label}, {estimator}")
    _heat(figure, axes, values, kinds, [str(b) for b in blocks], (min(known, default=0), max(known, default=1)))
    axes.set(xlabel="block", ylabel="kind of site")
    return figure


def curve(report: Values, kind: Literal["roc", "pr"], scope: str) -> Figure:
    """ROC or precision-recall curves of the probes and of the scores that they are compared with, on the test part."""
    title = "ROC" if kind == "roc" else "Precision and recall"
    figure, axes = _figure(5.6, f"{title}, {SCOPES[scope]}")
    x, y = ("fpr", "tpr") if kind == "roc" else ("recall", "precision")
    metric = "roc_auc" if kind == "roc" else "average_precision"
    drawn = [name for name, scopes in report["curves"].items() if scopes.get(scope, {}).get(kind, {}).get(x)]
    for number, name in enumerate(drawn):
        points, e = report["curves"][name][scope][kind], report["evaluations"][name][scope]
        label = f"{e[metric]['estimate']:.3f}  {score_name(report, name)}"
        axes.plot(points[x], points[y], label=_text(label), linewidth=2 if number == 0 else 1.3, **_style(number))
    if kind == "roc":
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, label="0.500  knows nothing")
        axes.set(xlabel="false positive rate", ylabel="true positive rate", ylim=(-0.01, 1.01))
    else:
        rate = report["evaluations"]["best"][scope]["base_rate"]["estimate"]
        axes.axhline(rate, color=GREY, linewidth=1, label=f"{rate:.3f}  knows nothing (base rate)")
        lowest = min([rate, *(min(report["curves"][name][scope][kind][y]) for name in drawn)])
        axes.set(xlabel="recall", ylabel="precision", ylim=(lowest - 0.05 * (1 - lowest), 1 + 0.02 * (1 - lowest)))
    axes.set(xlim=(-0.01, 1.01))
    heading = "AUC" if kind == "roc" else "average precision"
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, title=heading, alignment="left")
    return figure


def reliability(report: Values) -> Figure:
    """How often rows of about one probability are positive, on the test part: each probe as it is saved."""
    figure, axes = _figure(4.6, "Reliability")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, label="as often as it says")
    for number, (name, bins) in enumerate(report["reliability"].items()):
        label = f"{score_name(report, name)}, ECE {bins['error']:.3f}"
        axes.plot(bins["predicted"], bins["observed"], marker="o", markersize=4, label=_text(label), **_style(number))
    axes.set(xlabel="copy intent (mean of a tenth of the rows)", ylabel="share of positive rows")
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5)
    return figure


def behind(report: Values, scope: str) -> Figure:
    """By how much AUC the best probe is ahead of each other score on the same test rows."""
    found = {name: scopes[scope]["roc_auc"] for name, scopes in report["differences"].items() if scope in scopes}
    named = [(score_name(report, name), interval) for name, interval in found.items()]
    return _forest(named, f"Paired differences, {SCOPES[scope]}", "AUC of the best probe minus that of the score", 0.0)


def gains(report: Values, scope: str) -> Figure:
    """How much AUC a probe adds to what is there without one."""
    named = [(name, scopes[scope]["roc_auc"]) for name, scopes in report["gains"].items() if scope in scopes]
    return _forest(named, f"Gains, {SCOPES[scope]}", f"AUC minus that of {report['gain_over']}", 0.0)


def strata(report: Values, scope: str) -> Figure:
    """AUC of the best probe in each kind of test row, with its rows and their base rate, and on all of them (line)."""
    found = report["strata"][scope]
    groups = list(dict.fromkeys(s["by"] for s in found))
    named = [(f"{s['value']} ({s['rows']}, {_share(s['base_rate'])})", s["roc_auc"]) for s in found]
    for group in groups:
        first = next(i for i, s in enumerate(found) if s["by"] == group)
        named[first] = (f"{group.replace('_', ' ')}: {named[first][0]}", named[first][1])
    pooled = report["evaluations"]["best"][scope]["roc_auc"]["estimate"]
    colours = [COLOURS[groups.index(s["by"]) % len(COLOURS)] for s in found]
    return _forest(named, f"Strata of {SCOPES[scope]}", "AUC of the best probe", pooled, colours)


def transfer(report: Values, by: str) -> Figure:
    """AUC of probes fitted on one kind of text and measured on another."""
    cells = {(c["train"], c["test"]): c["roc_auc"]["estimate"] for c in report["transfer"] if c["by"] == by}
    trains, tests = list(dict.fromkeys(a for a, _ in cells)), list(dict.fromkeys(b for _, b in cells))
    values = [[cells.get((train, test)) for test in tests] for train in trains]
    figure, axes = _figure(1.6 + 0.27 * len(trains) + (0.0 if len(tests) < 3 else 0.6), f"Transfer by {by}")
    known = [v for v in cells.values() if v is not None]
    _heat(figure, axes, values, trains, tests, (min([0.5, *known]), 1.0))
    axes.set(xlabel="measured on", ylabel="fitted on")
    return figure


def _figure(height: float, title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(_text(title), fontsize=11, x=0.02, ha="left")
    axes = figure.subplots()
    axes.tick_params(labelsize=9)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _style(number: int) -> dict[str, Any]:
    count = len(COLOURS)
    return {"color": COLOURS[number % count], "linestyle": DASHES[number // count % len(DASHES)]}


def _heat(
    figure: Figure,
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
) -> None:
    """A heat map of AUCs; cells without a value stay empty."""
    import matplotlib
    import numpy as np

    low, high = limits if limits[0] < limits[1] else (limits[0] - 0.01, limits[1] + 0.01)
    colours = matplotlib.colormaps["viridis"].resampled(LEVELS)  # so few are drawn as shapes, not as a bitmap
    filled = np.array([[np.nan if v is None else v for v in line] for line in values], dtype=float)
    mesh = axes.pcolormesh(np.ma.masked_invalid(filled), cmap=colours, vmin=low, vmax=high, edgecolor="face")
    axes.grid(False)
    every = -(-len(columns) // TICKS)
    upright = len(columns) > 2 and max(map(len, columns)) > 3
    named = [_text(name, LONGEST_TICK) if upright else fill(_text(name, LONGEST_TICK), 12) for name in columns[::every]]
    axes.set_xticks(np.arange(0, len(columns), every) + 0.5, named, rotation=90 if upright else 0)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [_text(name, LONGEST_TICK) for name in rows])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(columns) <= FEW:
        for (i, j), value in np.ndenumerate(filled):
            if np.isfinite(value):
                red, green, blue, _ = colours(mesh.norm(value))
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                colour = "#fefefe" if dark else "#010101"
                axes.text(j + 0.5, i + 0.5, f"{value:.3f}", color=colour, ha="center", va="center", fontsize=8)
    bar = figure.colorbar(mesh, ax=axes, label="AUC", fraction=0.08, pad=0.02)
    bar.solids.set_edgecolor("face")  # type: ignore[union-attr]
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=9)


def _forest(
    named: Sequence[tuple[str, Values]],
    title: str,
    xlabel: str,
    zero: float | None,
    colours: Sequence[str] | None = None,
) -> Figure:
    """Estimates with their intervals, one a line; `zero` is what they are compared with."""
    labels = [fill(_text(name), WRAP) for name, _ in named]
    heights = [0.22 + 0.14 * label.count("\n") for label in labels]
    figure, axes = _figure(0.9 + sum(heights), title)
    centres, top = [], 0.0
    for height in heights:
        centres.append(top + height / 2)
        top += height
    if zero is not None:
        axes.axvline(zero, color=GREY, linewidth=1)
    for number, ((_, interval), y) in enumerate(zip(named, centres, strict=True)):
        if interval["estimate"] is None:
            continue
        colour = colours[number] if colours else COLOURS[0]
        if interval["lower"] is not None:
            axes.plot([interval["lower"], interval["upper"]], [y, y], color=colour, linewidth=1.5)
        axes.plot(interval["estimate"], y, color=colour, marker="o", markersize=4)
    axes.set_yticks(centres, labels, fontsize=8.5)
    axes.set(ylim=(top, 0))
    figure.supxlabel(fill(_text(xlabel), 50), fontsize=10, x=0.98, ha="right")
    return figure


def _share(interval: Values) -> str:
    return "?" if interval["estimate"] is None else f"{interval['estimate']:.0%}"


def _text(text: str, most: int = LONGEST) -> str:
    """Text as it stands, without matplotlib's formulas between dollars, and cut where it is too long for a picture."""
    return (text if len(text) <= most else f"{text[: most - 1]}\u2026").replace("$", r"\$")
