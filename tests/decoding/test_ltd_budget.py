"""Observations and the learned budget: the same in training and at decoding, and refused where they do not fit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ltd_texts import COSTS, made_text
from test_eagle_head import random_head

from activations.target import Target
from decoding.budgets import KEPT, FixedBudget, Growth, Pace
from decoding.decoder import Decoder
from decoding.eagle.drafter import EagleDrafter
from decoding.engine import Engine
from decoding.gates import Always, Choice
from decoding.ltd.budget import SETTINGS, LearnedBudget
from decoding.ltd.grid import decide, replay
from decoding.ltd.observations import FLOOR, OBSERVATIONS, Observer
from decoding.ltd.outcomes import Clock, Outcomes, nodes_at
from decoding.modes import Plan
from decoding.policies.policy import Policy, PolicyError
from decoding.replay_log import log_text
from decoding.request import Request

SITES = ("resid_pre.1", "resid_pre.2", "resid_pre.3")
SIZES = (1, 2, 4, 7)


def random_policy(features: int, actions: int, seed: int = 0, hidden: int = 16) -> Policy:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    first = matrix(hidden, features) / features**0.5, matrix(hidden)
    return Policy(
        [first, (matrix(actions, hidden), torch.zeros(actions))],
        mean=torch.full((features,), -2.0),
        scale=torch.full((features,), 2.0),
    )


def random_budget(
    observer: Observer, seed: int = 0, depth: bool = True, size: bool = True, **given: Any
) -> LearnedBudget:
    made = {
        "depth_policy": random_policy(observer.depth_features, 2, seed) if depth else None,
        "size_policy": random_policy(observer.size_features, len(SIZES), seed + 1) if size else None,
        "observer": observer, "sizes": SIZES, "nodes": max(SIZES), "depth": observer.depth, "every": 1,
        "fallback": FixedBudget(3, 2),
    }  # fmt: skip
    return LearnedBudget(**{**made, **given})


class Plain:
    """A budget that cannot be told from any other."""

    def __init__(self, budget: LearnedBudget) -> None:
        self.nodes, self.depth = budget.nodes, budget.depth
        self.go_on, self.size = budget.go_on, budget.size


# -- observations ---------------------------------------------------------------------------------------


def test_the_papers_observations_have_the_papers_sizes() -> None:
    observer = Observer("paper", 10, 13)  # twelve levels of a hundred, behind a first one of ten
    assert (observer.depth_features, observer.size_features) == (128, 1268)
    growth = Growth(torch.arange(100) * -0.2, 3, 10, 500)
    row = observer.to_depth(growth)[0]
    assert row[:60].tolist() == pytest.approx((torch.arange(60) * -0.2).tolist())
    assert row[61:100].eq(FLOOR).all()
    assert row[100:114].tolist() == [0.5] * 14 and row[114:].tolist() == pytest.approx([0.3] * 14)
    row = observer.to_size(growth._replace(scores=torch.zeros(110), depth=2))[0]
    assert row[:110].eq(0).all() and row[110:1210].eq(FLOOR).all()
    assert row[1210:1239].eq(0.5).all() and row[1239:].tolist() == pytest.approx([0.2] * 29)


def test_ranked_observations_do_not_depend_on_the_order_of_siblings() -> None:
    observer = Observer("history", 2, 3)
    scores = torch.tensor([-0.5, -1.0, -0.7, -20.0, -1.1, -3.0])
    other = scores[[1, 0, 4, 5, 3, 2]]
    one, two = (observer.to_size(Growth(s, 2, 2, 100, 1.5)) for s in (scores, other))
    assert torch.equal(one, two)
    assert one[0, :6].tolist() == pytest.approx([-0.5, -0.7, -1.0, -1.1, -3.0, FLOOR])
    assert one[0, 24:26].tolist() == pytest.approx([math.exp(-0.5), math.exp(-0.7)])
    levels = one[0, 48:54].tolist()
    assert levels == pytest.approx([math.exp(-0.5), math.exp(-1.0), math.exp(-0.7), math.exp(-1.1), 0, 0])
    assert one[0, 54:].tolist() == pytest.approx([0.1, 0, 1, 0, 1.5])
    assert observer.to_depth(Growth(scores[2:], 2, 2, 100, 1.5))[0, 8:].tolist() == pytest.approx([0.1, 0, 1, 0, 1.5])
    assert Observer("ranked", 2, 3).size_features == observer.size_features - 1


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(OBSERVATIONS), seed=st.integers(0, 10**6), top_k=st.integers(1, 4), depth=st.integers(1, 4),
    rows=st.integers(1, 40),
)  # fmt: skip
def test_rows_are_what_single_growths_give(kind: str, seed: int, top_k: int, depth: int, rows: int) -> None:
    """Training sees many at a time, or one; decoding sees one. Bit for bit the same."""
    rng = np.random.default_rng(seed)
    observer = Observer(kind, top_k, 4)
    whole = (-rng.exponential(3, (rows, nodes_at(depth, top_k)))).astype(np.float32)
    newest = whole[:, nodes_at(depth - 1, top_k) :]
    lengths, paces = rng.integers(1, 2000, rows), rng.uniform(1, 5, rows)
    many = observer.size_rows(whole, depth, lengths, paces), observer.depth_rows(newest, depth, lengths, paces)
    assert many[0].shape == (rows, observer.size_features) and many[1].shape == (rows, observer.depth_features)
    assert all(x.dtype == np.float32 and np.isfinite(x).all() and (x >= FLOOR).all() for x in many)
    for i in range(rows):
        growth = Growth(torch.from_numpy(whole[i]), depth, top_k, int(lengths[i]), float(paces[i]))
        assert np.array_equal(observer.to_size(growth)[0].numpy(), many[0][i])
        assert np.array_equal(
            observer.to_depth(growth._replace(scores=growth.scores[-newest.shape[1] :]))[0].numpy(), many[1][i]
        )


def test_unknown_observations_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown observation 'hidden': use paper, ranked or history"):
        Observer("hidden", 4, 4)
    with pytest.raises(ValueError, match="top_k is 0"):
        Observer("paper", 0, 4)


# -- the budget -----------------------------------------------------------------------------------------


def test_a_learned_budget_takes_the_likeliest_action() -> None:
    observer = Observer("ranked", 2, 4)

    def constant(features: int, logits: list[float]) -> Policy:
        return Policy([(torch.zeros(len(logits), features), torch.tensor(logits))])

    budget = random_budget(
        observer, depth_policy=constant(observer.depth_features, [0.0, 1.0]),
        size_policy=constant(observer.size_features, [0.0, 3.0, 1.0, 2.0]),
    )  # fmt: skip
    level, whole = Growth(torch.zeros(4), 2, 2, 9), Growth(torch.zeros(6), 2, 2, 9)
    assert budget.go_on(level) and budget.size(whole) == 2
    assert not budget.go_on(level._replace(depth=4))  # the deepest
    stops = random_budget(observer, depth_policy=constant(observer.depth_features, [1.0, 0.0]), every=3)
    assert [stops.go_on(level._replace(depth=d)) for d in (1, 2, 3)] == [True, True, False]
    assert random_budget(observer, depth=False).go_on(level._replace(depth=1))
    assert not random_budget(observer, depth=False).go_on(level)
    assert random_budget(observer, size=False).size(whole) == 3
    narrow = random_budget(observer, size_policy=constant(observer.size_features, [0.0, 0.0, 0.0, 1.0]), nodes=5)
    assert narrow.size(whole) == 5


def test_a_budget_is_made_of_settings_and_damaged_ones_are_refused() -> None:
    observer = Observer("history", 2, 3)
    settings: dict[str, Any] = {
        "sizes": list(SIZES), "nodes": 7, "depth": 3, "top_k": 2, "every": 1, "observation": "history",
        "fixed_nodes": 3, "fixed_depth": 2,
    }  # fmt: skip
    assert set(settings) == set(SETTINGS)
    size = random_policy(observer.size_features, 4)
    made = LearnedBudget.made(None, size, settings)
    assert (made.sizes, made.observer, made.fallback) == (SIZES, observer, FixedBudget(3, 2))
    with pytest.raises(PolicyError, match="lack every: train"):
        LearnedBudget.made(None, size, {k: v for k, v in settings.items() if k != "every"})
    for name, value, told in (
        ("sizes", [1, 0], "0 is no count"), ("sizes", 4, "not iterable"), ("nodes", True, "True is no count"),
        ("depth", 2.0, "2.0 is no count"), ("observation", "x", "unknown observation 'x'"),
    ):  # fmt: skip
        with pytest.raises(PolicyError, match=f"damaged.*{told}"):
            LearnedBudget.made(None, size, {**settings, name: value})
    with pytest.raises(PolicyError, match=f"size policy takes {size.features} features and has 4 actions.*have 3"):
        LearnedBudget.made(None, size, {**settings, "sizes": [1, 2, 3]})
    with pytest.raises(PolicyError, match="the depth policy takes"):
        LearnedBudget.made(size, None, settings)
    with pytest.raises(PolicyError, match="all must be 1 or more"):
        LearnedBudget.made(None, None, {**settings, "sizes": []})


@pytest.mark.parametrize("kind", OBSERVATIONS)
@pytest.mark.parametrize("given", [{}, {"every": 2}, {"depth": False}, {"size": False}, {"nodes": 3}])
def test_decisions_over_a_log_are_the_budgets_own(kind: str, given: dict[str, Any]) -> None:
    """Computed together, and asked for one by one."""
    outcomes = Outcomes.of([made_text(i, vocabulary=3) for i in range(3)])
    rows, rng = np.arange(len(outcomes)), np.random.default_rng(0)
    paces = rng.uniform(1, 4, len(rows))
    varied: list[set[int]] = [set(), set()]
    for seed in range(4):
        budget = random_budget(Observer(kind, 2, 3), seed, **given)
        together, alone = decide(outcomes, budget, rows, paces), decide(outcomes, Plain(budget), rows, paces)
        assert (together[0] == alone[0]).all()
        # A fixed size is of the nodes that there are.
        count = np.array([nodes_at(d, 2) for d in range(4)])[alone[0]]
        assert (np.minimum(together[1], count) == np.minimum(alone[1], count)).all()
        for seen, values in zip(varied, together, strict=True):
            seen |= set(values.tolist())
    assert given or all(len(seen) > 1 for seen in varied)


def test_asking_the_policies_costs_little() -> None:
    """Of a step of 20 ms three questions may take 1.5 %; here with room for a busy machine."""
    observer = Observer("history", 4, 6)
    budget = random_budget(observer, depth_policy=random_policy(observer.depth_features, 2, hidden=128))
    level, whole = Growth(-torch.rand(16), 2, 4, 300, 2.0), Growth(-torch.rand(36), 3, 4, 300, 2.0)
    times = []
    for _ in range(50):
        began = time.perf_counter()
        budget.go_on(level), budget.go_on(level), budget.size(whole)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.6e-3


# -- with a drafter -------------------------------------------------------------------------------------


def test_the_pace_is_a_running_mean() -> None:
    pace = Pace()
    assert pace.value == 0
    pace = pace.after(3)
    assert pace.value == 3
    assert pace.after(1).value == pytest.approx((KEPT * 3 + 1) / (KEPT + 1))


def test_a_drafter_tells_its_budget_of_the_pace(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), sites=SITES)
    told: list[float] = []

    class Asked(FixedBudget):
        def size(self, growth: Growth) -> int:
            told.append(growth.pace)
            return super().size(growth)

    engine = Engine(target, Plan(Always(Choice("eagle", Asked(4, 2))), (drafter,)))
    request = Request(0, [1, 5, 9, 5], max_new_tokens=12)
    try:
        engine.admit(request)
        wanted, pace = [], Pace()
        while request.room > 0:
            wanted.append(pace.value)
            [commit] = engine.verify(engine.draft())
            pace = pace.after(len(commit.tokens))
        assert told == pytest.approx(wanted) and len(told) > 3
    finally:
        engine.close()


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_the_replay_of_a_learned_budget_is_what_decoding_does(small_target: Callable[..., Target], kind: str) -> None:
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), top_k=2, sites=SITES)
    decoder = Decoder(target, neural=drafter, costs=COSTS)
    prompt = [1, 5, 9, 5, 9, 5]
    answer = decoder.generate(prompt, mode="ar", max_new_tokens=40).tokens
    text = log_text(target, drafter, [*prompt, *answer], 6, key="a", source="a", stopped=True, limit=40, depth=3)
    outcomes = Outcomes.of([text])
    budget = random_budget(Observer(kind, 2, 3), seed=5)
    rate = replay(outcomes, Clock.of(COSTS, "eagle", outcomes, 0.0), budget)
    engine = Engine(target, Plan(Always(Choice("eagle", budget)), (drafter,)))
    request = Request(0, prompt, max_new_tokens=80)  # room for every tree, as in the log
    steps = 0
    try:
        engine.admit(request)
        while len(request.generated) < len(answer):
            engine.verify(engine.draft())
            steps += 1
    finally:
        engine.close()
    assert request.generated[: len(answer)] == answer
    assert rate.steps.tolist() == [steps] and rate.tokens.tolist() == [len(answer) - 1]


def test_a_pace_is_of_one_text(small_target: Callable[..., Target]) -> None:
    """The next turn of a chat begins without one; a particle goes on with that of the row that it comes from."""
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), sites=SITES)
    engine = Engine(target, Plan(Always(Choice("eagle", FixedBudget(4, 2))), (drafter,)), keeps=True)
    first = Request(0, [1, 5, 9, 5], max_new_tokens=12)
    try:
        engine.admit(first)
        for _ in range(3):
            engine.verify(engine.draft())
        assert drafter._states[first].pace.steps > 2
        engine.leave([first])
        second = Request(1, [*first.tokens, 7, 7], max_new_tokens=12)
        engine.admit(second)
        assert engine.reused > 0 and drafter._states[second].pace == Pace()
        engine.verify(engine.draft())
        drafter.select([second], [0], 4)
        assert drafter._states[second].pace.steps == 1
    finally:
        engine.close()
