"""Pictures of probes. Each function returns a matplotlib figure.

Those of a report are made from the values of evaluation.json alone, those of an intervention from causality.json, and
the others from scores and labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from activations.figures import COLOURS, DASHES, GREY, forest, heat, panel, shown, style
from activations.plots import OUTCOMES, legend, match_bars, token_ticks, wide
from probes.tables import Values, headline, score_name
from probes.task import SCOPES
from probes.thresholds import Chosen, by_threshold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from probes.evaluation import Interval
    from probes.families import Reading

BINS = 20
"""Bins of a distribution."""


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
    figure, axes = panel(1.1 + 0.42 * len(kinds), f"{label}, {estimator}")
    heat(figure, axes, values, kinds, [str(b) for b in blocks], (min(known, default=0), max(known, default=1)))
    axes.set(xlabel="block", ylabel="kind of site")
    return figure


def families(found: Mapping[str, Sequence[tuple[float, Interval]]], scope: str = "match") -> Figure:
    """AUC of each target's probes on the test part over their relative depth, with 95 % intervals over documents.

    `found` holds by target's name the pairs of `probes.families.auc_by_depth`."""
    figure, axes = panel(4.2, f"Probes by depth, {SCOPES[scope]}")
    for number, (name, points) in enumerate(found.items()):
        shift = 0.008 * (number - (len(found) - 1) / 2)  # bars of one depth side by side
        depths = [depth + shift for depth, _ in points]
        axes.plot(
            depths, [auc.estimate for _, auc in points], marker="o", markersize=4, label=shown(name), **style(number)
        )
        for depth, (_, auc) in zip(depths, points, strict=True):
            axes.plot([depth, depth], [auc.lower, auc.upper], color=style(number)["color"], linewidth=1.2)
    axes.axhline(0.5, color=GREY, linewidth=1, label="knows nothing")
    axes.set(xlabel="relative depth (0: first block, 1: last)", ylabel="AUC")
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, ncols=2)
    return figure


def along(readings: Mapping[str, Reading], answer: str, spans: Sequence[tuple[int, int]] = ()) -> Figure:
    """Copy intent of each target along one answer that all of them read; shaded are the letters `spans` (from, to) that
    stand in the prompt as well."""
    figure, axes = panel(4.4, "Copy intent along one text", 7.2)
    for start, end in spans:
        axes.axvspan(
            start,
            end,
            color=GREY,
            alpha=0.15,
            linewidth=0,
            label="stands in the prompt" if start == spans[0][0] else None,
        )
    for number, (name, reading) in enumerate(readings.items()):
        axes.plot(reading.ends, reading.intent, marker="o", markersize=3, label=shown(name), **style(number))
    ends, at = [], 0
    for word in answer.split(" "):
        at += len(word) + 1
        ends.append(min(at - 1, len(answer)))
    axes.set_xticks(ends, [shown(word, 14) for word in answer.split(" ")], rotation=90, fontsize=8)
    axes.set(
        ylabel="copy intent (probability)",
        xlabel="the answer: each dot ends a token, which its probe has not seen",
        ylim=(-0.03, 1.03),
        xlim=(0, len(answer) + 1),
    )
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, ncols=3)
    return figure


def curve(report: Values, kind: Literal["roc", "pr"], scope: str) -> Figure:
    """ROC or precision-recall curves of the probes and of the scores that they are compared with, on the test part."""
    title = "ROC" if kind == "roc" else "Precision and recall"
    figure, axes = panel(5.6, f"{title}, {SCOPES[scope]}")
    x, y = ("fpr", "tpr") if kind == "roc" else ("recall", "precision")
    metric = "roc_auc" if kind == "roc" else "average_precision"
    drawn = [name for name, scopes in report["curves"].items() if scopes.get(scope, {}).get(kind, {}).get(x)]
    for number, name in enumerate(drawn):
        points, e = report["curves"][name][scope][kind], report["evaluations"][name][scope]
        label = f"{e[metric]['estimate']:.3f}  {score_name(report, name)}"
        axes.plot(points[x], points[y], label=shown(label), linewidth=2 if number == 0 else 1.3, **style(number))
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
    figure, axes = panel(4.6, "Reliability")
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, label="as often as it says")
    for number, (name, bins) in enumerate(report["reliability"].items()):
        label = f"{score_name(report, name)}, ECE {bins['error']:.3f}"
        axes.plot(bins["predicted"], bins["observed"], marker="o", markersize=4, label=shown(label), **style(number))
    axes.set(xlabel="copy intent (mean of a tenth of the rows)", ylabel="share of positive rows")
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5)
    return figure


