"""Modes ltd and cospec in the decoder: what their policies may change, and what not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import RELAXED, Coin, greedy, prompts_of
from test_draft_drafter import draft_of
from test_eagle_head import random_head

from activations.target import Target
from decoding.budgets import FixedBudget, Growth
from decoding.cospec.state import STATE
from decoding.costs import CostTable
from decoding.decoder import Decoder
from decoding.draft.drafter import DraftModelDrafter
from decoding.drafters import Drafter
from decoding.eagle.drafter import EagleDrafter
from decoding.ltd.budget import LearnedBudget
from decoding.ltd.observations import Observer
from decoding.modes import DecodingError, ModeSettings
from decoding.policies.policy import Policy, PolicyArtifact
from decoding.request import Request

SITES = ("resid_pre.1", "resid_pre.2", "resid_pre.3")
SIZES = [1, 2, 3, 5, 8]
TOP_K, DEPTH = 3, 4
COSTS = CostTable({}, [1, 9], [64], [[10.0, 11.0]], {"draft": [2.0, 4.0], "eagle": [1.0, 2.0]}, 0.0, 0.0)


def network(seed: int, features: int, actions: int) -> Policy:
    """A policy of no wisdom, whose choices change with the scores that it sees."""
    g = torch.Generator().manual_seed(seed)
    layers = [
        (torch.randn(16, features, generator=g) * 0.3, torch.randn(16, generator=g)),
        (torch.randn(actions, 16, generator=g), torch.zeros(actions)),
    ]
    return Policy(layers, mean=torch.full((features,), -5.0), scale=torch.full((features,), 2.0))


def tree_policy(target: Target, drafter: Drafter | None, seed: int = 0, only: Sequence[str] = ()) -> PolicyArtifact:
    seen = Observer("paper", TOP_K, DEPTH)
    networks = {
        "depth": network(seed, seen.depth_features, 2), "size": network(seed + 1, seen.size_features, len(SIZES))
    }  # fmt: skip
    kept = {name: made for name, made in networks.items() if not only or name in only}
    used = {
        "sizes": SIZES, "nodes": 8, "depth": DEPTH, "top_k": TOP_K, "every": 1, "observation": "paper",
        "fixed_nodes": 4, "fixed_depth": 2,
    }  # fmt: skip
    told = None if drafter is None else drafter.describe()
    return PolicyArtifact("ltd", target.fingerprint.to_dict(), told, kept, used)


def arbiter(target: Target, drafter: Drafter | None, threshold: float = 0.5) -> PolicyArtifact:
    told = None if drafter is None else drafter.describe()
    networks = {"arbitration": network(5, len(STATE), 2)}
    used = {"state": list(STATE), "threshold": threshold, "draft_tokens": 5, "stops": False}
    return PolicyArtifact("cospec", target.fingerprint.to_dict(), told, networks, used)


def learned(target: Target, seed: int = 0, only: Sequence[str] = (), **options: Any) -> Decoder:
    neural: dict[str, Drafter] = {
        "eagle": EagleDrafter(target, random_head(seed), top_k=TOP_K, sites=SITES),
        "draft": DraftModelDrafter(target, draft_of(target, 0.05)),
    }
    policies = {"ltd": tree_policy(target, neural["eagle"], seed, only), "cospec": arbiter(target, neural["draft"])}
    chosen = ModeSettings(**{"kappa": 2, "draft_tokens": 5, **options})
    return Decoder(target, Coin(), neural, chosen, costs=COSTS, policies=policies)  # type: ignore[arg-type]


# -- trees ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_tree_can_be_grown_by_whoever_answers_its_questions(small_target: Callable[..., Target], depth: int) -> None:
    drafter = EagleDrafter(small_target(), random_head(), top_k=TOP_K, sites=SITES)

    def request() -> Request:
        made = Request(0, [1, 2, 3], max_new_tokens=30, tokens=[1, 2, 3, 4])
        drafter.start(made, torch.randn(3, 96, generator=torch.Generator().manual_seed(1)))
        return made

    [tree] = drafter.propose([request()], [FixedBudget(7, depth)])
    growing = drafter.growing(request(), 20)
    seen: list[Growth] = []
    answer: int | None = None
    try:
        while True:
            question, growth = growing.send(answer)
            seen.append(growth)
            answer = growth.depth < depth if question == "go_on" else 7
    except StopIteration as end:
        grown = end.value
    assert tree is not None and (grown.tokens, grown.parents) == (tree.tokens, tree.parents)
    assert [g.depth for g in seen] == [*range(1, depth + 1), depth]
    assert [len(g.scores) for g in seen[:-1]] == [TOP_K, *[TOP_K**2] * (depth - 1)]
    assert len(seen[-1].scores) == TOP_K + (depth - 1) * TOP_K**2
    assert all(g.length == 4 and g.beams == TOP_K for g in seen)


@settings(max_examples=10, **RELAXED)
@given(data=st.data())
def test_learned_trees_write_what_the_target_writes(small_target, reference_model, data) -> None:  # type: ignore[no-untyped-def]
    target = small_target()
    prompts = prompts_of(data, data.draw(st.integers(1, 4)))
    n = data.draw(st.integers(1, 25))
    only = data.draw(st.sampled_from([(), ("depth",), ("size",)]))
    decoder = learned(target, data.draw(st.integers(0, 3)), only)
    truth = [greedy(reference_model("llama"), p, n) for p in prompts]
    for options in ({"mode": "ltd"}, {"mode": "switchsd", "neural_tree": "learned", "gate": "match"}):
        made = decoder.generate(prompts, max_new_tokens=n, batch=data.draw(st.integers(1, 4)), **options)
        assert [g.tokens for g in made] == truth
    sampled: dict[str, Any] = {"max_new_tokens": n, "temperature": 0.9, "seed": 5}
    alone = decoder.generate(prompts, mode="ar", **sampled)
    assert [g.tokens for g in decoder.generate(prompts, mode="ltd", **sampled)] == [g.tokens for g in alone]


def test_the_policies_decide_the_trees(small_target: Callable[..., Target]) -> None:
    shapes = set()
    for seed in range(4):
        decoder = learned(small_target(), seed)
        for prompt in ([3, 4, 5, 6], [9, 2, 33], [50, 40, 30]):
            decoder.generate(prompt, mode="ltd", max_new_tokens=30)
            trees = [(r.depth, len(r.tokens)) for r in decoder.trace]
            shapes |= set(trees[:-DEPTH])  # the last ones have little room
            decoder.generate(prompt, mode="switchsd", neural_tree="learned", gate="always", max_new_tokens=30)
            assert [(r.depth, len(r.tokens)) for r in decoder.trace] == trees
    assert len(shapes) > 3 and all(nodes in SIZES and depth <= DEPTH for depth, nodes in shapes)


# -- arbitration ------------------------------------------------------------------------------------


@settings(max_examples=8, **RELAXED)
@given(data=st.data())
def test_a_threshold_of_one_is_exact(small_target, reference_model, data) -> None:  # type: ignore[no-untyped-def]
    prompts = prompts_of(data, data.draw(st.integers(1, 4)))
    n = data.draw(st.integers(1, 25))
    tree = data.draw(st.sampled_from(["fixed", "priced"]))
    decoder = learned(small_target(), arbitration=1.0, neural_tree=tree)
    truth = [greedy(reference_model("llama"), p, n) for p in prompts]
    for mode in ("cospec", "sd"):
        made = decoder.generate(prompts, mode=mode, max_new_tokens=n, batch=data.draw(st.integers(1, 4)))
        assert [g.tokens for g in made] == truth
    sampled: dict[str, Any] = {"max_new_tokens": n, "temperature": 0.9, "seed": 5}
    alone = decoder.generate(prompts, mode="ar", **sampled)
    assert [g.tokens for g in decoder.generate(prompts, mode="cospec", **sampled)] == [g.tokens for g in alone]


def test_a_low_threshold_keeps_the_drafts(small_target: Callable[..., Target]) -> None:
    """At 0 every drafted token stands: fewer forwards, another text."""
    decoder = learned(small_target(), neural_tree="fixed")
    prompts = [[3, 4, 5, 6], [9, 2, 33], [7] * 6]
    exact = decoder.generate(prompts, mode="sd", max_new_tokens=30)
    kept = decoder.generate(prompts, mode="cospec", arbitration=0.0, max_new_tokens=30)
    assert sum(g.steps for g in kept) < sum(g.steps for g in exact)
    assert [g.tokens for g in kept] != [g.tokens for g in exact]


def test_texts_do_not_depend_on_their_batch(small_target: Callable[..., Target]) -> None:
    decoder = learned(small_target(), neural_tree="fixed")
    prompts = [[3, 4, 5, 6], [9, 2, 33], [7] * 6, [1, 2], [50, 40, 30, 20]]
    alone = [decoder.generate(p, mode="cospec", max_new_tokens=30).tokens for p in prompts]
    assert len({tuple(t) for t in alone}) > 1
    for batch in (2, 5):
        made = decoder.generate(prompts, mode="cospec", max_new_tokens=30, batch=batch)
        assert [g.tokens for g in made] == alone


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "ltd", "acceptance": "rejection"}, r"acceptance=rejection is not for mode 'ltd'"),
        ({"mode": "cospec", "acceptance": "rejection"}, "acceptance=rejection is not for mode 'cospec'"),
        ({"neural": "draft", "neural_tree": "learned", "gate": "always"}, "neural=draft drafts chains"),
        ({"mode": "cospec", "arbitration": 1.5}, r"arbitration is 1.5; a threshold of a probability lies in \[0, 1\]"),
        ({"mode": "cospec", "neural_tree": "learned"}, "neural=draft drafts chains"),
    ],
)
def test_options_that_do_not_go_together(
    small_target: Callable[..., Target], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DecodingError, match=message):
        learned(small_target()).generate([1, 2, 3], max_new_tokens=3, **options)


@pytest.mark.parametrize(("mode", "kind"), [("ltd", "ltd"), ("cospec", "cospec")])
def test_without_a_policy_or_with_anothers(small_target: Callable[..., Target], mode: str, kind: str) -> None:
    decoder = learned(small_target())
    other = small_target("qwen3")
    foreign = {"ltd": tree_policy(other, None), "cospec": arbiter(other, None)}
    stranger = {
        "ltd": tree_policy(decoder.target, EagleDrafter(decoder.target, random_head(7), top_k=TOP_K, sites=SITES)),
        "cospec": arbiter(decoder.target, DraftModelDrafter(decoder.target, draft_of(decoder.target, 0.4))),
    }
    for policies, message in (
        ({}, rf"a policy of kind '{kind}' for .* is needed"),
        (foreign, r"was trained for another target"),
        (stranger, r"was trained with another drafter"),
        ({kind: foreign["cospec" if kind == "ltd" else "ltd"]}, rf"is of the kind .*, and {kind} is asked for"),
    ):
        decoder.policies = policies
        with pytest.raises(DecodingError, match=message):
            decoder.generate([1, 2, 3], mode=mode, max_new_tokens=3)


def test_a_learned_budget_that_does_not_fit_its_settings(small_target: Callable[..., Target]) -> None:
    artifact = tree_policy(small_target(), None)
    with pytest.raises(ValueError, match=r"takes .* features"):
        LearnedBudget.made(artifact.networks["size"], artifact.networks["size"], artifact.settings)
