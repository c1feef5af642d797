"""The law of what the modes sample, through the whole step loop."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from activations import attention
from activations.target import Target
from decoding.budgets import Budget
from decoding.decoder import Decoder
from decoding.modes import ModeSettings
from decoding.request import Request
from decoding.tree import DraftTree

N = 10_000
PROMPT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 7, 7, 0, 2, 3, 0, 4, 6, 2, 6, 4, 3, 3]


def target() -> Target:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, bos_token_id=None, eos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(attention.NAME)
    raw = Tokenizer(models.BPE(vocab={str(i): i for i in range(8)}, merges=[]))
    raw.decoder = decoders.Fuse()
    return Target(model, PreTrainedTokenizerFast(tokenizer_object=raw), "eight", None)


TARGET = target()


def joint() -> torch.Tensor:
    """Probabilities [512] of three tokens after the prompt, from whole forwards without a cache."""
    ids = torch.tensor([[*PROMPT, a, b] for a in range(8) for b in range(8)])
    with torch.no_grad():
        law = TARGET.model(ids, use_cache=False).logits.double().softmax(-1)
    n = len(PROMPT)
    first, second, third = law[:, n - 1], law[:, n], law[:, n + 1]
    a, b = ids[:, n], ids[:, n + 1]
    row = torch.arange(64)
    return (first[row, a] * second[row, b])[:, None].mul(third).flatten()


class Random:
    """Random trees of up to four nodes."""

    name = "eagle"
    sites = ()

    def __init__(self) -> None:
        self.random = random.Random(0)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def start(self, request: Request, features: torch.Tensor | None) -> None: ...

    def observe(self, request: Request, features: torch.Tensor | None) -> None: ...

    def close(self, request: Request) -> None: ...

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None: ...

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        n, draw = 4, self.random
        trees: list[DraftTree | None] = []
        for _ in requests:
            parents = [draw.randint(-1, i - 1) for i in range(n)]
            trees.append(DraftTree([draw.randrange(8) for _ in range(n)], parents, [self.name] * n, [0.0] * n))
        return trees


def sampled(mode: str) -> torch.Tensor:
    probe = SimpleNamespace(
        config=SimpleNamespace(sites=("resid_post.0",), threshold=0.5, kappa=5, to_dict=dict),
        score=lambda state: torch.sigmoid(state.sum(-1) * 5),
    )
    settings = ModeSettings(kappa=1, candidates=3, depth=3, copy_nodes=5, neural_nodes=4)
    decoder = Decoder(TARGET, probe=probe, neural=Random(), settings=settings)  # type: ignore[arg-type]
    out = decoder.generate([PROMPT] * N, mode=mode, max_new_tokens=4, temperature=1.0, seed=7, batch=256)
    if mode != "ar":
        assert sum(len(r.accepted) for r in decoder.trace) > N / 10, "hardly a draft was followed"
    found = torch.tensor([g.tokens[:3] for g in out])
    return torch.bincount(found[:, 0] * 64 + found[:, 1] * 8 + found[:, 2], minlength=512)


def p_value(counts: torch.Tensor) -> float:
    wanted = joint() * N
    rare = wanted < 5
    seen = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    return float(chisquare(seen.numpy(), (expected * N / expected.sum()).numpy()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ar", "copy", "eagle", "switchsd"])
def test_three_tokens_have_the_targets_joint_law(mode: str) -> None:
    assert p_value(sampled(mode)) > 1e-3