def behind(report: Values, scope: str) -> Figure:
    """By how much AUC the best probe is ahead of each other score on the same test rows."""
    found = {name: scopes[scope]["roc_auc"] for name, scopes in report["differences"].items() if scope in scopes}
    named = [(score_name(report, name), interval) for name, interval in found.items()]
    return forest(named, f"Paired differences, {SCOPES[scope]}", "AUC of the best probe minus that of the score", 0.0)


def gains(report: Values, scope: str) -> Figure:
    """How much AUC a probe adds to what is there without one."""
    named = [(name, scopes[scope]["roc_auc"]) for name, scopes in report["gains"].items() if scope in scopes]
    return forest(named, f"Gains, {SCOPES[scope]}", f"AUC minus that of {report['gain_over']}", 0.0)


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
    return forest(named, f"Strata of {SCOPES[scope]}", "AUC of the best probe", pooled, colours)


def transfer(report: Values, by: str) -> Figure:
    """AUC of probes fitted on one kind of text and measured on another."""
    cells = {(c["train"], c["test"]): c["roc_auc"]["estimate"] for c in report["transfer"] if c["by"] == by}
    trains, tests = list(dict.fromkeys(a for a, _ in cells)), list(dict.fromkeys(b for _, b in cells))
    values = [[cells.get((train, test)) for test in tests] for train in trains]
    figure, axes = panel(1.6 + 0.27 * len(trains) + (0.0 if len(tests) < 3 else 0.6), f"Transfer by {by}")
    known = [v for v in cells.values() if v is not None]
    heat(figure, axes, values, trains, tests, (min([0.5, *known]), 1.0))
    axes.set(xlabel="measured on", ylabel="fitted on")
    return figure


def _share(interval: Values) -> str:
    return "?" if interval["estimate"] is None else f"{interval['estimate']:.0%}"


def controls(report: Values) -> Figure:
    """AUC of each control, beside that of the best probe (line) on the same kind of rows: those that a gate asks about.

    Controls that were skipped are not drawn.
    """
    best = report["evaluations"]["best"][headline(report)]["roc_auc"]
    named = [("the best probe", best)]
    named += [(c["name"], c["roc_auc"]) for c in report["controls"] if c["roc_auc"] and c["name"] != "fitted here"]
    colours = [COLOURS[0], *[COLOURS[1]] * (len(named) - 1)]
    return forest(named, f"Controls, {SCOPES[headline(report)]}", "AUC", best["estimate"], colours)


def areas(named: Mapping[str, Any], title: str) -> Figure:
    """AUCs with their intervals (`probes.evaluation.Interval`), one a line, beside 0.5, which knows nothing."""
    return forest([(name, one.to_dict()) for name, one in named.items()], title, "AUC", 0.5)


def intent_map(
    intents: ArrayLike,
    sites: Sequence[str],
    labels: Sequence[str],
    lengths: ArrayLike,
    outcomes: Sequence[str],
    title: str,
) -> Figure:
    """Copy intent [probes, anchors] along a text, one probe a row, below the matches there (`activations.plots`).

    labels, lengths (tokens) and outcomes are [anchors].
    """
    values = np.asarray(intents, dtype=float)
    height = 3.1 + 0.2 * len(values)
    figure, below = panel(height, title, width=wide(len(labels)))
    figure.delaxes(below)
    above, below = figure.subplots(2, 1, height_ratios=[1.1, 0.2 * len(values) + 0.3])
    for axes in (above, below):
        axes.tick_params(labelsize=9)
    above.spines[["top", "right"]].set_visible(False)
    match_bars(above, lengths, outcomes)
    above.set_xticks([])
    legend(figure, above)
    heat(figure, below, values.tolist(), sites, list(labels), (0.0, 1.0), "copy intent", numbers=False)
    token_ticks(below, labels)
    below.set(xlabel="anchor", ylabel="probe at")
    return figure


def by_block(intents: ArrayLike, genuine: ArrayLike, blocks: Sequence[int], title: str) -> Figure:
    """Copy intent [probes, anchors] of probes at these blocks: median and middle half, genuine beside accidental."""
    values, kind = np.asarray(intents, dtype=float), np.asarray(genuine, dtype=bool)
    figure, axes = panel(3.4, title)
    for name, where in (("genuine", kind), ("accidental", ~kind)):
        if not where.any():
            continue
        lower, middle, upper = np.nanquantile(values[:, where], [0.25, 0.5, 0.75], axis=1)
        colour = OUTCOMES[name][0]
        dashes = "-" if name == "genuine" else "--"
        axes.plot(
            blocks, middle, color=colour, linestyle=dashes, marker="o", markersize=3.5,
            label=f"{name} ({int(where.sum())} anchors)",
        )  # fmt: skip
        axes.fill_between(blocks, lower, upper, color=colour, alpha=0.18, linewidth=0)
    axes.set(xlabel="block", ylabel="copy intent", ylim=(-0.02, 1.02))
    legend(figure, axes, columns=1)
    return figure


