"""Pictures of traces, replays, benchmarks and trainings. Each function returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from activations.figures import COLOURS, DASHES, GREY, SOURCE_COLOURS, WIDTH, dress, forest, panel, shown, style
from decoding.gates import COPY
from decoding.outcomes import NOTHING, Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from decoding.replay import Walk
    from decoding.trace import StepRecord, Trace
    from probes.evaluation import Interval

FALSE = COLOURS[1]
"""Colour of false copies."""
WIDE = 7.2
"""Inches: as wide as a page."""
TRAINING = (
    ("reward", "mean return of an episode"),
    ("entropy", "entropy of a decision (nats)"),
    ("approx_kl", "divergence of an update (nats)"),
    ("loss", "loss of PPO"),
)
"""Panels of a training: key in a record, and what it is."""


# -- a trace ------------------------------------------------------------------------------------------


def steps(trace: Trace, text: int = 0) -> Figure:
    """One text of a trace, step by step: copy intent above; below, drafted (pale) and accepted tokens by drafter.

    Raises ValueError where the text has no steps.
    """
    records = [r for r in trace if r.text == text]
    if not records:
        raise ValueError(f"text {text} of the trace has no steps: it has {len(trace.numbers)} texts")
    figure, (top, bottom) = _stack(5.0, f"Steps of mode {records[0].mode}")
    places = list(range(len(records)))
    for place, record in zip(places, records, strict=True):
        colour = _source_colour(record)
        if record.intent is not None:
            filled = "none" if record.match_length == 0 else colour
            top.plot(place, record.intent, "o", markersize=4.5, markeredgecolor=colour, markerfacecolor=filled)
        bottom.bar(place, record.depth, 0.8, color=colour, alpha=0.25)
        bottom.bar(place, len(record.accepted), 0.8, color=colour)
        if COPY in record.source and not record.accepted:
            bottom.plot(place, record.depth, "x", color=FALSE, markersize=5)
    tau = trace.about.tau if trace.about is not None else None
    if tau is not None:
        top.axhline(tau, color=GREY, linestyle="--", linewidth=1)
        top.text(len(records) - 0.5, tau, " τ", color=GREY, va="center", fontsize=9)
    top.set(ylabel="copy intent (probability)", ylim=(-0.03, 1.03))
    bottom.set(xlabel="step", ylabel="tokens", xlim=(-0.7, len(records) - 0.3))
    _step_legend(figure, records)
    return figure


def _source_colour(record: StepRecord) -> str:
    """Of the drafter; of the copies, where both drafted."""
    names = dict.fromkeys(record.source)
    return SOURCE_COLOURS.get(COPY if COPY in names else next(iter(names), "target"), GREY)


def _step_legend(figure: Figure, records: Sequence[StepRecord]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = [name for name in SOURCE_COLOURS if any(name in r.source for r in records)]
    entries: list[Any] = [Patch(color=SOURCE_COLOURS[name], label=f"{name} drafted") for name in names]
    if any(not r.source for r in records):
        entries.append(Patch(color=SOURCE_COLOURS["target"], label=NOTHING))
    entries.append(Patch(color=GREY, alpha=0.3, label="drafted, not accepted"))
    if any(COPY in r.source and not r.accepted for r in records):
        entries.append(Line2D([], [], marker="x", linestyle="", color=FALSE, label="copy with nothing accepted"))
    if any(r.intent is not None and not r.match_length for r in records):
        look: dict[str, Any] = {"marker": "o", "linestyle": "", "markeredgecolor": GREY, "markerfacecolor": "none"}
        entries.append(Line2D([], [], label="no suffix match", **look))
    figure.legend(handles=entries, loc="outside lower left", frameon=False, fontsize=8.5, ncols=3)


def time_spent(found: Sequence[Outcome]) -> Figure:
    """Where a trace's milliseconds went: a bar for each drafter and for whether a drafted token was kept."""
    ordered = sorted(found, key=lambda o: (o.name, not o.kept))
    figure, axes = panel(1.2 + 0.4 * len(ordered), "Where the time went", 5.6)
    longest = max((o.milliseconds for o in ordered), default=1.0)
    for y, outcome in enumerate(ordered):
        names = outcome.name.split("+")
        colour = SOURCE_COLOURS.get(COPY if COPY in names else names[0], GREY)
        hatch = "" if outcome.kept or outcome.name == NOTHING else "///"
        axes.barh(y, outcome.milliseconds, color=colour, alpha=0.4 if hatch else 1.0, hatch=hatch)
        told = f"{_counted(outcome.steps, 'step')}, {_counted(outcome.tokens, 'token')}"
        axes.text(outcome.milliseconds, y, f" {told}", va="center", fontsize=8.5)
    axes.set_yticks(range(len(ordered)), [shown(_outcome_name(o)) for o in ordered])
    axes.set(xlabel="milliseconds", xlim=(0, 1.4 * longest), ylim=(len(ordered) - 0.4, -0.6))
    return figure


