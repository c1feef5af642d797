"""Loading targets of several families from a folder, spread over devices, or quantized."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family_model, family_target
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from activations import target as module
from activations.cache import KVCache
from activations.target import TargetError, load_target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer only."""
    vocabulary = {chr(ord("0") + i): i for i in range(97)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, []))).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("gpt2", "folded"), ("gemma2", "eager"), ("falcon new", "sdpa"), ("mixtral", "folded"), ("deepseek-v3", "folded")],
)
def test_a_folder_of_any_family_is_loaded_with_an_attention_that_it_takes(
    family: str, implementation: str, folder: Path
) -> None:
    family_model(family).save_pretrained(folder)
    made = load_target(folder, dtype="float32", device="cpu")
    assert made.model.config._attn_implementation == implementation
    made.check_structure()
    ids = torch.arange(9)[None]
    assert torch.equal(made.forward(ids, KVCache(1)), family_target(family).forward(ids, KVCache(1)))


def test_an_attention_that_was_named_stays(folder: Path) -> None:
    family_model("llama").save_pretrained(folder)
    assert load_target(folder, attention="eager", device="cpu").model.config._attn_implementation == "eager"


def test_a_target_spread_by_a_device_map_gives_the_same_states(folder: Path) -> None:
    family_model("llama").save_pretrained(folder)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    spread, whole = load_target(folder, device_map=places), load_target(folder, device="cpu")
    assert {p.device.type for p in spread.model.parameters()} == {"cpu", "meta"}
    spread.check_structure()
    ids, sites = torch.arange(9)[None], ["attn_out.*", "resid_mid.*", "resid_post.*"]
    with spread.read(sites) as one, whole.read(sites) as other:
        assert torch.equal(spread.forward(ids, KVCache(1)), whole.forward(ids, KVCache(1)))
    for site, state in one.states.items():
        assert torch.equal(state, other.states[site])


def test_a_device_and_a_device_map_exclude_each_other(folder: Path) -> None:
    with pytest.raises(TargetError, match="device 'cpu' and device_map 'auto' were both given"):
        load_target(folder, device="cpu", device_map="auto")


def test_quantization_is_checked_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="unknown quantization 'int3': use bnb-4bit, bnb-8bit, torchao-int8"):
        load_target(folder, quantization="int3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, library in (("bnb-4bit", "bitsandbytes"), ("torchao-int8", "torchao")):
        with pytest.raises(TargetError, match=f"'{name}' needs {library}, which is not installed: pip install"):
            load_target(folder, quantization=name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bnb-4bit", {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_compute_dtype": torch.bfloat16}),
        ("bnb-8bit", {"load_in_4bit": False, "load_in_8bit": True}),
    ],
)
def test_quantization_reaches_the_loader(
    name: str, expected: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is not needed for this: the loader is watched, and loads as usual."""
    family_model("llama").save_pretrained(folder)
    given: dict[str, Any] = {}
    load = module.AutoModelForCausalLM.from_pretrained

    def watched(source: str, quantization_config: Any, device_map: Any, **rest: Any) -> Any:
        given.update({key: getattr(quantization_config, key) for key in expected}, device_map=device_map)
        return load(source, **rest)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module.AutoModelForCausalLM, "from_pretrained", watched)
    made = load_target(folder, quantization=name, device="cpu")
    assert given == {**expected, "device_map": {"": "cpu"}}
    plain = type(made)(made.model, made.tokenizer, made.name, made.folder)
    assert made.fingerprint.revision == f"{plain.fingerprint.revision}+{name}", "quantized states are other states"
