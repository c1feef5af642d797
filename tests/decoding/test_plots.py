"""Pictures show the numbers that they are given."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from made_steps import RECORDS, record

from activations.figures import SOURCE_COLOURS
from decoding import plots
from decoding.outcomes import NOTHING, Outcome, outcomes
from decoding.replay import Walk
from decoding.trace import About, Trace
from probes.evaluation import Interval

ABOUT = About("small", "switchsd", True, "ProbeGate", "resid_post.1", "follow", 0.4, 1)


def drawn(figure: Any) -> str:
    """The figure as SVG; drawing finds what building does not."""
    file = StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()


def check_axes(figure: Any) -> None:
    drawn(figure)
    for axes in figure.axes:
        named = axes.get_xlabel() or figure.get_supxlabel() or axes.get_shared_x_axes().get_siblings(axes)[1:]
        assert named and (axes.get_ylabel() or axes.get_yticklabels())
    for text in (t for axes in figure.axes for t in (*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels())):
        assert text.get_fontsize() >= 8


# -- a trace ------------------------------------------------------------------------------------------


def test_steps_show_drafted_and_accepted_tokens_and_intent() -> None:
    figure: Any = plots.steps(Trace(RECORDS, ABOUT))
    check_axes(figure)
    top, bottom = figure.axes
    assert [bar.get_height() for bar in bottom.patches] == [6, 4, 6, 0, 2, 1, 0, 0]  # drafted and accepted, in turn
    assert [bar.get_facecolor()[:3] for bar in bottom.patches[::2]] != [bottom.patches[0].get_facecolor()[:3]] * 4
    points, tau = [line.get_ydata() for line in top.lines[:-1]], top.lines[-1].get_ydata()
    assert [y[0] for y in points] == [0.9, 0.6, 0.1]  # the last step has no probe
    assert list(tau) == [0.4, 0.4]
    [cross] = bottom.lines
    assert list(cross.get_xdata()) == [1], "the only copy with nothing accepted"
    told = [t.get_text() for t in figure.legends[0].get_texts()]
    assert told == ["copy drafted", "eagle drafted", NOTHING, "drafted, not accepted", "copy with nothing accepted",
                    "no suffix match"]  # fmt: skip


def test_steps_are_those_of_one_text() -> None:
    trace = Trace([RECORDS[0], replace(RECORDS[2], text=1), replace(RECORDS[3], text=1)], ABOUT)
    figure: Any = plots.steps(trace, text=1)
    assert len(figure.axes[1].patches) == 4
    with pytest.raises(ValueError, match="text 2 of the trace has no steps"):
        plots.steps(trace, text=2)


def test_steps_without_a_probe_or_a_threshold() -> None:
    figure: Any = plots.steps(Trace([record(0, ("copy",), 1, intent=None)]))
    check_axes(figure)
    assert not figure.axes[0].lines


def test_a_bar_for_each_outcome() -> None:
    found = outcomes(RECORDS)
    figure: Any = plots.time_spent(found)
    check_axes(figure)
    [axes] = figure.axes
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == ["copy, some kept", "copy, nothing kept", "eagle, some kept", NOTHING]
    assert [bar.get_width() for bar in axes.patches] == [21.5] * 4
    assert [t.get_text() for t in axes.texts] == [
        " 1 step, 5 tokens", " 1 step, 1 token", " 1 step, 2 tokens", " 1 step, 1 token",
    ]  # fmt: skip
    assert {bar.get_hatch() for bar in axes.patches} == {"", "///"}


def test_drafters_of_any_name_have_a_bar() -> None:
    drawn(plots.time_spent([Outcome("$own$", True, 1, 2, 3.0), Outcome("copy+eagle", False, 1, 1, 3.0)]))


# -- replays ------------------------------------------------------------------------------------------


def test_rates_are_drawn_as_they_are() -> None:
    figure: Any = plots.rates(
        {"switch": [(0.0, 10.0), (1.0, 20.0)], "match": [(0.0, 5.0)]}, "The $threshold$", "τ",
        levels={"alone": 7.0}, mark=0.5,
    )  # fmt: skip
    check_axes(figure)
    switch, match, alone, mark = figure.axes[0].lines
    assert list(switch.get_xdata()) == [0.0, 1.0] and list(switch.get_ydata()) == [10.0, 20.0]
    assert list(match.get_ydata()) == [5.0] and list(alone.get_ydata()) == [7.0, 7.0]
    assert list(mark.get_xdata()) == [0.5, 0.5]
    assert len({line.get_color() for line in (switch, match, alone)}) == 3
    assert figure.axes[0].get_ylim()[0] == 0, "a rate's axis begins at 0"


def test_a_gap_has_its_intervals() -> None:
    nan = float("nan")
    figure: Any = plots.gap({"gate": Interval(1.2, 1.1, 1.4), "one text": Interval(1.5, nan, nan)}, "ar")
    check_axes(figure)
    zero, bounds, gate, text = figure.axes[0].lines
    assert zero.get_xdata()[0] == 1.0
    assert list(bounds.get_xdata()) == [1.1, 1.4]
    assert [gate.get_xdata()[0], text.get_xdata()[0]] == [1.2, 1.5]


def test_shares_of_steps_add_up() -> None:
    walks = {"switch": Walk(steps=10, copies=5, empty=2, plain=1), "alone": Walk(steps=4, plain=4)}
    figure: Any = plots.step_shares(walks)
    check_axes(figure)
    widths = np.array([bar.get_width() for bar in figure.axes[0].patches]).reshape(2, 4)
    np.testing.assert_allclose(widths, [[0.3, 0.2, 0.4, 0.1], [0, 0, 0, 1]])


# -- benchmarks ---------------------------------------------------------------------------------------


def result() -> dict[str, Any]:
    summary = [
        {"group": group, "mode": mode, "tokens_per_second": 10.0 * speed}
        for group, by in (("overall", 1), ("code_completion", 2))
        for mode, speed in (("ar", by), ("copy", 2 * by))
    ]
    return {"summary": summary, "settings": {"target": "$small$", "dtype": "float32", "device": "here"}}


def test_speeds_are_bars_by_group_and_mode() -> None:
    figure: Any = plots.speeds(result())
    check_axes(figure)
    [axes] = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [10, 20, 20, 40]  # ar in both groups, then copy
    assert [t.get_text() for t in axes.get_xticklabels()] == ["overall", "code\ncompletion"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["ar", "copy"]


def test_many_modes_are_told_apart() -> None:
    one = result()
    one["summary"] = [{"group": "overall", "mode": f"m{i}", "tokens_per_second": 1.0} for i in range(12)]
    figure: Any = plots.speeds(one)
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in figure.axes[0].patches}) == 12


def test_a_sweep_has_a_line_for_each_mode() -> None:
    points = [{"mode": m, "value": v, "tokens_per_second": s} for m, v, s in
              (("ar", "1", 5.0), ("copy", "1", 6.0), ("ar", "3", 5.0), ("copy", "3", 9.0))]  # fmt: skip
    figure: Any = plots.sweep({"setting": "kappa", "points": points}, "title")
    check_axes(figure)
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[5.0, 5.0], [6.0, 9.0]]
    assert figure.axes[0].get_xlabel() == "kappa"
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["1", "3"]


def test_speed_ratios_leave_out_what_has_none() -> None:
    records = [{"mode": "ar"}, {"mode": "copy", "over_ar": {"estimate": 2.0, "lower": 1.5, "upper": 2.5}},
               {"mode": "one", "over_ar": {"estimate": 1.1, "lower": None, "upper": None}}]  # fmt: skip
    figure: Any = plots.speed_ratios(records, "ar")
    check_axes(figure)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["copy", "one"]
    assert [list(line.get_xdata()) for line in figure.axes[0].lines[1:]] == [[1.5, 2.5], [2.0], [1.1]]


def test_fidelity_is_a_point_for_each_mode() -> None:
    figure: Any = plots.fidelity(
        {"copy": (2.0, Interval(0.0, -0.1, 0.1)), "cospec": (1.3, Interval(-1, -2, 0))}, "t", "y"
    )
    check_axes(figure)
    bar, point, _, lossy, *_ = figure.axes[0].lines
    assert list(bar.get_ydata()) == [-0.1, 0.1]
    assert (point.get_xdata()[0], point.get_ydata()[0]) == (2.0, 0.0)
    assert (lossy.get_xdata()[0], lossy.get_ydata()[0]) == (1.3, -1.0)
    assert point.get_marker() != lossy.get_marker()


def test_a_training_has_four_panels_and_takes_gaps() -> None:
    log: list[dict[str, Any]] = [
        {"timesteps": 100 * i, "reward": i, "entropy": None, "loss": 1 / (i + 1)} for i in range(3)
    ]
    figure: Any = plots.training(log)
    drawn(figure)
    reward, entropy, divergence, loss = figure.axes
    assert list(reward.lines[0].get_ydata()) == [0, 1, 2]
    assert not len(entropy.lines[0].get_xdata()) and not len(divergence.lines[0].get_xdata())
    assert math.isclose(loss.lines[0].get_ydata()[2], 1 / 3)


def test_sources_have_the_colours_of_the_whole_project() -> None:
    figure: Any = plots.time_spent(outcomes(RECORDS[:1]))
    from matplotlib.colors import to_hex

    assert to_hex(figure.axes[0].patches[0].get_facecolor()).upper() == SOURCE_COLOURS["copy"].upper()
