"""Arbitration: both of its ways agree with a plain loop, and at threshold 1 it writes what the target writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import RELAXED, prompts_of
from test_draft_drafter import draft_of

from activations.sampling import Sampling
from activations.target import Target
from decoding.budgets import FixedBudget
from decoding.cospec.state import STATE, token_classes
from decoding.cospec.verifier import (
    AlwaysDraft,
    Arbiter,
    ArbitrationVerifier,
    Asked,
    PolicyArbiter,
    RandomArbiter,
    RatioArbiter,
    ScriptedArbiter,
)
from decoding.decoder import Decoder
from decoding.draft.drafter import DraftModelDrafter
from decoding.engine import Engine
from decoding.gates import Always, Choice, Never
from decoding.modes import Plan
from decoding.policies.policy import Policy, PolicyArtifact, PolicyError
from decoding.request import Request
from decoding.scheduler import SequentialScheduler
from decoding.tree import DraftTree
from decoding.verifier import Verifier

SAMPLINGS = [Sampling(), Sampling(0.9, seed=3), Sampling(1.1, 9, 0.9, seed=4)]
STOP = 63
"""Of the small targets."""


def policy_of(seed: int, bias: float = 0.0, features: int = len(STATE)) -> Policy:
    """A random one, whose wish to keep is moved by `bias`."""
    g = torch.Generator().manual_seed(seed)
    layers = [(torch.randn(6, features, generator=g), torch.zeros(6)), (torch.randn(2, 6, generator=g), torch.zeros(2))]
    layers[1][1][1] = bias
    return Policy(layers)


def arbiters(seed: int) -> list[Arbiter]:
    script = {i: [bool(i % 2), False, True] for i in range(9)}
    return [
        PolicyArbiter(policy_of(seed), 0.5), RandomArbiter(0.5, seed), AlwaysDraft(), RatioArbiter(0.3),
        ScriptedArbiter(script), ScriptedArbiter(script, RandomArbiter(0.7, seed)),
    ]  # fmt: skip


def write(
    target: Target, plan: Plan, prompts: Sequence[list[int]], rows: int, n: int, sampling: Sequence[Sampling]
) -> tuple[list[list[int]], Engine]:
    """The texts, each to its stop token or its limit."""
    requests = [Request(i, list(p), n, s) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]
    engine = Engine(target, plan, rows)

    def ended(commit: Any) -> bool:
        new = commit.request.generated
        return len(new) >= n or bool(target.stop_ids & set(new))

    list(SequentialScheduler(engine).run(requests, ended))
    engine.close()
    return [cut(target, r.generated, n) for r in requests], engine


def cut(target: Target, tokens: list[int], n: int) -> list[int]:
    stops = [i for i, token in enumerate(tokens[:n]) if token in target.stop_ids]
    return tokens[: stops[0] + 1 if stops else n]


def plan_of(target: Target, arbiter: Arbiter, depth: int, noise: float = 0.1, records: bool = False) -> Plan:
    drafter = DraftModelDrafter(target, draft_of(target, noise)).telling()
    gate = Always(Choice("draft", FixedBudget(depth, depth)))
    return Plan(gate, (drafter,), verifier=ArbitrationVerifier(target, arbiter, records))


# -- never to keep is to be exact ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@settings(max_examples=8, **RELAXED)
@given(data=st.data())
def test_at_threshold_1_it_writes_what_the_target_writes(family, small_target, data) -> None:  # type: ignore[no-untyped-def]
    target = small_target(family)
    prompts = prompts_of(data, data.draw(st.integers(1, 5)))
    n = data.draw(st.integers(1, 24))
    sampling = [data.draw(st.sampled_from(SAMPLINGS)) for _ in prompts]
    plan = plan_of(target, PolicyArbiter(policy_of(1, bias=9.0), 1.0), data.draw(st.integers(1, 6)))
    alone, _ = write(target, Plan(Never()), prompts, 1, n, sampling)
    for rows in (1, 3, 5):
        made, engine = write(target, plan, prompts, rows, n, sampling)
        assert made == alone
        assert not any(record.kept for record in engine.trace)
        assert not engine.plan.verifier._running  # type: ignore[attr-defined]


def test_a_lower_threshold_writes_something_else(small_target) -> None:  # type: ignore[no-untyped-def]
    """So that the test above is not one of an arbiter that nobody asks."""
    target = small_target("llama")
    prompts, sampling = [[3, 1, 4, 1, 5, 9, 2, 6]], [Sampling()]
    alone, _ = write(target, Plan(Never()), prompts, 1, 24, sampling)
    made, engine = write(target, plan_of(target, PolicyArbiter(policy_of(1, 90.0), 0.5), 6), prompts, 1, 24, sampling)
    assert made != alone
    assert sum(len(record.kept) for record in engine.trace) == sum(record.asked for record in engine.trace) > 0


@settings(max_examples=6, **RELAXED)
@given(data=st.data())
def test_no_choice_depends_on_the_batch(small_target, data) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    prompts = prompts_of(data, 5)
    sampling = [data.draw(st.sampled_from(SAMPLINGS)) for _ in prompts]
    arbiter = data.draw(st.sampled_from(arbiters(data.draw(st.integers(0, 99)))))
    plan = plan_of(target, arbiter, data.draw(st.integers(1, 6)))
    alone, _ = write(target, plan, prompts, 1, 20, sampling)
    for rows in (2, 5):
        assert write(target, plan, prompts, rows, 20, sampling)[0] == alone


def test_a_kept_request_is_gone_on_from(small_target) -> None:  # type: ignore[no-untyped-def]
    """The turns of a chat: the next prompt begins with the last one and its answer; or is the last one again."""
    target, sampling = small_target("llama"), Sampling()
    first = [3, 1, 4, 1, 5, 9, 2, 6]
    plan = plan_of(target, RandomArbiter(0.5, 3), 4)
    engine = Engine(target, plan, 1, keeps=True)

    def answer(prompt: list[int], number: int) -> list[int]:
        request = Request(number, prompt, 12, sampling)
        list(SequentialScheduler(engine).run([request], lambda c: len(c.request.generated) >= 12))
        return request.generated[:12]

    one = answer(first, 0)
    prompts = [first + one + [8, 8], first, first[:1]]
    made = [answer(prompt, 1) for prompt in prompts]
    engine.close()
    for prompt, text in zip(prompts, made, strict=True):
        request = Request(1, prompt, 12, sampling)
        fresh = Engine(target, plan, 1)
        list(SequentialScheduler(fresh).run([request], lambda c: len(c.request.generated) >= 12))
        fresh.close()
        assert text == request.generated[:12]
    assert engine.reused == 0  # of a single token


def test_where_everything_is_kept_the_text_is_the_drafts_but_for_what_ends_a_block(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    made, engine = write(target, plan_of(target, AlwaysDraft(), 5), [prompt], 1, 18, [Sampling()])
    text = list(prompt)
    for record in engine.trace:
        for token in [record.tokens[i] for i in record.accepted]:
            logits = draft_of(target, 0.1).model(torch.tensor([text])).logits[0, -1]
            assert token == int(logits.argmax())
            text.append(token)
        assert record.pending == int(target.model(torch.tensor([text])).logits[0, -1].argmax())
        text.append(record.pending)
    assert made[0] == text[len(prompt) :][:18]


# -- the two ways, and a plain loop -------------------------------------------------------------------


def case(
    data: st.DataObject, vocabulary: int = 64
) -> tuple[list[DraftTree], torch.Tensor, Callable[[], list[Request]]]:
    """Chains of likely tokens, stop tokens among them."""
    seed = data.draw(st.integers(0, 10**6))
    g, r = torch.Generator().manual_seed(seed), random.Random(seed)
    b = data.draw(st.integers(1, 4))
    logits = torch.randn(b, 8, vocabulary, generator=g) * 2
    likely = [0, 5, STOP]
    logits[:, :, likely] += 4
    trees, told = [], []
    for _ in range(b):
        n = r.randrange(7)
        q = torch.randn(n, vocabulary + 3, generator=g) * 2
        q[:, r.randrange(vocabulary)] = -torch.inf
        tree = DraftTree.chain(r.choices(likely, k=n), "draft")
        trees.append(DraftTree(tree.tokens, tree.parents, tree.source, tree.logq, q_logits=q))
        told.append(q)
    kind = data.draw(st.sampled_from(SAMPLINGS))

    def requests() -> list[Request]:
        return [Request(i, [1] * (i + 1), 60, kind, tokens=[1] * (i + 1) + [2, 20][: i % 3]) for i in range(b)]

    return trees, logits, requests


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_both_ways_walk_like_a_plain_loop(small_target, data) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    trees, logits, requests = case(data)
    arbiter = data.draw(st.sampled_from(arbiters(data.draw(st.integers(0, 99)))))
    found, stops = [], data.draw(st.booleans())
    for way in ("_accept_lazily", "_accept_at_once"):
        verifier, mine = ArbitrationVerifier(target, arbiter, stops, records=True), requests()
        seen: list[Any] = []
        for _ in range(2):  # the second block meets the rates of the first
            verdicts = getattr(verifier, way)(trees, logits, mine, lambda slots: slots.float() / 10)
            seen += verdicts
            for request, tree, verdict in zip(mine, trees, verdicts, strict=True):
                request.tokens += [*(tree.tokens[i] for i in verdict.path), verdict.pending]
        found.append((seen, [verifier.running(r) for r in mine]))
    (lazily, first), (at_once, second) = found
    assert lazily == at_once
    for a, b in zip(first, second, strict=True):
        assert (a.asked, a.kept, a.drafted, a.matched) == (b.asked, b.kept, b.drafted, b.matched)
        assert a.asked == len(a.decisions) and a.kept == sum(d.kept for d in a.decisions)
        for x, y in zip(a.decisions, b.decisions, strict=True):
            assert x[:4] == y[:4]
            assert torch.allclose(x.state, y.state, atol=1e-5)
    mine = requests()
    for request, tree, row, verdict, run in zip(mine, trees, logits, lazily, first, strict=False):
        kept, stopped, at = [], False, 0
        decisions = iter(run.decisions)
        while True:
            where = torch.tensor([len(request.tokens) + at])
            token = int(request.sampling.next_tokens(row[at][None], torch.tensor([request.number]), where))
            if at == len(tree):
                break
            draft = tree.tokens[at]
            if draft != token:
                if stopped or (draft == STOP and not stops):
                    break
                decision = next(decisions)
                assert decision[:3] == (token, draft, int(where))
                if not decision.kept:
                    break
                kept.append(at)
            stopped |= draft == STOP
            at += 1
        assert (verdict.path, verdict.pending, verdict.kept) == (list(range(at)), token, tuple(kept))
        assert verdict.intent == pytest.approx(at / 10)


def test_a_stop_of_the_draft_stands_only_where_that_is_allowed(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    logits = torch.zeros(1, 2, 64)
    logits[0, :, 7] = 5.0
    tree = DraftTree.chain([STOP], "draft")
    tree = DraftTree(tree.tokens, tree.parents, tree.source, tree.logq, q_logits=torch.zeros(1, 64))
    for way in ("_accept_lazily", "_accept_at_once"):
        verifier = ArbitrationVerifier(target, AlwaysDraft(), stops=False)
        [verdict] = getattr(verifier, way)([tree], logits, [Request(0, [1], tokens=[1])], None)
        assert (verdict.path, verdict.pending, verdict.asked, verdict.kept) == ([], 7, 0, ())
        verifier = ArbitrationVerifier(target, AlwaysDraft())
        [verdict] = getattr(verifier, way)([tree], logits, [Request(0, [1], tokens=[1])], None)
        assert (verdict.path, verdict.asked, verdict.kept) == ([0], 1, (0,))


def test_a_stop_of_the_target_may_be_overruled(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    logits = torch.zeros(1, 2, 64)
    logits[0, :, STOP] = 5.0
    tree = DraftTree.chain([7], "draft")
    tree = DraftTree(tree.tokens, tree.parents, tree.source, tree.logq, q_logits=torch.zeros(1, 64))
    [verdict] = ArbitrationVerifier(target, AlwaysDraft()).accept([tree], logits, [Request(0, [1], tokens=[1])])
    assert (verdict.path, verdict.pending, verdict.kept) == ([0], STOP, (0,))


# -- arbiters -------------------------------------------------------------------------------------------


class Refuses:
    """Looks at nothing but the states."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def decide(self, asked: Asked) -> torch.Tensor:
        self.seen.append(asked.states)
        return torch.zeros(len(asked), dtype=torch.bool)

    def describe(self) -> dict[str, Any]:
        return {}


