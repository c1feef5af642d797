"""Small random targets of several architectures, in float32, with a tokenizer of one character a token."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from activations import attention
from activations.target import Target

# Two threads on matrices this small only wait for one another, and for whatever else the machine does.
torch.set_num_threads(1)

ALPHABET = "".join(chr(c) for c in range(ord("0"), ord("0") + 64))
WINDOW = 8
"""Sliding window of the small Gemma 3."""
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 63,
    "pad_token_id": None,
    "initializer_range": 0.12,  # repeats itself soon, so that copying is tried
}


@functools.cache
def _model(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**SHAPE))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    else:
        layers = ["sliding_attention", "full_attention"] * 2
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, layer_types=layers))
    model.generation_config.eos_token_id = SHAPE["eos_token_id"]
    return model.eval()


@functools.cache
def _target(family: str, implementation: str) -> Target:
    model = copy.deepcopy(_model(family))
    model.set_attn_implementation(implementation)
    vocabulary = {c: i for i, c in enumerate(ALPHABET)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.decoder = decoders.Fuse()
    target = Target(model, PreTrainedTokenizerFast(tokenizer_object=raw), f"small-{family}", None)
    target.speed_up()  # as `load_target` does
    return target


@pytest.fixture(scope="session")
def small_target() -> Callable[..., Target]:
    """small_target(family, attention="folded") -> Target; made once, so leave it as it is."""

    def make(family: str = "llama", implementation: str = attention.NAME) -> Target:
        return _target(family, implementation)

    return make


@pytest.fixture(scope="session")
def reference_model() -> Callable[[str], PreTrainedModel]:
    """The same weights as transformers runs them by itself."""
    return _model


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama: 8 blocks, width 64, 258 tokens (bytes and two marks), and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|im_start|>": 0, "<|im_end|>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=1, bos_token_id=None, pad_token_id=None,
        initializer_range=0.12,  # repeats itself soon, so that copying is tried
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
