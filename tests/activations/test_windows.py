"""Which blocks a sliding window is for."""

from __future__ import annotations

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from activations.attention import NAME
from activations.cache import KVCache
from activations.target import Target

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "sliding_window": 8, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.2,
}  # fmt: skip


def qwen3(first: int) -> PreTrainedModel:
    """Blocks from `first` on have the window."""
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8, use_sliding_window=True, max_window_layers=first))


@pytest.mark.parametrize(
    ("make", "window"),
    [
        (lambda: MistralForCausalLM(MistralConfig(**SMALL)), 8),
        (lambda: qwen3(0), 8),
        (lambda: qwen3(1), 8),
        (lambda: qwen3(2), None),
    ],
    ids=["all, by config", "all, by type", "some", "none"],
)
def test_logits_behind_the_window_are_the_model_s_own(make, window: int | None) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = make().eval()
    ids = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = model(ids).logits
    model.set_attn_implementation(NAME)
    target = Target(model, None, "small", None)  # type: ignore[arg-type]
    assert target.window == window
    cache = KVCache(1, capacity=32)
    parts = []
    for part in ids.split([12, 5, 1, 6], dim=1):
        parts.append(target.forward(part, cache))
        cache.commit([range(part.shape[1])])
    assert torch.allclose(torch.cat(parts, 1), own, atol=1e-5)