def _outcome_name(outcome: Outcome) -> str:
    return outcome.name if outcome.name == NOTHING else f"{outcome.name}, {'some' if outcome.kept else 'nothing'} kept"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# -- replays ------------------------------------------------------------------------------------------


def rates(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    xlabel: str,
    *,
    levels: Mapping[str, float] | None = None,
    mark: float | None = None,
) -> Figure:
    """Tokens/s over the values of a setting: a line for each of `curves` (pairs of value and tokens/s), and a level
    line for each rate that the setting does not touch. `mark` is the value in use."""
    figure, axes = panel(3.9, title)
    for number, (name, points) in enumerate(curves.items()):
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=shown(name), **style(number))
    for number, (name, level) in enumerate((levels or {}).items()):  # of the same look, whatever the curves are
        axes.axhline(level, linewidth=1.2, color=GREY, linestyle=DASHES[-1 - number % 2], label=shown(name))
    if mark is not None:
        axes.axvline(mark, color=GREY, linestyle="--", linewidth=1, label="in use")
    axes.set(xlabel=xlabel, ylabel="tokens/s", ylim=(0, None))
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, ncols=2)
    return figure


def gap(
    found: Mapping[str, Interval],
    base: str,
    title: str = "Gates and what could be had",
    xlabel: str = "",
    zero: float = 1.0,
) -> Figure:
    """What each line has beside `base`, with its interval: by default speeds over that of the base, and so how far a
    gate is from an oracle. `zero` is where a line has what the base has."""
    named = [(name, value.to_dict()) for name, value in found.items()]
    return forest(named, title, xlabel or f"tokens/s over {base}", zero)


def step_shares(walks: Mapping[str, Walk]) -> Figure:
    """What steps are made of: shares of the steps that copied, that the head alone drafted for, and without a draft."""
    figure, axes = panel(1.3 + 0.34 * len(walks), "What steps draft", 5.6)
    for y, walked in enumerate(walks.values()):
        copies, plain = walked.copies / walked.steps, walked.plain / walked.steps
        parts = ((COPY, copies - walked.empty / walked.steps), ("", walked.empty / walked.steps),
                 ("eagle", 1 - copies - plain), ("target", plain))  # fmt: skip
        left = 0.0
        for name, share in parts:
            axes.barh(y, share, left=left, color=SOURCE_COLOURS[name] if name else FALSE)
            left += share
    axes.set_yticks(range(len(walks)), [shown(name) for name in walks])
    axes.set(xlabel="share of steps", xlim=(0, 1), ylim=(len(walks) - 0.5, -0.5))
    axes.grid(False)
    from matplotlib.patches import Patch

    told = ((SOURCE_COLOURS[COPY], "copy, some of it kept"), (FALSE, "copy, nothing kept"),
            (SOURCE_COLOURS["eagle"], "head alone"), (SOURCE_COLOURS["target"], NOTHING))  # fmt: skip
    handles = [Patch(color=colour, label=label) for colour, label in told]
    figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=8.5, ncols=2)
    return figure


# -- benchmarks ---------------------------------------------------------------------------------------


