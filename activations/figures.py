"""What the pictures of all packages have in common: sizes, colours, and the kinds that are drawn more than once.

Figures are made without pyplot, so that nothing is shown or kept unasked. The colours are those of Okabe and Ito
(https://jfly.uni-koeln.de/color/), told apart by colour-blind people, on white and on black.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
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
SOURCE_COLOURS = {"target": GREY, "copy": "#009E73", "eagle": "#0072B2", "draft": "#CC79A7"}
"""Of what wrote a token: the same in all pictures."""


def panel(height: float, title: str, width: float = WIDTH) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` inches with a title and one pair of axes."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    made.suptitle(shown(title), fontsize=11, x=0.02, ha="left")
    axes = made.subplots()
    dress(axes)
    return made, axes


def dress(axes: Axes) -> None:
    """What all axes have: small numbers, a pale grid behind what is drawn, and no frame above and to the right."""
    axes.tick_params(labelsize=9)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def style(number: int) -> dict[str, Any]:
    """Colour and dashes of the line of this number: all of the first 24 differ."""
    count = len(COLOURS)
    return {"color": COLOURS[number % count], "linestyle": DASHES[number // count % len(DASHES)]}


def heat(
    figure: Figure,
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    label: str = "AUC",
    numbers: bool = True,
) -> None:
    """A heat map of values `[rows][columns]`, from the lower limit to the upper one; cells without a value stay empty.

    `label` names the values and their unit. `numbers`: few columns have them written in."""
    import matplotlib
    import numpy as np

    low, high = limits if limits[0] < limits[1] else (limits[0] - 0.01, limits[1] + 0.01)
    colours = matplotlib.colormaps["viridis"].resampled(LEVELS)  # so few are drawn as shapes, not as a bitmap
    filled = np.array([[np.nan if v is None else v for v in line] for line in values], dtype=float)
    mesh = axes.pcolormesh(np.ma.masked_invalid(filled), cmap=colours, vmin=low, vmax=high, edgecolor="face")
    axes.grid(False)
    every = -(-len(columns) // TICKS)
    upright = len(columns) > 2 and max(map(len, columns)) > 3
    named = [shown(name, LONGEST_TICK) if upright else fill(shown(name, LONGEST_TICK), 12) for name in columns[::every]]
    axes.set_xticks(np.arange(0, len(columns), every) + 0.5, named, rotation=90 if upright else 0)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [shown(name, LONGEST_TICK) for name in rows])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if numbers and len(columns) <= FEW:
        for (i, j), value in np.ndenumerate(filled):
            if np.isfinite(value):
                red, green, blue, _ = colours(mesh.norm(value))
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                colour = "#fefefe" if dark else "#010101"
                axes.text(j + 0.5, i + 0.5, f"{value:.3f}", color=colour, ha="center", va="center", fontsize=8)
    bar = figure.colorbar(mesh, ax=axes, label=label, fraction=0.08, pad=0.02)
    bar.solids.set_edgecolor("face")  # type: ignore[union-attr]
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=9)


def forest(
    named: Sequence[tuple[str, Mapping[str, Any]]],
    title: str,
    xlabel: str,
    zero: float | None,
    colours: Sequence[str] | None = None,
) -> Figure:
    """Estimates with their intervals, one a line; `zero` is what they are compared with.

    Each has the keys estimate, lower and upper, None where there is no number."""
    labels = [fill(shown(name), WRAP) for name, _ in named]
    heights = [0.22 + 0.14 * label.count("\n") for label in labels]
    figure, axes = panel(0.9 + sum(heights), title)
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
    figure.supxlabel(fill(shown(xlabel), 50), fontsize=10, x=0.98, ha="right")
    return figure


def shown(text: str, most: int = LONGEST) -> str:
    """Text as it stands, without matplotlib's formulas between dollars, and cut where it is too long for a picture."""
    return (text if len(text) <= most else f"{text[: most - 1]}\u2026").replace("$", r"\$")
