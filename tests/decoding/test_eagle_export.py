"""Exported heads: what is written loads back as the same head, and what a format cannot hold is not written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_eagle_formats import (
    LLAMA3,
    PLAIN,
    VOCAB,
    Spec,
    check,
    modelopt,
    safeailab,
    specs,
    speculators,
    weights,
    write,
)

from activations.target import Target
from decoding.eagle.export import export_head
from decoding.eagle.formats import load_head
from decoding.eagle.head import HeadError


def rounded(w: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What bfloat16 files keep."""
    return {k: v.bfloat16().float() for k, v in w.items()}


def with_blocks(target: Target, blocks: int) -> Any:
    """A target of which only the number of blocks is another."""
    return SimpleNamespace(
        blocks=blocks, name="a/target", max_length=256, fingerprint=SimpleNamespace(architecture="LlamaForCausalLM")
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=specs(), seed=st.integers(0, 9))
def test_speculators_holds_every_eagle_3_head(
    small_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory, spec: Spec, seed: int
) -> None:
    target, folder = small_target(), tmp_path_factory.mktemp("heads")
    w = rounded(weights(spec, seed))
    before = load_head(write(folder / "given", speculators(spec, w)), VOCAB)
    export_head(before, folder / "made", "speculators", target)
    after = load_head(folder / "made", VOCAB)
    assert after.format == "speculators"
    assert before.config.biases == () or set(before.config.biases) < set(after.config.biases)
    same = replace(before.config, biases=after.config.biases)
    assert replace(after.config, rope_scaling=same.rope_scaling) == same
    check(target, folder / "made", spec, w)


def test_a_speculators_file_says_what_a_server_needs(small_target: Callable[..., Target], tmp_path: Path) -> None:
    spec = replace(PLAIN, layer_ids=(0, 2, 4), scaling=LLAMA3)
    head = load_head(write(tmp_path / "given", speculators(spec, rounded(weights(spec)))), VOCAB)
    export_head(head, tmp_path / "made", "speculators", small_target(), verifier="org/model", steps=3, more="kept")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/model", "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4] and config["more"] == "kept"
    assert config["transformer_layer_config"]["rope_parameters"]["rope_type"] == "llama3"
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].shape == (VOCAB,)
    assert torch.equal(tensors["d2t"] + torch.arange(len(tensors["d2t"])), tensors["t2d"].nonzero().flatten())
    assert "layers.0.hidden_norm.weight" in tensors and not any("midlayer" in name for name in tensors)


@pytest.mark.parametrize(
    "spec",
    [
        replace(PLAIN, scaling={"rope_type": "linear", "factor": 2.0}, own_embedding=True),
        Spec(eagle=1, features=0, own_head=False),
    ],
)
def test_safeailab_holds_plain_heads(small_target: Callable[..., Target], tmp_path: Path, spec: Spec) -> None:
    w = rounded(weights(spec))
    head = load_head(write(tmp_path / "given", safeailab(spec, w)), VOCAB)
    export_head(head, tmp_path / "made", "safeailab", with_blocks(small_target(), 8))
    after = load_head(tmp_path / "made", VOCAB)
    assert (after.format, after.config) == ("safeailab", head.config)
    check(small_target(), tmp_path / "made", spec, w)


@pytest.mark.parametrize(
    ("spec", "form", "message"),
    [
        (replace(PLAIN, norm_before_residual=True), "safeailab", "norm_before_residual.*speculators can"),
        (replace(PLAIN, layer_ids=(1, 2, 3)), "safeailab", r"layers \[1, 2, 3\] and not the usual \[2, 4, 5\]"),
        (replace(PLAIN, scaling=LLAMA3), "safeailab", "of type llama3"),
        (replace(PLAIN, layers=2), "safeailab", "has 2 blocks"),
        (replace(PLAIN, window=4), "safeailab", "a window"),
        (Spec(eagle=1, features=0, own_head=False), "speculators", "is an EAGLE-1 or -2 head"),
        (Spec(features=0), "speculators", "last state only"),
        (replace(PLAIN, own_head=False), "speculators", "no output matrix"),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold_is_not_written(
    small_target: Callable[..., Target], tmp_path: Path, spec: Spec, form: Any, message: str
) -> None:
    make = safeailab if spec.eagle == 1 else modelopt if not (spec.features and spec.own_head) else speculators
    head = load_head(write(tmp_path / "given", make(spec, weights(spec))), VOCAB)
    with pytest.raises(HeadError, match=message):
        export_head(head, tmp_path / "made", form, with_blocks(small_target(), 8))
    assert not (tmp_path / "made").exists()
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "x").touch()
    with pytest.raises(HeadError, match="is not empty"):
        export_head(head, tmp_path / "made", form, small_target())
