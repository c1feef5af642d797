"""What every tree would have given, against trees that are grown one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ltd_texts import COSTS, made_text

from activations.matching.match import MatchConfig
from decoding.budgets import FixedBudget, Growth, PricedBudget
from decoding.gates import Always, Choice
from decoding.ltd.grid import grid, oracle, replay, walk
from decoding.ltd.outcomes import Clock, Outcomes, levels_of, nodes_at
from decoding.ltd.training import spaced_sizes
from decoding.replay import LoggedDrafter, Walk, follow
from decoding.replay import walk as slow_walk
from decoding.replay_log import LogError

SIZES = (1, 2, 3, 5, 9, 40)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), top_k=st.integers(1, 3), depth=st.integers(1, 4), steps=st.integers(1, 9),
    ahead=st.integers(0, 3),
)  # fmt: skip
def test_tables_hold_what_single_trees_give(seed: int, top_k: int, depth: int, steps: int, ahead: int) -> None:
    texts = [made_text(seed + i, steps + i, top_k, depth, ahead=ahead, vocabulary=3) for i in range(2)]
    outcomes = Outcomes.of(texts)
    accepted, tokens = outcomes.accepted(SIZES), outcomes.tokens(SIZES)
    milliseconds = outcomes.milliseconds(Clock.of(COSTS, "eagle", outcomes, 0.5), SIZES)
    assert len(outcomes) == sum(t.steps for t in texts)
    for number, text in enumerate(texts):
        logged = LoggedDrafter(text)
        for position in range(text.steps):
            row = outcomes.starts[number] + position
            assert outcomes.text_of(int(row)) == number
            rest = text.ids[text.prompt + 1 + position :]
            for d in range(1, depth + 1):
                for v, size in enumerate(SIZES):
                    tree, _ = logged.grow(position, FixedBudget(size, d), 99)
                    assert tree is not None
                    assert accepted[row, d - 1, v] == len(follow(tree, rest))
                    assert tokens[row, d - 1, v] == min(len(follow(tree, rest)) + 1, len(rest))
                    time = COSTS.draft("eagle", d) + COSTS.verify(1 + len(tree), text.context(position)) + 0.5
                    assert milliseconds[row, d - 1, v] == pytest.approx(time, rel=1e-6)


def test_a_log_may_be_cut_to_fewer_levels() -> None:
    text = made_text(0, depth=4)
    whole, cut = Outcomes.of([text]), Outcomes.of([text], depth=2)
    assert cut.depth == 2 and cut.scores.shape[1] == nodes_at(2, 2)
    assert (cut.accepted(SIZES) == whole.accepted(SIZES)[:, :2]).all()


def test_logs_that_do_not_fit_are_refused() -> None:
    text = made_text(0, depth=3)
    with pytest.raises(LogError, match="no texts"):
        Outcomes.of([])
    with pytest.raises(LogError, match="3 levels deep: 4 cannot be had"):
        Outcomes.of([text], depth=4)
    with pytest.raises(LogError, match="top_k 2 and 2 levels, train-0 of top_k 2 and 3"):
        Outcomes.of([text, made_text(1, depth=2)])
    with pytest.raises(LogError, match="9 nodes: with top_k 2 they are not whole"):
        levels_of(replace(text, scores=text.scores[:, :9]))


# -- walks ----------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 30), nodes=st.integers(1, 8), depth=st.integers(1, 3))
def test_a_walk_is_the_replay_of_a_gate(seed: int, steps: int, nodes: int, depth: int) -> None:
    """Texts that stopped: both end at the last token. Fixed trees and priced ones."""
    texts = [made_text(seed + i, steps + i, vocabulary=2) for i in range(3)]
    outcomes = Outcomes.of(texts)
    clock = Clock.of(COSTS, "eagle", outcomes, 0.0)
    for budget in (FixedBudget(nodes, depth), PricedBudget.of(COSTS, "eagle", nodes, depth)):
        rate = replay(outcomes, clock, budget)
        found = Walk()
        for text in texts:
            slow_walk(text, Always(Choice("eagle", budget)), COSTS, MatchConfig(kappa=2), into=found)
        # The engine drafts no further than there is room for; the replay does, and is not better for it: where fewer
        # levels share the nodes, a text's end may take a step less.
        assert rate.tokens.tolist() == found.tokens
        assert 0 <= rate.steps.sum() - found.steps <= len(texts)
        assert (rate.milliseconds >= np.array(found.milliseconds) - 1e-6).all()
        last = COSTS.draft("eagle", depth) + COSTS.verify(1 + nodes, 64)
        assert (rate.milliseconds - np.array(found.milliseconds) <= depth * last).all()


def test_the_grid_is_the_replay_of_every_fixed_tree() -> None:
    outcomes = Outcomes.of([made_text(i, vocabulary=2) for i in range(4)])
    clock = Clock.of(COSTS, "eagle", outcomes, 0.5)
    trees = grid(outcomes, clock, SIZES)
    assert [(t.depth, t.nodes) for t in trees] == [(d, v) for d in (1, 2, 3) for v in SIZES]
    for tree in trees:
        again = replay(outcomes, clock, FixedBudget(tree.nodes, tree.depth))
        assert tree.rate.tokens.tolist() == again.tokens.tolist()
        assert tree.rate.milliseconds == pytest.approx(again.milliseconds, rel=1e-5)
    some = replay(outcomes, clock, FixedBudget(3, 2), texts=[2, 0])
    whole = replay(outcomes, clock, FixedBudget(3, 2))
    assert some.tokens.tolist() == whole.of([2, 0]).tokens.tolist()


def test_hindsight_is_at_least_as_good_as_any_fixed_tree() -> None:
    outcomes = Outcomes.of([made_text(i, vocabulary=2) for i in range(6)])
    clock = Clock.of(COSTS, "eagle", outcomes, 0.5)
    trees = grid(outcomes, clock, SIZES)
    best = oracle(outcomes, clock, SIZES).per_second
    assert best > 1.05 * max(t.rate.per_second for t in trees)
    assert best >= oracle(outcomes, clock, SIZES, depth=2).per_second - 1e-9
    assert oracle(outcomes, clock, SIZES, depth=2).per_second > max(t.rate.per_second for t in trees if t.depth == 2)


def test_rates_are_of_all_texts_together_and_compared_over_texts() -> None:
    outcomes = Outcomes.of([made_text(i, vocabulary=2) for i in range(8)])
    one, two = walk(outcomes, np.ones((len(outcomes), 2)), np.full((len(outcomes), 2), [10.0, 20.0]))
    assert one.per_second == pytest.approx(100) and two.per_second == pytest.approx(50)
    assert one.per_step == 1 and one.steps.tolist() == [40] * 8
    assert one.over(two) == pytest.approx((2, 2, 2))


def test_a_budget_in_a_replay_is_told_of_the_pace() -> None:
    outcomes = Outcomes.of([made_text(3, vocabulary=2)])
    told: list[float] = []

    class Asked(FixedBudget):
        def size(self, growth: Growth) -> int:
            told.append(growth.pace)
            return super().size(growth)

    replay(outcomes, Clock.of(COSTS, "eagle", outcomes, 0.5), Asked(3, 2))
    tokens = outcomes.tokens([3])[:, 1, 0].tolist()
    at, kept, steps, wanted = 0, 0.0, 0.0, []
    while at < len(tokens):
        wanted.append(kept / steps if steps else 0.0)
        kept, steps = 0.85 * kept + tokens[at], 0.85 * steps + 1
        at += tokens[at]
    assert told == pytest.approx(wanted)


# -- sizes ----------------------------------------------------------------------------------------------


def test_sizes_are_equally_far_apart_in_cost() -> None:
    sizes = spaced_sizes(COSTS, 6, 1, 31, context=64)  # costs: flat to 4 wide, 1 ms a node to 8, then 1.17
    assert sizes[0] == 1 and sizes[-1] == 31 and len(sizes) == 6
    times = [COSTS.verify(1 + v, 64) for v in sizes]
    assert np.diff(times).max() < 1.5 * (times[-1] - times[0]) / 5
    assert np.diff(times).min() > 0.7 * (times[-1] - times[0]) / 5
    assert spaced_sizes(COSTS, 24, 2, 9) == tuple(range(2, 10))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 30), st.integers(1, 10), st.integers(0, 60), st.lists(st.floats(1, 9), min_size=5, max_size=5))
def test_sizes_increase_whatever_the_curve(count: int, smallest: int, more: int, curve: list[float]) -> None:
    costs = replace(COSTS, verify_ms=[curve, curve])
    sizes = spaced_sizes(costs, count, smallest, smallest + more)
    assert len(sizes) == min(count, more + 1)
    assert list(sizes) == sorted(set(sizes)) and sizes[0] >= smallest and sizes[-1] <= smallest + more
