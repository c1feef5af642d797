"""Drafters that fail and memory that ends: the text is the target's own all the same."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

from activations.cache import KVCache
from decoding.decoder import Decoder
from decoding.drafters import CopyDrafter
from decoding.scheduler import out_of_memory
from decoding.tree import DraftTree

PROMPTS = [[1, 5, 9, 5, 9, 5], [2, 7, 7], [30, 31, 32, 30, 31, 32, 30, 31]]
TOKENS = 24


def plain(target: Any) -> list[list[int]]:
    return [g.tokens for g in Decoder(target).generate(PROMPTS, mode="ar", max_new_tokens=TOKENS)]


class Broken(CopyDrafter):
    """Fails in one of its methods, from its n-th call on."""

    name = "eagle"

    def __init__(self, where: str, after: int) -> None:
        super().__init__()
        self.calls = itertools.count()
        if where == "sites":
            self.sites = ("resid_pre.99",)
            return
        method = getattr(self, where)

        def failing(*args: Any) -> Any:
            if next(self.calls) >= after:
                raise RuntimeError("the drafter is broken")
            return method(*args)

        setattr(self, where, failing)


@pytest.mark.parametrize("mode", ["eagle", "switchsd"])
@pytest.mark.parametrize(
    ("where", "after"),
    [("sites", 0), ("start", 0), ("start", 1), ("propose", 0), ("propose", 3), ("observe", 0), ("observe", 5)],
)
def test_a_drafter_that_raises(small_target, mode, where, after, caplog) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    decoder = Decoder(target, neural=Broken(where, after))
    with caplog.at_level(logging.WARNING, "switchsd"):
        found = decoder.generate(PROMPTS, mode=mode, gate="match", max_new_tokens=TOKENS)
    assert [g.tokens for g in found] == plain(target)
    [told] = [r.message for r in caplog.records]  # once, not at every step
    assert "eagle" in told and ("broken" in told or "resid_pre.99" in told)


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree([64], [-1], ["eagle"], [0.0]),
        DraftTree([-1], [-1], ["eagle"], [0.0]),
        DraftTree([1, 2], [-1, 1], ["eagle"] * 2, [0.0] * 2),
        DraftTree([1, 2], [1, -1], ["eagle"] * 2, [0.0] * 2),
        DraftTree([1], [-3], ["eagle"], [0.0]),
        DraftTree([1, 2], [-1], ["eagle"] * 2, [0.0] * 2),
    ],
)
def test_a_drafter_that_drafts_what_cannot_be(small_target, tree, caplog) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    drafter = CopyDrafter()
    drafter.name = "eagle"
    drafter.propose = lambda requests, budgets: [tree] * len(requests)  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "switchsd"):
        found = Decoder(target, neural=drafter).generate(PROMPTS, mode="eagle", max_new_tokens=TOKENS)
    assert [g.tokens for g in found] == plain(target)
    assert len(caplog.records) == 1


def test_a_copy_drafter_that_raises(small_target, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")

    def fail(*_: object) -> None:
        raise ValueError("no index")

    monkeypatch.setattr(CopyDrafter, "match", fail)
    found = Decoder(target).generate(PROMPTS, mode="copy", max_new_tokens=TOKENS)
    assert [g.tokens for g in found] == plain(target)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("mode", ["ar", "copy"])
@pytest.mark.parametrize("layer", [0, 3])
def test_memory_that_ends_while_growing(small_target, monkeypatch, mode, batch, layer, caplog) -> None:  # type: ignore[no-untyped-def]
    """Whoever needs too many slots ends with what it has; the others go on, and all that is written is right."""
    target = small_target("llama")
    wanted = plain(target)
    reserve = KVCache._reserve

    def scarce(cache: KVCache, at: int, slots: int) -> None:
        if slots > 24 and at == layer:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        reserve(cache, at, slots)

    monkeypatch.setattr(KVCache, "_reserve", scarce)
    found = Decoder(target).generate(PROMPTS, mode=mode, max_new_tokens=TOKENS, batch=batch, kappa=2)
    for one, whole, prompt in zip(found, wanted, PROMPTS, strict=True):
        assert one.tokens == whole[: len(one.tokens)]
        assert (one.cut == "out of memory") == (len(one.tokens) < len(whole))
        assert one.cut == "" or len(one.tokens) + len(prompt) >= 12  # a draft of 12 may not have found room
    assert any(one.cut for one in found)


def test_a_prompt_for_which_there_is_no_memory(small_target, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    wanted = plain(target)
    forward, tries = target.forward, []

    def prefill(tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if tokens.shape[1] == 8:
            tries.append(1)
            raise MemoryError
        return forward(tokens, *args, **options)

    monkeypatch.setattr(target, "forward", prefill)
    found = Decoder(target).generate(PROMPTS, mode="ar", max_new_tokens=TOKENS, batch=3)
    assert [g.tokens for g in found[:2]] == wanted[:2]
    assert found[2].tokens == [] and found[2].cut == "out of memory"
    assert 2 <= len(tries) <= 3  # again only when somebody has left


def test_what_counts_as_memory() -> None:
    assert out_of_memory(MemoryError()) and out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory(ValueError("allocate memory"))
