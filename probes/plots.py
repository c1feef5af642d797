"""Pictures of a report, made from the values of evaluation.json alone. Each function returns a matplotlib figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from activations.figures import COLOURS, GREY, forest, heat, panel, shown, style
from probes.tables import Values, score_name
from probes.task import SCOPES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
