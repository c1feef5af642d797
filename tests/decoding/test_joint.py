"""Chances of merged trees, and which of their nodes are worth verifying."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.joint import ALONE, CASES, DEPTHS, OTHER_COPY, odds, path_probabilities, probability, worthwhile
from decoding.tree import DraftTree

HEAD_ALONE = [[[0.0, 1.0, 0.0]] * DEPTHS for _ in range(CASES)]
"""A table under which the head's nodes have the head's own chances, and copies are as likely as its best."""


def logs(*chances: float) -> list[float]:
    return [math.log(p) for p in chances]


def test_odds_undo_probability() -> None:
    assert probability(odds(math.log(0.3))) == pytest.approx(0.3)
    assert 0 < probability(odds(-1e9)) < 1e-3 and 0.99 < probability(odds(0.0)) < 1


def test_paths_of_a_head_alone_are_its_own_probabilities() -> None:
    tree = DraftTree([1, 2, 3], [-1, 0, 0], ["eagle"] * 3, logs(0.5, 0.25, 0.4))
    assert path_probabilities(tree, (), [], HEAD_ALONE) == pytest.approx([0.5, 0.125, 0.2])


def test_each_case_has_its_own_weights() -> None:
    """Copy 1 2 9; the head drafted 1 (then 7), and 4."""
    copy = DraftTree.chain([1, 2, 9], "copy")
    eagle = DraftTree([1, 4, 7], [-1, -1, 0], ["eagle"] * 3, logs(0.6, 0.2, 0.7))
    tree = DraftTree.merge([eagle, copy])
    assert list(zip(tree.tokens, tree.source, strict=True)) == [
        (1, "eagle"), (4, "eagle"), (7, "eagle"), (2, "copy"), (9, "copy"),
    ]  # fmt: skip
    joint = [
        [[0.1 * (case + 1), 0.01 * (case + 1), 0.5 - case + depth] for depth in range(DEPTHS)] for case in range(4)
    ]
    hazards = [1.0, -0.5]
    agree = probability(0.1 * 1.0 + 0.01 * odds(math.log(0.6)) + 0.5)
    beside = probability(0.3 * 1.0 + 0.03 * odds(math.log(0.2)) + 0.5 - 2)
    deeper = probability(0.3 * -0.5 + 0.03 * odds(math.log(0.7)) + 0.5 - 2 + 1)
    passed = probability(0.2 * -0.5 + 0.02 * odds(math.log(0.7)) + 0.5 - 1 + 1)
    last = probability(-0.5)  # the head says nothing there, and the last hazard stands for all later tokens
    expected = [agree, beside, agree * deeper, agree * passed, agree * passed * last]
    assert path_probabilities(tree, [1, 2, 9], hazards, joint) == pytest.approx(expected)
    other = DraftTree([5], [-1], ["copy"], [0.0])
    assert path_probabilities(other, [1], [0.0], joint) == pytest.approx([probability(OTHER_COPY)])
    assert ALONE == 3


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    n = draw(st.integers(1, 7))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    paths: list[float] = []
    for parent in parents:
        paths.append((paths[parent] if parent >= 0 else 1.0) * draw(st.floats(0, 1)))
    return parents, paths


@given(trees(), st.floats(0.001, 0.2), st.lists(st.floats(0.0, 5.0), min_size=8, max_size=8))
def test_what_is_worthwhile_is_the_best_tree_within(
    made: tuple[list[int], list[float]], price: float, steps: list[float]
) -> None:
    parents, paths = made
    times = list(itertools.accumulate(steps, initial=10.0))

    def gain(kept: tuple[int, ...]) -> float:
        return sum(paths[i] for i in kept) - price * times[len(kept)]

    kept = worthwhile(paths, price, lambda n: times[n])
    assert kept == sorted(set(kept)) and kept
    assert all(parents[i] < 0 or parents[i] in kept or paths[i] == paths[parents[i]] for i in kept)
    closed = [
        c
        for n in range(1, len(paths) + 1)
        for c in itertools.combinations(range(len(paths)), n)
        if all(parents[i] < 0 or parents[i] in c for i in c)
    ]
    assert gain(tuple(kept)) >= max(map(gain, closed)) - 1e-9
    assert all(parents[i] < 0 or parents[i] in kept for i in kept)