def test_the_policy_is_asked_once_for_all_rows(small_target) -> None:  # type: ignore[no-untyped-def]
    target, arbiter = small_target("llama"), Refuses()
    logits = torch.zeros(3, 2, 64)
    logits[:, :, 7] = 5.0
    tree = DraftTree.chain([8], "draft")
    tree = DraftTree(tree.tokens, tree.parents, tree.source, tree.logq, q_logits=torch.zeros(1, 64))
    ArbitrationVerifier(target, arbiter).accept([tree] * 3, logits, [Request(i, [1], tokens=[1]) for i in range(3)])
    assert [s.shape for s in arbiter.seen] == [(3, len(STATE))]


def test_a_random_arbiter_keeps_its_rate_and_its_choices(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    requests = [Request(i, [1]) for i in range(4000)]
    positions = torch.arange(4000) % 50
    asked = Asked(requests, positions, torch.zeros(4000), lambda: 1 / 0, token_classes(target))  # type: ignore[arg-type]
    kept = RandomArbiter(0.3, 5).decide(asked)
    assert 0.27 < kept.float().mean() < 0.33
    assert kept.equal(RandomArbiter(0.3, 5).decide(asked))
    assert not kept.equal(RandomArbiter(0.3, 6).decide(asked))
    assert not RandomArbiter(0.0).decide(asked).any() and RandomArbiter(1.0).decide(asked).all()


def test_arbiters_tell_what_their_choices_depend_on() -> None:
    told = [str(a.describe()) for seed in (1, 2) for a in [*arbiters(seed), PolicyArbiter(policy_of(seed), 0.6)]]
    assert len(set(told)) == len(told) - 3  # always, ratio, and the script alone have no seed


def test_an_artifact_brings_its_rules(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    print_of, networks = target.fingerprint.to_dict(), {"arbitration": policy_of(0)}
    rules = {"state": list(STATE), "threshold": 0.7, "draft_tokens": 4, "stops": False}

    def made(**changes: Any) -> PolicyArtifact:
        return PolicyArtifact("cospec", print_of, None, networks, {**rules, **changes})

    verifier = ArbitrationVerifier.of(target, made())
    assert not verifier.stops and verifier.arbiter.describe()["threshold"] == 0.7
    assert ArbitrationVerifier.of(target, made(stops=True), 0.2).describe()["stops"]
    assert ArbitrationVerifier.of(target, made(), 0.2).arbiter.describe()["threshold"] == 0.2
    with pytest.raises(PolicyError, match="trained on other states"):
        ArbitrationVerifier.of(target, made(state=["x"]))
    with pytest.raises(PolicyError, match=r"threshold of the arbitration policy is 2; it must lie in \[0, 1\]"):
        ArbitrationVerifier.of(target, made(threshold=2))
    for wrong in ({"stops": 1}, {"stops": None}, {"draft_tokens": 0}, {"draft_tokens": "4"}):
        with pytest.raises(PolicyError, match="they must be true or false, and a count"):
            ArbitrationVerifier.of(target, made(**wrong))


def test_what_cannot_be_is_refused(small_target) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"threshold is 1.5; it must lie in \[0, 1\]"):
        PolicyArbiter(policy_of(0), 1.5)
    with pytest.raises(ValueError, match="rate is -1"):
        RandomArbiter(-1)
    with pytest.raises(ValueError, match="ratio is 0"):
        RatioArbiter(0)
    with pytest.raises(PolicyError, match=f"has {len(STATE)} inputs and 2 actions, and this one 3 and 2"):
        PolicyArbiter(policy_of(0, features=3))
    verifier = ArbitrationVerifier(small_target("llama"), PolicyArbiter(policy_of(0)))
    request = Request(0, [1], tokens=[1])
    with pytest.raises(ValueError, match="judges chains, and a draft branches"):
        verifier.accept([DraftTree([1, 2], [-1, -1], ["x"] * 2, [0.0] * 2)], torch.zeros(1, 3, 64), [request])
    with pytest.raises(ValueError, match=r"does not tell it \(q_logits\)"):
        verifier.accept([DraftTree.chain([1], "x")], torch.zeros(1, 2, 64), [request])
    assert not verifier.lossless and Verifier.lossless


def test_its_first_token_counts_as_one_of_a_step(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    for plan, prefilled in ((plan_of(target, AlwaysDraft(), 3), 0), (Plan(Never()), 1)):
        engine = Engine(target, plan, 1)
        events = Decoder(target).run([Request(0, [3, 1, 4, 1], 20)], engine)
        [done] = [event.done for event in events if event.done is not None]
        engine.close()
        written = sum(len(record.accepted) + 1 for record in engine.trace)
        assert 0 <= written - (len(done.tokens) - prefilled) < 4, "but for what the limit cut"
        assert done.tokens_per_step == (len(done.tokens) - prefilled) / len(engine.trace)
