"""A draft model that tells what it thinks: of every position, whatever the sampling, and without drafting otherwise."""

from __future__ import annotations

import pytest
import torch
from test_draft_drafter import SAMPLINGS, draft_of, requests_of

from activations.cache import KVCache
from activations.sampling import Sampling
from decoding.budgets import FixedBudget
from decoding.draft.drafter import DraftModelDrafter

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2]]


@pytest.mark.parametrize("frequent", [None, [1, 2, 3, 5, 7, 11, 13, 20, 30, 40, 50, 60]])
def test_trees_carry_the_models_logits(small_target, frequent) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    model = draft_of(target)
    plain = DraftModelDrafter(target, model, frequent=frequent)
    telling = plain.telling()
    budgets = [FixedBudget(n, n) for n in (5, 2, 4)]
    silent, told = (d.propose(requests_of(PROMPTS, SAMPLINGS), budgets) for d in (plain, telling))
    for request, one, other in zip(requests_of(PROMPTS, SAMPLINGS), silent, told, strict=True):
        assert one is not None and other is not None
        assert one.q_logits is None
        assert list(one.tokens) == list(other.tokens) and one.logq == other.logq  # draws stay keyed
        assert other.q_logits.shape == (len(other), target.vocab_size) and other.q_logits.dtype == torch.float32
        text = list(request.tokens)
        for token, logits in zip(other.tokens, other.q_logits, strict=True):
            whole = model.forward(torch.tensor([text]), KVCache(1), logits_to_keep=1)[0, 0].float()
            proposed = range(target.vocab_size) if frequent is None else frequent
            assert torch.allclose(logits[list(proposed)], whole[list(proposed)], atol=1e-3)
            assert logits.isfinite().sum() == len(list(proposed))
            text.append(token)


def test_a_telling_drafter_shares_the_model_and_nothing_else(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    plain = DraftModelDrafter(target, draft_of(target), frequent=range(30))
    telling = plain.telling()
    assert telling.model is plain.model and telling._outputs is plain._outputs
    [request] = requests_of(PROMPTS[:1], SAMPLINGS[:1])
    telling.propose([request], [FixedBudget(3, 3)])
    assert not plain._held and request in telling._held
    assert telling.describe() == plain.describe()
    assert not plain.tells and plain.drawing("own").telling().draw == "keyed"
    cut = telling.propose([request], [FixedBudget(3, 3)])[0].cut(2)  # type: ignore[union-attr]
    assert cut.q_logits.shape == (2, target.vocab_size)


def test_draws_of_its_own_tell_their_law_already(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    with pytest.raises(ValueError, match="tells its law anyway: leave out tells, or use draw=keyed"):
        DraftModelDrafter(target, draft_of(target), "own", tells=True)
    own = DraftModelDrafter(target, draft_of(target), "own")
    [greedy, sampled] = own.propose(requests_of(PROMPTS[:2], [Sampling(), Sampling(0.8)]), [FixedBudget(3, 3)] * 2)
    assert greedy is not None and sampled is not None
    assert greedy.q_logits is None and sampled.q_logits is not None
