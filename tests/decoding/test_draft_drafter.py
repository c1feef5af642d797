"""The draft-model drafter: what it drafts, and what it does not compute twice."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from activations.cache import KVCache
from activations.sampling import Sampling
from activations.target import Target
from decoding.budgets import FixedBudget, PricedBudget
from decoding.draft.drafter import DraftModelDrafter
from decoding.request import Request
from decoding.tree import DraftTree

FAMILIES = ["llama", "qwen3", "gemma3"]
SAMPLINGS = [Sampling(), Sampling(0.9, seed=3), Sampling(1.1, 9, 0.9, seed=4)]


@functools.cache
def draft_of(target: Target, noise: float = 0.03) -> Target:
    """A draft model that often agrees with the target: its weights, disturbed."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    made = Target(model, target.tokenizer, f"{target.name} disturbed", None)
    made.speed_up()
    return made


class Counted:
    """A draft model that counts its forwards and the tokens that they read."""

    def __init__(self, model: Target) -> None:
        self.model, self.calls = model, []  # type: ignore[var-annotated]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def hidden(self, tokens: torch.Tensor, cache: KVCache, *more: Any) -> torch.Tensor:
        self.calls.append(tuple(tokens.shape))
        return self.model.hidden(tokens, cache, *more)


def reference(model: Target, request: Request, n: int, stream: str = "") -> list[tuple[int, float]]:
    """What a loop over whole forwards of the text drafts, with log-probabilities."""
    text, out = list(request.tokens), []
    for _ in range(n):
        logits = model.forward(torch.tensor([text]), KVCache(1), logits_to_keep=1)[:, 0]
        where = torch.tensor([request.key]), torch.tensor([len(text)])
        token = int(request.sampling.next_tokens(logits, *where, stream))
        out.append((token, float(request.sampling.process(logits).log_softmax(-1)[0, token])))
        text.append(token)
    return out


def same(tree: DraftTree | None, wanted: Sequence[tuple[int, float]]) -> None:
    assert tree is not None
    assert list(tree.tokens) == [token for token, _ in wanted]
    assert list(tree.parents) == list(range(-1, len(wanted) - 1))
    assert set(tree.source) == {"draft"}
    assert tree.logq == pytest.approx([logq for _, logq in wanted], abs=2e-3)


def requests_of(prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[Request]:
    made = [Request(i, list(p), 60, s, tokens=list(p)) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))]
    for request in made:
        request.tokens.append(5)
    return made


tokens = st.lists(st.integers(0, 62), min_size=1, max_size=40)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_chains_are_those_of_whole_forwards(small_target: Callable[..., Target], family: str, data: Any) -> None:
    """Requests that grow unevenly, some asked and some not, by tokens that were drafted or others."""
    target = small_target(family)
    model = draft_of(target)
    count = data.draw(st.integers(1, 4))
    own = data.draw(st.booleans())
    drafter = DraftModelDrafter(target, model, "own" if own else "keyed")  # type: ignore[arg-type]
    requests = requests_of(
        [data.draw(tokens) for _ in range(count)], [data.draw(st.sampled_from(SAMPLINGS)) for _ in range(count)]
    )
    for request in requests:
        drafter.start(request, None)
    for _ in range(data.draw(st.integers(1, 4))):
        asked = [r for r in requests if data.draw(st.booleans())] or requests[:1]
        depths = [data.draw(st.integers(1, 5)) for _ in asked]
        trees = drafter.propose(asked, [FixedBudget(9, depth) for depth in depths])
        drafts = {r: list(t.tokens) for r, t in zip(asked, trees, strict=True) if t is not None}
        for request, depth, tree in zip(asked, depths, trees, strict=True):
            wanted = reference(model, request, depth, "draft" if own else "")
            same(tree, wanted)
            assert tree is not None and (tree.q_logits is not None) == (own and not request.sampling.greedy)
            if tree.q_logits is not None:
                told = tree.q_logits.log_softmax(-1)[range(depth), list(tree.tokens)]
                assert told.tolist() == pytest.approx([logq for _, logq in wanted], abs=2e-3)
        for request in requests:
            drafted = drafts.get(request, [])
            request.tokens += drafted[: data.draw(st.integers(0, len(drafted)))]
            request.tokens += data.draw(st.lists(st.integers(0, 62), min_size=1, max_size=25))
            drafter.observe(request, None)
        if len(requests) > 1 and data.draw(st.booleans()):
            drafter.close(requests.pop(data.draw(st.integers(0, len(requests) - 1))))
    for request in requests:
        drafter.close(request)
        drafter.close(request)
    assert not drafter._held and not drafter._rows.requests