def distributions(score: ArrayLike, genuine: ArrayLike, threshold: float | None, title: str) -> Figure:
    """How copy intent [rows] is spread over genuine and accidental rows: shares of each class in twenty bins."""
    values, kind = np.asarray(score, dtype=float), np.asarray(genuine, dtype=bool)
    figure, axes = panel(3.2, title)
    edges = np.linspace(0, 1, BINS + 1)
    for name, where in (("genuine", kind), ("accidental", ~kind)):
        if not where.any():
            continue
        counts, _ = np.histogram(values[where], edges)
        colour, hatch = OUTCOMES[name]
        axes.stairs(
            counts / where.sum(), edges, fill=True, color=colour, alpha=0.45, hatch=hatch,
            label=f"{name} ({int(where.sum())} rows)",
        )  # fmt: skip
    if threshold is not None:
        axes.axvline(threshold, color=GREY, linestyle="--", linewidth=1.3, label=f"threshold {threshold:.2f}")
    axes.set(xlabel="copy intent", ylabel="share of the class's rows", xlim=(0, 1))
    legend(figure, axes, columns=1)
    return figure


def threshold_choice(y: ArrayLike, score: ArrayLike, chosen: Sequence[Chosen], title: str) -> Figure:
    """Precision, recall and F1 of every threshold on labels y [rows] and scores [rows], and what each rule chose."""
    cuts, positives, negatives = by_threshold(y, score)
    precision, recall = positives / (positives + negatives), positives / positives[-1]
    f1 = 2 * positives / (positives + negatives + positives[-1])
    figure, axes = panel(3.8, title)
    for number, (name, values) in enumerate((("precision", precision), ("recall", recall), ("F1", f1))):
        axes.plot(cuts, values, label=name, linewidth=1.6, **style(number))
    for number, one in enumerate(chosen):
        if np.isfinite(one.threshold):
            name = f"{one.threshold:.2f}: {one.rule}"
            axes.axvline(one.threshold, color=GREY, linestyle=DASHES[number % len(DASHES)], linewidth=1.3, label=name)
    axes.set(xlabel="threshold on copy intent", ylabel="share", xlim=(0, 1), ylim=(-0.02, 1.02))
    legend(figure, axes, columns=1)
    return figure


def direction(effects: Sequence[Values], prediction: str = "next", where: str = "anchor") -> Figure:
    """How far a prediction's margin moves along the probe's direction, beside moves as long along random ones.

    effects: as `direction` in causality.json. prediction: next (the candidate's first token) or own (the pending
    token). where: anchor, or suffix.
    """
    named, colours = [], []
    for effect in effects:
        if effect["where"] != where:
            continue
        change = effect[prediction]
        what = f"{effect['intervention']}, {effect['kind']} ({effect['anchors']})"
        named += [(f"{what}: probe", change["probe"]), (f"{what}: random", change["random"])]
        colours += [COLOURS[1], GREY]
    what = "candidate's first token" if prediction == "next" else "pending token"
    title = f"The direction changed at the {where}"
    return forest(named, title, f"change of the margin of the {what} (logits)", 0.0, colours)


def ablations(found: Values, measure: str = "margin") -> Figure:
    """What is left without the top induction heads, and without as many random ones of the same blocks.

    found: as `induction` in causality.json. measure: intent (probability), follow (share of anchors) or margin
    (logits). Means over anchors, with their intervals.
    """
    units = {
        "intent": "copy intent",
        "follow": "share of anchors followed",
        "margin": "margin of the candidate (logits)",
    }
    [whole, *rest] = found["ablations"]
    figure, axes = panel(3.5, f"Heads ablated, {found['anchors']} anchors of {found['documents']} texts")
    for which, name in (("top", "induction heads"), ("random", "random heads")):
        mine = [whole, *(a for a in rest if a["which"] == which)]
        points = [(len(a["heads"]), a[measure]) for a in mine if a[measure]["estimate"] is not None]
        if not points:
            continue
        counts = [n for n, _ in points]
        how: dict[str, Any] = {
            "color": COLOURS[1] if which == "top" else GREY,
            "linestyle": "-" if which == "top" else "--",
        }
        estimates = [value["estimate"] for _, value in points]
        axes.plot(counts, estimates, marker="o", markersize=4, label=name, **how)
        for n, value in points:
            if value["lower"] is not None:
                axes.plot([n, n], [value["lower"], value["upper"]], color=how["color"], linewidth=1.2)
    axes.set(xlabel="heads ablated", ylabel=units[measure])
    legend(figure, axes, columns=2)
    return figure
