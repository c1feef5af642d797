"""Budgets: what a priced tree keeps, and where it stops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_eagle_head import paths_of, random_head, reference_tree

from activations.target import Target
from decoding.budgets import FixedBudget, Growth, PricedBudget
from decoding.costs import CostTable
from decoding.eagle.drafter import EagleDrafter
from decoding.modes import ModeSettings, Parts
from decoding.request import Request

TABLE = CostTable(
    key={}, widths=[1, 9], contexts=[256, 1024], verify_ms=[[40.0, 48.0], [40.0, 48.0]],
    draft_ms={"eagle": [2.0, 4.0, 6.0, 8.0]}, probe_ms=0.0, match_ms=0.0,
)  # fmt: skip


def test_prices_are_times_over_the_time_of_a_token() -> None:
    budget = PricedBudget.of(TABLE, "eagle", nodes=8, depth=3)
    assert (budget.nodes, budget.depth) == (8, 3)
    assert budget.node == pytest.approx(1 / 40) and budget.level == pytest.approx(2 / 40)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=30), st.floats(0.0, 0.5), st.integers(1, 12))
def test_size_counts_the_nodes_that_earn_their_price(chances: list[float], price: float, most: int) -> None:
    scores = torch.tensor(chances, dtype=torch.float64).log()
    kept = PricedBudget(most, 3, price, 0.1).size(Growth(scores, 3, 4, 10))
    worth = sum(float(s.exp()) >= price for s in scores)
    assert kept == min(most, max(worth, 1))


def test_another_level_must_be_worth_its_price() -> None:
    budget = PricedBudget(8, 3, 0.02, 0.1)

    def goes_on(chances: list[float], depth: int, beams: int = 2) -> bool:
        return budget.go_on(Growth(torch.tensor(chances).log(), depth, beams, 10))

    assert goes_on([0.15, 0.06], 1)
    assert not goes_on([0.15, 0.04], 1)
    assert not goes_on([0.04, 0.15, 0.04], 1)  # the next level would grow from the best two alone
    assert goes_on([0.04, 0.15, 0.04], 1, beams=3)
    assert not goes_on([0.9], 3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 50), price=st.floats(0.001, 0.2), nodes=st.integers(1, 12))
def test_a_priced_tree_holds_the_best_nodes_of_the_full_one(
    small_target: Callable[..., Target], seed: int, price: float, nodes: int
) -> None:
    target, head = small_target(), random_head(seed % 4)
    drafter = EagleDrafter(target, head, top_k=3, sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    request = Request(0, [1, 2, 3], max_new_tokens=60, tokens=[1, 2, 3, 4])
    features = torch.randn(3, 96, generator=torch.Generator().manual_seed(seed))
    drafter.start(request, features)
    [tree] = drafter.propose([request], [PricedBudget(nodes, 3, price, 0.0)])
    assert tree is not None
    single = dict(reference_tree(head, target.embed, features, request.tokens, 3, 99, 3))
    total = {path: sum(single[path[: n + 1]] for n in range(len(path))) for path in single}
    worth = [score for score in total.values() if score >= math.log(price)]
    found = paths_of(tree)
    assert len(found) == min(nodes, max(1, len(worth)))
    assert min(total[path] for path in found) >= sorted(total.values(), reverse=True)[len(found) - 1] - 2e-3


def test_trees_are_priced_where_there_is_a_cost_table(small_target: Callable[..., Target]) -> None:
    target = small_target()
    drafter = EagleDrafter(target, random_head(), sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    chosen = ModeSettings(neural_tree="priced", neural_nodes=8, neural_depth=3)
    choice = Parts(target, chosen, neural={"eagle": drafter}, costs=lambda _: TABLE).neural_choice()
    assert choice is not None and choice.budget == PricedBudget.of(TABLE, "eagle", 8, 3)
    for parts in (
        Parts(target, replace(chosen, neural_tree="fixed"), neural={"eagle": drafter}, costs=lambda _: TABLE),
        Parts(target, chosen, neural={"eagle": drafter}),
    ):
        fixed = parts.neural_choice()
        assert fixed is not None and fixed.budget == FixedBudget(8, 3)
    with pytest.raises(ValueError, match="unknown neural_tree 'big'"):
        ModeSettings(neural_tree="big")