def test_only_what_is_missing_is_fed(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    model: Any = Counted(draft_of(target))
    drafter = DraftModelDrafter(target, model)
    [request] = requests_of([[1, 2, 3, 4]], [Sampling()])
    budget = FixedBudget(4, 4)

    def propose() -> list[int]:
        model.calls.clear()
        [tree] = drafter.propose([request], [budget])
        assert tree is not None
        return list(tree.tokens)

    drafted = propose()
    assert model.calls == [(1, 5), (1, 1), (1, 1), (1, 1)]  # the prompt and the pending token, then one by one
    request.tokens += [*drafted, 7]  # all were followed
    drafted = propose()
    assert model.calls[0] == (1, 2)  # the last draft, which nobody has read, and the pending token
    request.tokens += [*drafted[:2], (drafted[2] + 1) % 60]
    propose()
    assert model.calls[0] == (1, 1)
    request.tokens += [9, 8, 7]  # three tokens that another drafter brought
    propose()
    assert model.calls == [(1, 3), (1, 1), (1, 1), (1, 1)]


def test_requests_share_their_forwards(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    model: Any = Counted(draft_of(target))
    drafter = DraftModelDrafter(target, model)
    requests = requests_of([[1] * 3, [2] * 40, [3] * 5], [Sampling()] * 3)
    drafter.propose(requests, [FixedBudget(4, d) for d in (1, 4, 2)])
    # a long prompt alone, then all together; who needs fewer tokens is fed for nothing
    assert model.calls == [(1, 40), (3, 6), (3, 1), (3, 1), (3, 1)]
    model.calls.clear()
    drafter.propose(requests[:1], [FixedBudget(4, 1)])
    assert model.calls == [(1, 1)]


def test_a_budget_ends_a_chain(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    drafter = DraftModelDrafter(target, draft_of(target))
    for sampling in SAMPLINGS:
        [request] = requests_of([[1, 2, 3, 4]], [sampling])
        [whole] = drafter.propose([request], [FixedBudget(6, 6)])
        peaks = []  # log-probabilities of the first choices
        for i in range(6):
            text = torch.tensor([[*request.tokens, *whole.tokens[:i]]])  # type: ignore[union-attr]
            logits = drafter.model.forward(text, KVCache(1), logits_to_keep=1)[0, 0]
            peaks.append(float(sampling.process(logits).log_softmax(-1).max()))
        for level in (0.02, 0.1, 0.3):
            [tree] = drafter.propose([request], [PricedBudget(6, 6, 0.0, level)])
            wanted = next((i for i in range(1, 6) if 0.5 * torch.tensor(peaks[:i]).sum().exp() <= level), 6)
            assert tree is not None and len(tree) == wanted
            assert list(tree.tokens) == list(whole.tokens[:wanted])  # type: ignore[union-attr]
        node = float(torch.tensor(peaks[:3]).sum().exp()) * 0.999
        [tree] = drafter.propose([request], [PricedBudget(6, 6, node, 0.0)])
        assert tree is not None and len(tree) == 3 + sum(p > -1e-3 for p in peaks[3:4])


def test_no_deeper_than_there_is_room(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    drafter = DraftModelDrafter(target, draft_of(target))
    requests = requests_of([[1, 2]] * 3, [Sampling()] * 3)
    requests[0].max_new_tokens, requests[1].max_new_tokens = 4, 2  # one of each is there
    trees = drafter.propose(requests, [FixedBudget(5, 5)] * 2 + [FixedBudget(3, 5)])
    assert [0 if t is None else len(t) for t in trees] == [2, 0, 3]


def test_longer_than_the_draft_model_takes(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    model = copy.copy(draft_of(target))
    model.config = copy.deepcopy(model.config)
    model.config.max_position_embeddings = 8
    drafter = DraftModelDrafter(target, model)
    requests = requests_of([[1] * n for n in (4, 6, 7, 8, 30)], [Sampling()] * 5)
    trees = drafter.propose(requests, [FixedBudget(5, 5)] * 5)
    # the pending token stands at position n, and the last drafted one is not fed
    assert [0 if t is None else len(t) for t in trees] == [4, 2, 1, 0, 0]


@pytest.mark.parametrize("kept", [0, 3, 5, 7, 8])
def test_a_turn_goes_on_from_the_latest(small_target: Callable[..., Target], kept: int) -> None:
    target = small_target("llama")
    model: Any = Counted(draft_of(target))
    drafter = DraftModelDrafter(target, model)
    [before, other] = requests_of([[1, 2, 3, 4, 5], [9, 9]], [Sampling()] * 2)
    trees = drafter.propose([before, other], [FixedBudget(4, 4)] * 2)
    before.tokens += [*trees[0].tokens[:2], 7]  # type: ignore[union-attr]
    prompt = [*before.tokens[: kept + 1], 30, 31]
    request = Request(0, prompt, 60, tokens=[*prompt, 32])
    drafter.resume(request, None, before, kept)
    drafter.close(before)
    model.calls.clear()
    [tree] = drafter.propose([request], [FixedBudget(3, 3)])
    same(tree, reference(model.model, request, 3))
    [length] = [n for _, n in model.calls[:1]]
    assert length <= 4 + (kept == 8)  # the new tokens; the pending one of the latest turn has not been read
    again = drafter.propose([other], [FixedBudget(3, 3)])
    same(again[0], reference(model.model, other, 3))
    fresh = Request(5, [1], tokens=[1, 2])
    drafter.resume(fresh, None, Request(6, [1], tokens=[1, 2]), 1)  # one that never was asked about
    same(drafter.propose([fresh], [FixedBudget(2, 2)])[0], reference(model.model, fresh, 2))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_resampled_rows_go_on_from_their_ancestors(small_target: Callable[..., Target], data: Any) -> None:
    target = small_target("llama")
    model = draft_of(target)
    drafter = DraftModelDrafter(target, model, "own")
    rows = requests_of([[1, 2, 3, 4]] * 4, [Sampling(1.0, seed=2)] * 4)
    for i, row in enumerate(rows):
        row.particle = i
    bystander = requests_of([[7, 7, 8]], [Sampling()])[0]
    drafter.propose([bystander, *rows], [FixedBudget(3, 3)] * 5)
    for _ in range(2):
        asked = [r for r in rows if data.draw(st.booleans())]
        trees = dict(zip(asked, drafter.propose(asked, [FixedBudget(3, 3)] * len(asked)), strict=True))
        common = min(len(r.tokens) for r in rows)
        for row in rows:
            tree = trees.get(row)
            row.tokens += [
                *(tree.tokens[: data.draw(st.integers(0, 3))] if tree else ()),
                data.draw(st.integers(0, 62)),
            ]
        ancestors = [data.draw(st.integers(0, 3)) for _ in rows]
        same_until = next(
            (i for i in range(common) if len({r.tokens[i] for r in rows}) > 1), common
        )  # what all have in common
        drafter.select(rows, ancestors, same_until)
        texts = [list(rows[a].tokens) for a in ancestors]
        for row, text in zip(rows, texts, strict=True):
            row.tokens = text
        for row, tree in zip(rows, drafter.propose(rows, [FixedBudget(2, 2)] * 4), strict=True):
            same(tree, reference(model, row, 2, "draft"))
    same(drafter.propose([bystander], [FixedBudget(2, 2)])[0], reference(model, bystander, 2))


def test_a_row_that_lags_behind_what_all_have_in_common(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    model = draft_of(target)
    drafter = DraftModelDrafter(target, model)
    rows = requests_of([[1, 2, 3, 4]] * 3, [Sampling()] * 3)
    drafter.propose(rows[:2], [FixedBudget(2, 2)] * 2)
    for row in rows:
        row.tokens += [8, 9, 10, 11, 12]
    drafter.propose(rows[:1], [FixedBudget(2, 2)])
    drafter.select(rows, [0, 0, 1], 9)
    for row, tree in zip(rows, drafter.propose(rows, [FixedBudget(2, 2)] * 3), strict=True):
        same(tree, reference(model, row, 2))


def test_a_failure_leaves_rows_that_can_be_used(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    model: Any = Counted(draft_of(target))
    drafter = DraftModelDrafter(target, model)
    requests = requests_of([[1, 2, 3], [4, 5, 6, 7]], [Sampling()] * 2)
    drafter.propose(requests, [FixedBudget(4, 4)] * 2)
    for request in requests:
        request.tokens += [8, 9]
    hidden = model.model.hidden
    calls = iter(range(9))

    def failing(*arguments: Any) -> torch.Tensor:
        if next(calls) == 2:
            raise MemoryError
        found: torch.Tensor = hidden(*arguments)
        return found

    model.hidden = failing
    with pytest.raises(MemoryError):
        drafter.propose(requests, [FixedBudget(4, 4)] * 2)
    del model.hidden
    for request, tree in zip(requests, drafter.propose(requests, [FixedBudget(4, 4)] * 2), strict=True):
        same(tree, reference(model.model, request, 4))


def test_values_that_are_not_finite(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    model: Any = Counted(draft_of(target))
    model.logits = lambda hidden: torch.full((len(hidden), 64), torch.nan)
    [request] = requests_of([[1, 2, 3]], [Sampling()])
    with pytest.raises(ValueError, match="not finite"):
        DraftModelDrafter(target, model).propose([request], [FixedBudget(4, 4)])


def test_described_by_its_weights(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    one, other = (DraftModelDrafter(target, draft_of(target, noise)) for noise in (0.03, 0.04))
    assert one.describe() == {
        "name": "draft", "blocks": 4, "width": 32, "outputs": 64, "weights": one.describe()["weights"], "draw": "keyed",
    }  # fmt: skip
    assert one.describe() == DraftModelDrafter(target, draft_of(target, 0.03)).describe()
    assert one.describe()["weights"] != other.describe()["weights"]
    own = one.drawing("own")
    assert own.describe() == {**one.describe(), "draw": "own"} and own.model is one.model
    assert one.drawing("keyed") is one


def test_known_again_in_another_precision(small_target: Callable[..., Target]) -> None:
    """A policy or a log that was made in bfloat16 is good for the same draft in float32."""
    target = small_target("llama")
    rounded = draft_of(target)
    rounded.layers.bfloat16().float()  # as from a file
    other = copy.deepcopy(rounded)
    other.layers.bfloat16()
    assert DraftModelDrafter(target, rounded).describe() == DraftModelDrafter(target, other).describe()


def test_what_cannot_draft(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    model: Any = Counted(draft_of(target))
    model.vocab_size = 32
    with pytest.raises(ValueError, match="has 32 tokens and small-llama 64"):
        DraftModelDrafter(target, model)
    with pytest.raises(ValueError, match="unknown draw 'free'"):
        DraftModelDrafter(target, draft_of(target), "free")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_only_frequent_tokens_are_proposed(small_target: Callable[..., Target], family: str) -> None:
    """Their logits are the model's; a draw of its own is from the whole law."""
    target = small_target(family)
    model, frequent = draft_of(target), list(range(0, 64, 3))
    prompts = [[1, 2, 3], [9, 8, 7, 6]]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        requests = requests_of(prompts, [sampling] * 2)
        drafter = DraftModelDrafter(target, model, frequent=frequent)
        for request in requests:
            drafter.start(request, None)
        trees = drafter.propose(requests, [FixedBudget(4, 4)] * 2)
        for request, tree in zip(requests, trees, strict=True):
            assert tree is not None
            text = list(request.tokens)
            for token in tree.tokens:
                logits = model.model(torch.tensor([text])).logits[:, -1].detach()
                rare = [t for t in range(64) if t not in frequent]
                logits[:, rare] = -torch.inf
                where = torch.tensor([request.key]), torch.tensor([len(text)])
                assert token == int(sampling.next_tokens(logits, *where))
                text.append(token)
        whole = [d.propose(requests, [FixedBudget(4, 4)] * 2) for d in (
            drafter.drawing("own"), DraftModelDrafter(target, model, "own"))]  # fmt: skip
        assert [t.tokens for t in whole[0] if t] == [t.tokens for t in whole[1] if t]


@pytest.mark.parametrize("frequent", [[], [-1], [64]])
def test_frequent_tokens_that_are_none(small_target: Callable[..., Target], frequent: list[int]) -> None:
    target = small_target("llama")
    with pytest.raises(ValueError, match="must be some of 0 to 63"):
        DraftModelDrafter(target, draft_of(target), frequent=frequent)