def speeds(result: Mapping[str, Any]) -> Figure:
    """Of a benchmark's result: bars of tokens/s for each group and mode."""
    records, settings = result["summary"], result["settings"]
    groups = list(dict.fromkeys(r["group"] for r in records))
    modes = list(dict.fromkeys(r["mode"] for r in records))
    found = {(r["group"], r["mode"]): r["tokens_per_second"] for r in records}
    title = f"{settings['target']}, {settings['dtype']}, {settings['device']}"
    figure, axes = panel(4.2, title, max(7.0, 1.5 * len(groups)))
    width = 0.8 / len(modes)
    for i, mode in enumerate(modes):
        places = [g + (i - (len(modes) - 1) / 2) * width for g in range(len(groups))]
        heights = [found[group, mode] for group in groups]
        axes.bar(places, heights, width, label=shown(mode), color=COLOURS[i % len(COLOURS)], hatch=_hatch(i))
    axes.set_xticks(
        range(len(groups)), [shown(g).replace(" ", "\n", 1).replace("_", "\n", 1) for g in groups], fontsize=8
    )
    axes.set(xlabel="group of prompts", ylabel="tokens/s after the first token")
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, ncols=min(len(modes), 5))
    return figure


def _hatch(number: int) -> str:
    """Tells bars apart whose colours are alike."""
    return ("", "///", "...", "xxx")[number // len(COLOURS) % 4]


def sweep(found: Mapping[str, Any], title: str) -> Figure:
    """Of a benchmark's sweep: a line a mode, tokens/s over the setting's values; a mode that the setting does not
    touch is a level line."""
    values = list(dict.fromkeys(p["value"] for p in found["points"]))
    figure, axes = panel(4.2, title, 6.5)
    for number, mode in enumerate(dict.fromkeys(p["mode"] for p in found["points"])):
        points = [p for p in found["points"] if p["mode"] == mode]
        places = [values.index(p["value"]) for p in points]
        heights = [p["tokens_per_second"] for p in points]
        axes.plot(places, heights, marker="o", markersize=4, label=shown(mode), **style(number))
    axes.set_xticks(range(len(values)), list(map(str, values)))
    axes.set(xlabel=found["setting"], ylabel="tokens/s after the first token", ylim=(0, None))
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, ncols=4)
    return figure


def speed_ratios(records: Sequence[Mapping[str, Any]], base: str) -> Figure:
    """Of the records of one group of a benchmark's summary: each mode's speed over that of the column `base`, with
    its 95 % interval over prompts."""
    named = [(r["mode"], r[f"over_{base}"]) for r in records if f"over_{base}" in r]
    return forest(named, f"Speed beside {base}", f"tokens/s over {base}, paired over prompts [95 %]", 1.0)


def fidelity(modes: Mapping[str, tuple[float, Interval]], title: str, ylabel: str) -> Figure:
    """Speed against fidelity: for each mode its speed over `ar`, and how true its texts are, with its interval."""
    figure, axes = panel(4.4, title, WIDTH + 0.8)
    marks = "os^Dv<>P*X"
    for number, (name, (speed, true)) in enumerate(modes.items()):
        look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)]}
        axes.plot([speed, speed], [true.lower, true.upper], linewidth=1.2, **look)
        mark = marks[number % len(marks)]
        axes.plot(speed, true.estimate, linestyle="", marker=mark, markersize=7, label=shown(name), **look)
    axes.axvline(1.0, color=GREY, linewidth=1)
    axes.axhline(0.0, color=GREY, linewidth=1)
    axes.set(xlabel="tokens/s over ar", ylabel=ylabel)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8.5, ncols=3)
    return figure


# -- trainings ----------------------------------------------------------------------------------------


def training(records: Sequence[Mapping[str, Any]]) -> Figure:
    """How a training of `train_ppo` went: reward, entropy, divergence and loss over the decisions trained on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.8, 5.6), layout="constrained")
    for (name, label), colour, axes in zip(TRAINING, COLOURS[:4], figure.subplots(2, 2, sharex=True).flat, strict=True):
        points = [(r["timesteps"], r[name]) for r in records if r.get(name) is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], ".-" if len(points) < 30 else "-", color=colour)
        axes.set_ylabel(label, fontsize=9)
        axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, labelbottom=True)
        axes.set_xlabel("decisions trained on", fontsize=9)
        axes.ticklabel_format(axis="x", style="plain")
    return figure


def _stack(height: float, title: str) -> tuple[Figure, tuple[Axes, Axes]]:
    """Two panels, one above the other, with one x axis."""
    figure, first = panel(height, title, WIDE)
    first.remove()
    top, bottom = figure.subplots(2, 1, sharex=True)
    dress(top)
    dress(bottom)
    return figure, (top, bottom)
