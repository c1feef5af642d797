"""Pictures show the values that they are given, and text as it stands."""

from __future__ import annotations

from io import StringIO
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from activations import plots
from activations.heads import Head


def svg(figure: Figure) -> str:
    file = StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()


def ticks(axes: Any) -> list[str]:
    return [t.get_text() for t in axes.get_xticklabels()]


def mesh(axes: Any) -> np.ndarray:
    [found, *_] = axes.collections
    return np.ma.filled(found.get_array(), np.nan)


def check(figure: Figure) -> Any:
    """Its first axes, which say what they show."""
    assert isinstance(figure, Figure)
    for axes in figure.axes:
        assert axes.get_xlabel() or axes.get_ylabel()
    assert svg(figure).startswith("<?xml")
    return figure.axes[0]


def test_labels_of_tokens_show_what_cannot_be_seen() -> None:
    assert plots.named([" the", "\n", "  ", "a\tb", "", "\x00", "$x$"]) == [
        "the", "↵", "␣␣", "a→b", "·", "�", "$x$",
    ]  # fmt: skip


def test_bars_are_the_match_lengths_by_outcome() -> None:
    lengths, outcomes = [3, 0, 7, 2, 5], ["genuine", "genuine", "accidental", "undecided", "genuine"]
    axes = check(plots.matches(["a", "$b$", "c", "<d>", "e"], lengths, outcomes, "t"))
    drawn = {c.get_label(): [(b.get_x() + b.get_width() / 2, b.get_height()) for b in c] for c in axes.containers}
    assert drawn == {
        "genuine": [pytest.approx((0.5, 3)), pytest.approx((4.5, 5))],
        "accidental": [pytest.approx((2.5, 7))],
        "other": [pytest.approx((3.5, 2))],
    }
    assert ticks(axes) == ["a", r"\$b\$", "c", "<d>", "e"]
    figure = plots.matches(["a"], [0], ["genuine"], "none at all")
    assert not check(figure).containers and not figure.legends


def test_a_picture_is_as_wide_as_its_text_needs() -> None:
    sizes = [plots.matches(["x"] * n, [1] * n, ["genuine"] * n, "t").get_figwidth() for n in (1, 10, 60)]
    assert sizes[0] == sizes[1] == plots.WIDTH < sizes[2]


def test_heads_lie_where_they_belong() -> None:
    scores = np.array([[0.1, 0.9], [np.nan, 0.2], [0.3, 0.4]])  # three blocks of two heads
    axes = check(plots.heads(scores, "t", "score", [Head(2, 1)]))
    np.testing.assert_array_equal(mesh(axes), scores.T)
    assert axes.get_xlabel() == "block" and ticks(axes) == ["0", "1", "2"]
    [frame] = axes.patches
    assert frame.get_xy() == (2, 1)


def test_the_leading_heads_are_named() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random((4, 5)), rng.random((4, 5))
    first[3, 2], second[1, 4], second[0, 0] = 2.0, 3.0, np.nan
    axes = check(plots.head_kinds(first, second, "x", "y", "t"))
    [line] = axes.lines
    np.testing.assert_array_equal(line.get_xdata(), first.ravel())
    np.testing.assert_array_equal(line.get_ydata(), second.ravel())
    names = [t.get_text() for t in axes.texts]
    assert "3.2" in names and "1.4" in names and "0.0" not in names


def test_attention_is_drawn_as_it_is_and_the_source_is_framed() -> None:
    weights = np.array([[0.1, 0.7, 0.2, 0.0], [np.nan, 0.0, 1.0, 0.0]])
    axes = check(plots.attention(weights, ["3.1", "4.0"], ["a", "b", "$", "d"], [1], "t"))
    np.testing.assert_array_equal(mesh(axes), weights)
    assert ticks(axes) == ["a", "b", r"\$", "d"]
    [frame] = axes.patches
    assert frame.get_xy() == (1, 0) and frame.get_height() == 2
    assert not axes.texts


def test_the_lens_shows_medians_and_the_middle_half() -> None:
    values = np.array([[0.0, 1.0, 2.0, 3.0, 10.0], [5.0, 5.0, 6.0, 7.0, 8.0]])
    axes = check(plots.lens({"$a$": values, "one": values[:, :1], "none": values[:, :0]}, "t"))
    drawn: list[Any] = list(axes.lines)
    np.testing.assert_array_equal(drawn[0].get_ydata(), [2.0, 6.0])
    assert [line.get_label() for line in drawn] == [r"\$a\$ (5)", "one (1)"]
    [band, _] = axes.collections
    corners = band.get_paths()[0].vertices
    assert {(0.0, 1.0), (0.0, 3.0), (1.0, 5.0), (1.0, 7.0)} <= set(map(tuple, corners.tolist()))
