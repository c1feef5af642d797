"""Pictures of texts, heads and states. Each function returns a matplotlib figure; axes say what they show, and in what.

Texts are drawn a column a token. `named` makes the labels of such columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from activations.figures import COLOURS, GREY, WIDTH, heat, panel, shown, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from activations.heads import Head

OUTCOMES = {"genuine": ("#009E73", ""), "accidental": ("#D55E00", "////"), "other": (GREY, "....")}
"""Colour and hatching of a match by its outcome; `other`: the target followed another candidate, or the text ended."""
COLUMN = 0.21
"""Inches of a token's column: its label is upright."""
LABEL = 18
"""Most letters of a token's label."""
NAMED = 4
"""Heads that are named for each of two scores."""


def named(pieces: Sequence[str]) -> list[str]:
    """Labels of tokens from their texts: line ends and tabs are seen, spaces too where a token is nothing else."""
    found = []
    for piece in pieces:
        text = piece.replace("\n", "\u21b5").replace("\t", "\u2192")
        text = "".join(c if c.isprintable() else "\ufffd" for c in text)
        found.append(text.strip() or "\u2423" * len(text) or "\u00b7")
    return found


def wide(columns: int) -> float:
    """Inches of a picture of so many tokens: never narrower than a phone."""
    return max(WIDTH, 1.6 + COLUMN * columns)


def matches(labels: Sequence[str], lengths: ArrayLike, outcomes: Sequence[str], title: str) -> Figure:
    """The length of the suffix match at each anchor, and whether the target then followed the candidate.

    labels, lengths (tokens; 0 is no match) and outcomes (of OUTCOMES; anything else is drawn as `other`) are [anchors].
    """
    figure, axes = panel(2.9, title, width=wide(len(labels)))
    match_bars(axes, lengths, outcomes)
    token_ticks(axes, labels)
    axes.set(xlabel="anchor")
    legend(figure, axes)
    return figure


def match_bars(axes: Axes, lengths: ArrayLike, outcomes: Sequence[str]) -> None:
    """What `matches` draws, lengths and outcomes [anchors], in axes that are there."""
    size = np.asarray(lengths, dtype=float)
    kinds = [o if o in OUTCOMES else "other" for o in outcomes]
    for kind, (colour, hatch) in OUTCOMES.items():
        where = [i for i, k in enumerate(kinds) if k == kind and size[i] > 0]
        if where:
            axes.bar(
                [i + 0.5 for i in where], size[where], width=0.8, color=colour, hatch=hatch, edgecolor="#ffffff",
                linewidth=0.5, label=kind,
            )  # fmt: skip
    axes.set(
        ylabel="match length\n(tokens)", xlim=(0, max(len(size), 1)), ylim=(0, max(1.0, size.max(initial=0) * 1.08))
    )
    axes.grid(False, axis="x")


def token_ticks(axes: Axes, labels: Sequence[str]) -> None:
    """Name every column."""
    axes.set_xticks(np.arange(len(labels)) + 0.5, [shown(text, LABEL) for text in labels], rotation=90, fontsize=8.5)


def legend(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """Below the picture, where it hides nothing; none where nothing has a name."""
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, ncols=columns)


def heads(scores: ArrayLike, title: str, label: str, marked: Sequence[Head] = ()) -> Figure:
    """Scores [blocks, heads] as a map; `label` names them and their unit, `marked` heads get a frame."""
    from matplotlib.patches import Rectangle

    values = np.asarray(scores, dtype=float)
    figure, axes = panel(1.5 + 0.22 * values.shape[1], title)
    finite = values[np.isfinite(values)]
    limits = (min(0.0, float(finite.min(initial=0))), float(finite.max(initial=0)))
    rows, columns = ([str(i) for i in range(n)] for n in reversed(values.shape))
    heat(figure, axes, values.T.tolist(), rows, columns, limits, label)
    for one in marked:
        axes.add_patch(Rectangle((one.block, one.head), 1, 1, fill=False, edgecolor="#D55E00", linewidth=1.6))
    axes.set(xlabel="block", ylabel="head")
    return figure


def head_kinds(first: ArrayLike, second: ArrayLike, xlabel: str, ylabel: str, title: str) -> Figure:
    """Two scores [blocks, heads] of every head against each other; the heads that lead either one are named."""
    x, y = (np.asarray(v, dtype=float) for v in (first, second))
    figure, axes = panel(4.2, title)
    axes.plot(x.ravel(), y.ravel(), linestyle="none", marker="o", markersize=3.5, color=COLOURS[0], alpha=0.6)
    across = x.shape[1]
    for values, turned in ((x, 60), (y, 0)):  # those that lead to the right stand side by side
        for i in np.argsort(-np.nan_to_num(values.ravel(), nan=-np.inf), kind="stable")[:NAMED].tolist():
            at = (float(x.ravel()[i]), float(y.ravel()[i]))
            if np.isfinite(at).all():
                axes.annotate(
                    f"{i // across}.{i % across}", at, xytext=(0, 5) if turned else (5, 0),
                    textcoords="offset points", fontsize=8, rotation=turned, va="bottom" if turned else "center",
                )  # fmt: skip
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return figure


def attention(
    weights: ArrayLike, rows: Sequence[str], labels: Sequence[str], marked: Sequence[int], title: str
) -> Figure:
    """Attention [rows, T] of some heads to the tokens of a text; `marked` positions (the source, say) get a frame.

    `labels` name the T tokens, `rows` the heads.
    """
    from matplotlib.patches import Rectangle

    values = np.asarray(weights, dtype=float)
    figure, axes = panel(1.9 + 0.25 * len(values), title, width=wide(len(labels)))
    heat(figure, axes, values.tolist(), rows, list(labels), (0.0, 1.0), "attention (share)", numbers=False)
    token_ticks(axes, labels)
    for position in marked:
        axes.add_patch(Rectangle((position, 0), 1, len(values), fill=False, edgecolor="#D55E00", linewidth=1.8))
    axes.set(xlabel="token attended to", ylabel="head")
    return figure


def lens(curves: Mapping[str, ArrayLike], title: str, ylabel: str = "log-probability (nats)") -> Figure:
    """Values [blocks, n] by block for each named group: the median (thick), and where half of them lie (band)."""
    figure, axes = panel(3.6, title)
    for number, (name, given) in enumerate(curves.items()):
        values = np.asarray(given, dtype=float)
        if not values.size:
            continue
        lower, middle, upper = np.nanquantile(values, [0.25, 0.5, 0.75], axis=1)
        how: dict[str, Any] = style(number)
        if name in OUTCOMES:
            how["color"] = OUTCOMES[name][0]
        blocks = np.arange(len(values))
        axes.plot(blocks, middle, label=shown(f"{name} ({values.shape[1]})"), linewidth=2, **how)
        axes.fill_between(blocks, lower, upper, color=how["color"], alpha=0.18, linewidth=0)
    axes.set(xlabel="block", ylabel=ylabel)
    legend(figure, axes, columns=2)
    return figure
