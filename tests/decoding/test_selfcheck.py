"""The self-check passes where trees are right and speaks up where they are not."""

from __future__ import annotations

import pytest
import torch

from activations.target import Target, TargetError
from decoding import selfcheck
from decoding.selfcheck import check_tree_forward, ensure_tree_forward


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("implementation", ["folded", "sdpa", "eager"])
def test_it_passes(family, implementation, small_target) -> None:  # type: ignore[no-untyped-def]
    check_tree_forward(small_target(family, implementation))


def test_a_boolean_mask_in_eager_attention_is_found(small_target, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(Target, "_shape", lambda self, mask, implementation: mask)
    with pytest.raises(TargetError, match=r"small-llama: the logits of a draft tree differ .*'eager'"):
        check_tree_forward(small_target("llama", "eager"))


def test_wrong_positions_are_found(small_target, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target = small_target("qwen3")
    forward = target.forward

    def by_slot(tokens, cache, ancestors=None, depths=None, **rest):  # type: ignore[no-untyped-def]
        slots = None if depths is None else torch.arange(tokens.shape[1])[None]
        return forward(tokens, cache, ancestors, slots, **rest)

    monkeypatch.setattr(target, "forward", by_slot)
    with pytest.raises(TargetError, match="differ"):
        check_tree_forward(target)


def test_it_runs_once_and_its_outcome_is_remembered(small_target, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SWITCHSD_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(selfcheck, "check_tree_forward", calls.append)
    made = small_target("llama")
    one = Target(made.model, made.tokenizer, "one", None)
    ensure_tree_forward(one)
    ensure_tree_forward(one)
    assert len(calls) == 1
    assert not list(tmp_path.rglob("checks/*")), "weights without a revision cannot be recognised again"
    known = one.fingerprint.__class__(**{**one.fingerprint.to_dict(), "revision": "abc"})
    for _ in range(2):
        two = Target(made.model, made.tokenizer, "two", None)
        two.__dict__["fingerprint"] = known
        ensure_tree_forward(two)
    assert len(calls) == 2
