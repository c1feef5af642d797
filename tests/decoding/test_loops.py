"""Loops, against a search of every stretch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from decoding.loops import PERIOD, REPEATS, in_loops


def plainly(tokens: list[int]) -> list[bool]:
    marked = [False] * len(tokens)
    for period in range(1, PERIOD + 1):
        for start in range(len(tokens)):
            end = start + REPEATS * period
            stretch = tokens[start:end]
            if len(stretch) == REPEATS * period and stretch == stretch[:period] * REPEATS:
                marked[start:end] = [True] * len(stretch)
                while end < len(tokens) and tokens[end] == tokens[end - period]:
                    marked[end] = True
                    end += 1
    return marked


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 7), st.integers(1, 9))
def test_marks_every_stretch_of_three_periods(tokens: list[int], cut: int, times: int) -> None:
    text = tokens[:cut] + tokens[cut:] * times
    assert in_loops(text).tolist() == plainly(text)


def test_limits() -> None:
    longest = list(range(PERIOD))
    assert in_loops(longest * REPEATS).all()
    assert not in_loops(longest * 2).any()
    assert not in_loops([*longest, PERIOD] * REPEATS).any()
    assert in_loops([9, 1, 2, 1, 2, 1, 2, 1, 8]).tolist() == [False, *[True] * 7, False]
    assert in_loops([]).tolist() == []
