"""Checkpoints of every published format, built by hand, against one slow reference that knows no format.

The reference works on tensors under plain names, row by row; a format is what those names and settings look like in
a file.
"""

from __future__ import annotations

import gc
import json
import math
import tempfile
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from activations.target import Target
from decoding.budgets import FixedBudget
from decoding.decoder import Decoder
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.formats import load_head
from decoding.eagle.head import HeadError, HeadWarning
from decoding.request import Request

WIDTH, VOCAB, HEADS, EPS = 32, 64, 4, 1e-5
DRAFT_TOKENS = torch.arange(1, 64, 2)


@dataclass(frozen=True)
class Spec:
    """A head, whatever its files look like."""

    eagle: int = 3
    features: int = 3
    layer_ids: tuple[int, ...] = ()
    layers: int = 1
    keys: int = 2
    dim: int = 8
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    bias: bool = False
    own_head: bool = True
    own_embedding: bool = False
    theta: float = 10000.0
    scaling: dict[str, Any] = field(default_factory=dict)
    window: int = 0

    @property
    def sites(self) -> tuple[str, ...]:
        names = {k: f"resid_pre.{k}" for k in range(4)} | {4: "resid_post.3"}
        if not self.features:
            return ("resid_post.3",)
        return tuple(names[k] for k in self.layer_ids or (1, 2, 3))


def weights(spec: Spec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors; block k is `k.`."""
    g = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * 0.3

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=g)

    w: dict[str, torch.Tensor] = {}
    if spec.eagle == 1:
        w["fc.weight"] = matrix(WIDTH, 2 * WIDTH)
        if spec.bias:
            w["fc.bias"] = matrix(WIDTH)
    elif spec.features:
        w["fc.weight"] = matrix(WIDTH, spec.features * WIDTH)
    if spec.norm_before_fc:
        w["input_norm.weight"] = norm(spec.features * WIDTH)
    if spec.fc_norm:
        w |= {f"fc_norm.{i}.weight": norm(WIDTH) for i in range(spec.features)}
    for k in range(spec.layers):
        entering = 2 * WIDTH if k == 0 and spec.eagle == 3 else WIDTH
        if k == 0 and spec.eagle == 3:
            w["0.hidden_norm.weight"] = norm(WIDTH)
        if k or spec.eagle == 3:
            w[f"{k}.input_layernorm.weight"] = norm(WIDTH)
        for name, heads in (("q", HEADS), ("k", spec.keys), ("v", spec.keys)):
            w[f"{k}.self_attn.{name}_proj.weight"] = matrix(heads * spec.dim, entering)
            if spec.bias:
                w[f"{k}.self_attn.{name}_proj.bias"] = matrix(heads * spec.dim)
        w[f"{k}.self_attn.o_proj.weight"] = matrix(WIDTH, HEADS * spec.dim)
        if spec.qk_norm:
            w |= {f"{k}.self_attn.{n}_norm.weight": norm(spec.dim) for n in "qk"}
        w[f"{k}.post_attention_layernorm.weight"] = norm(WIDTH)
        for name, shape in (("gate", (48, WIDTH)), ("up", (48, WIDTH)), ("down", (WIDTH, 48))):
            w[f"{k}.mlp.{name}_proj.weight"] = matrix(*shape)
    if spec.eagle == 3:
        w["norm.weight"] = norm(WIDTH)
    if spec.own_head:
        w["lm_head.weight"] = matrix(len(DRAFT_TOKENS), WIDTH)
    if spec.own_embedding:
        w["embed_tokens.weight"] = matrix(VOCAB, WIDTH)
    return w


# -- the reference ----------------------------------------------------------------------------------


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: torch.Tensor, position: int, spec: Spec) -> torch.Tensor:
    """x [heads, D]."""
    out = torch.empty_like(x)
    half = spec.dim // 2
    for i in range(half):
        angle = position * angle_of(i, spec)
        c, s = math.cos(angle), math.sin(angle)
        out[:, i] = x[:, i] * c - x[:, i + half] * s
        out[:, i + half] = x[:, i + half] * c + x[:, i] * s
    return out


def angle_of(i: int, spec: Spec) -> float:
    angle = float(spec.theta ** (-2 * i / spec.dim))
    if not spec.scaling:
        return angle
    factor = spec.scaling["factor"]
    if spec.scaling["rope_type"] == "linear":
        return angle / factor
    low, high = spec.scaling["low_freq_factor"], spec.scaling["high_freq_factor"]  # Llama 3's rule
    turns = spec.scaling["original_max_position_embeddings"] * angle / (2 * math.pi)
    if turns < low:
        return angle / factor
    if turns > high:
        return angle
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * angle / factor + smooth * angle


def reference(
    w: dict[str, torch.Tensor], spec: Spec, target: Target, states: torch.Tensor, tokens: list[int], chain: list[int]
) -> torch.Tensor:
    """Log-probabilities over what the head drafts, after the verified rows and a drafted chain."""
    ids = [*tokens[1:], *chain]
    embedding = w.get("embed_tokens.weight", target.embed.weight)
    caches: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(spec.layers)]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        out = w[f"{name}.weight"] @ x
        return out + w[f"{name}.bias"] if f"{name}.bias" in w else out

    carried = output = torch.empty(0)
    for i, token in enumerate(ids):
        e = embedding[token]
        if i >= len(states):
            feature = carried
        elif not spec.features:
            feature = target.backbone.norm(states[i])
        else:
            feature = states[i]
            if spec.norm_before_fc:
                feature = rms(feature, w["input_norm.weight"])
            if spec.fc_norm:
                parts = [feature[j * WIDTH : (j + 1) * WIDTH] for j in range(spec.features)]
                feature = torch.cat([rms(p, w[f"fc_norm.{j}.weight"]) for j, p in enumerate(parts)])
            feature = linear(feature, "fc")
        if spec.eagle == 1:
            x = residual = linear(torch.cat([e, feature]), "fc")
        else:
            normed = rms(feature, w["0.hidden_norm.weight"])
            x = torch.cat([rms(e, w["0.input_layernorm.weight"]), normed])
            residual = normed if spec.norm_before_residual else feature
        for k in range(spec.layers):
            if k:
                x = rms(residual, w[f"{k}.input_layernorm.weight"])
            q, key, value = (linear(x, f"{k}.self_attn.{n}_proj").view(-1, spec.dim) for n in "qkv")
            if spec.qk_norm:
                q, key = rms(q, w[f"{k}.self_attn.q_norm.weight"]), rms(key, w[f"{k}.self_attn.k_norm.weight"])
            caches[k].append((turned(key, i, spec), value))
            q = turned(q, i, spec)
            seen = caches[k][-spec.window :] if spec.window else caches[k]
            all_keys, all_values = torch.stack([kk for kk, _ in seen]), torch.stack([v for _, v in seen])
            attended = []
            for head in range(HEADS):
                group = head // (HEADS // spec.keys)
                weight = (all_keys[:, group] @ q[head] / math.sqrt(spec.dim)).softmax(0)
                attended.append(weight @ all_values[:, group])
            residual = residual + linear(torch.cat(attended), f"{k}.self_attn.o_proj")
            inner = rms(residual, w[f"{k}.post_attention_layernorm.weight"])
            gate = linear(inner, f"{k}.mlp.gate_proj")
            inner = gate * torch.sigmoid(gate) * linear(inner, f"{k}.mlp.up_proj")
            residual = residual + linear(inner, f"{k}.mlp.down_proj")
        output = rms(residual, w["norm.weight"]) if spec.eagle == 3 else residual
        carried = output if spec.norm_output else residual
    return (w.get("lm_head.weight", target.head.weight) @ output).log_softmax(-1)


# -- the formats ------------------------------------------------------------------------------------


def sizes(spec: Spec) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "intermediate_size": 48, "num_attention_heads": HEADS, "num_key_value_heads": spec.keys,
        "head_dim": spec.dim, "rms_norm_eps": EPS, "vocab_size": VOCAB, "num_hidden_layers": spec.layers,
        "hidden_act": "silu", "max_position_embeddings": 2048,
    }  # fmt: skip


def named(w: dict[str, torch.Tensor], first: str) -> dict[str, torch.Tensor]:
    """Blocks as `layers.k.`, the first one under another name where a format has one."""
    out = {}
    for name, tensor in w.items():
        number, _, rest = name.partition(".")
        out[(first if number == "0" else f"layers.{number}.") + rest if number.isdigit() else name] = tensor
    return out


def vocabulary(t2d: bool = True) -> dict[str, torch.Tensor]:
    out = {"d2t": DRAFT_TOKENS - torch.arange(len(DRAFT_TOKENS))}
    if t2d:
        out["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, DRAFT_TOKENS, True)
    return out


Files = tuple[dict[str, Any], dict[str, torch.Tensor]]


def safeailab(spec: Spec, w: dict[str, torch.Tensor]) -> Files:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes(spec), "rope_theta": spec.theta}
    if spec.scaling:
        config["rope_scaling"] = {"type": spec.scaling["rope_type"], "factor": spec.scaling["factor"]}
    if spec.eagle == 1:
        return config | {"bias": spec.bias}, named(w, "layers.0.")
    return config | {"draft_vocab_size": len(DRAFT_TOKENS)}, named(w, "midlayer.") | vocabulary()


def specforge(spec: Spec, w: dict[str, torch.Tensor]) -> Files:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes(spec), "rope_theta": spec.theta,
        "draft_vocab_size": len(DRAFT_TOKENS), "rope_scaling": spec.scaling or None,
        # without the newer norms this means the norm before the output matrix, which is always there
        "norm_output": spec.norm_output if spec.fc_norm else True,
    }  # fmt: skip
    if spec.layer_ids:
        ids = [k - 1 for k in spec.layer_ids]
        config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    if spec.fc_norm:
        config["fc_norm"] = True
    return config, named(w, "midlayer.") | vocabulary()


def modelopt(spec: Spec, w: dict[str, torch.Tensor]) -> Files:
    nested: dict[str, Any] = {"use_last_layernorm": True, "use_aux_hidden_state": bool(spec.features)}
    if spec.layer_ids:
        nested["eagle_aux_hidden_state_layer_ids"] = [k - 1 for k in spec.layer_ids]
    if spec.norm_before_fc:
        nested["norm_before_fc"] = True
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes(spec), "eagle_config": nested,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.theta, **spec.scaling},
    }  # fmt: skip
    maps = vocabulary(t2d=False) if spec.own_head else {}
    return config, {f"model.{k}": v for k, v in named(w, "layers.0.").items()} | maps


def speculators(spec: Spec, w: dict[str, torch.Tensor]) -> Files:
    layer = sizes(spec) | {"model_type": "qwen3" if spec.qk_norm else "llama", "attention_bias": spec.bias}
    if spec.scaling:
        layer["rope_parameters"] = {"rope_theta": spec.theta, **spec.scaling}
    else:
        layer["rope_theta"] = spec.theta
    if spec.window:
        layer |= {"sliding_window": spec.window, "use_sliding_window": True}
        layer["layer_types"] = ["sliding_attention"] * spec.layers
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "draft_vocab_size": len(DRAFT_TOKENS), "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc, "fc_norm": spec.fc_norm, "norm_output": spec.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(spec.layer_ids) or None,
    }  # fmt: skip
    return config, named(w, "layers.0.") | vocabulary() | {"verifier_norm.weight": torch.ones(WIDTH)}


def write(folder: Path, files: Files, kind: str = "safetensors", sharded: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = files
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    stem = "model" if kind == "safetensors" else "pytorch_model"
    parts = [names[::2], names[1::2]] if sharded else [names]
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"{stem}-{number:05}-of-{len(parts):05}.{kind}" if sharded else f"{stem}.{kind}"
        chosen = {n: tensors[n].contiguous() for n in part}
        if kind == "safetensors":
            save_file(chosen, folder / file)
        else:
            torch.save(chosen, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if sharded:
        (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


# -- comparing --------------------------------------------------------------------------------------


def check(target: Target, folder: Path, spec: Spec, w: dict[str, torch.Tensor], count: int = 5, depth: int = 3) -> None:
    """Every node of a tree has the reference's log-probability, and the best token is the reference's."""
    drafter = EagleDrafter(target, load_head(folder, VOCAB), top_k=2)
    assert drafter.sites == spec.sites
    g = torch.Generator().manual_seed(1)
    states = torch.randn(count, WIDTH * (spec.features or 1), generator=g)
    tokens = torch.randint(VOCAB, (count + 1,), generator=g).tolist()
    drafted = DRAFT_TOKENS.tolist() if spec.own_head else list(range(VOCAB))
    request = Request(0, tokens[: count - 2], max_new_tokens=40, tokens=tokens[: count - 1])
    drafter.start(request, states[: count - 2])
    drafter.propose([request], [FixedBudget(4, 2)])  # whose rows must leave no trace
    request.tokens = tokens
    drafter.observe(request, states[count - 2 :])
    [tree] = drafter.propose([request], [FixedBudget(9, depth)])
    assert tree is not None
    for node, line in enumerate(tree.ancestors):
        path = [tree.tokens[j] for j in line]
        expected = reference(w, spec, target, states, tokens, path[:-1])
        assert tree.logq[node] == pytest.approx(float(expected[drafted.index(path[-1])]), abs=2e-3)
        if node == 0:
            assert path[0] == drafted[int(expected.argmax())]
    again, chain = Request(1, tokens[:-1], max_new_tokens=40, tokens=tokens), tokens[:2]
    drafter.start(again, states)
    told = [reference(w, spec, target, states, tokens, chain[:k]) for k in range(3)]
    assert drafter.forced(again, chain) == [drafted[int(t.argmax())] for t in told]


PLAIN = Spec()
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES: dict[str, tuple[Callable[[Spec, dict[str, torch.Tensor]], Files], Spec]] = {
    "safeailab": (safeailab, PLAIN),
    "safeailab, linear rope": (safeailab, replace(PLAIN, scaling={"rope_type": "linear", "factor": 2.0})),
    "safeailab, own embedding": (safeailab, replace(PLAIN, own_embedding=True, keys=4)),
    "eagle 1": (safeailab, Spec(eagle=1, features=0, own_head=False)),
    "eagle 2, biases": (safeailab, Spec(eagle=1, features=0, own_head=False, bias=True, theta=5000.0)),
    "specforge": (specforge, replace(PLAIN, layer_ids=(1, 2, 4), theta=500.0)),
    "specforge 3.1": (specforge, replace(PLAIN, fc_norm=True, norm_output=True, scaling=LLAMA3)),
    "specforge 3.1, output not normed": (specforge, replace(PLAIN, fc_norm=True)),
    "modelopt": (modelopt, replace(PLAIN, layer_ids=(1, 2, 3), norm_before_fc=True, theta=777.0)),
    "modelopt, three blocks": (modelopt, replace(PLAIN, layers=3)),
    "modelopt, last state only": (modelopt, Spec(features=0)),
    "modelopt, the target's output matrix": (modelopt, replace(PLAIN, own_head=False)),
    "speculators": (speculators, replace(PLAIN, norm_before_residual=True, layer_ids=(0, 2, 4), scaling=LLAMA3)),
    "speculators, Qwen 3": (speculators, replace(PLAIN, qk_norm=True, dim=16, bias=True)),
    "speculators, four states": (speculators, replace(PLAIN, features=4, layer_ids=(0, 1, 3, 4), fc_norm=True)),
    "speculators, a window": (speculators, replace(PLAIN, window=3, qk_norm=True)),
    "speculators, two blocks and a window": (speculators, replace(PLAIN, window=2, layers=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_drafts_as_the_reference(name: str, small_target: Callable[..., Target], tmp_path: Path) -> None:
    form, spec = CASES[name]
    w = weights(spec)
    check(small_target(), write(tmp_path, form(spec, w)), spec, w)


@pytest.mark.parametrize("name", ["eagle 1", "modelopt, three blocks", "speculators, a window", "specforge 3.1"])
def test_the_text_stays_the_targets_own(name: str, small_target: Callable[..., Target], tmp_path: Path) -> None:
    """Through the engine, which brings the states of the head's own sites."""
    form, spec = CASES[name]
    target = small_target()
    drafter = EagleDrafter(target, load_head(write(tmp_path, form(spec, weights(spec))), VOCAB))
    decoder = Decoder(target, neural=drafter)
    prompts = [[1, 2, 3, 4, 5], [9, 9, 30]]
    alone, drafted = (decoder.generate(prompts, mode=mode, max_new_tokens=24) for mode in ("ar", "eagle"))
    assert [g.tokens for g in drafted] == [g.tokens for g in alone]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    features = draw(st.integers(3, 5))
    ids = tuple(draw(st.lists(st.integers(0, 4), min_size=features, max_size=features, unique=True)))
    flags = {
        f: draw(st.booleans())
        for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "bias")
    }
    return Spec(
        features=features, layer_ids=ids, layers=draw(st.integers(1, 3)), keys=draw(st.sampled_from([1, 2, 4])),
        dim=draw(st.sampled_from([2, 8, 16])), own_embedding=draw(st.booleans()), window=draw(st.integers(0, 6)),
        theta=draw(st.sampled_from([100.0, 1e6])), scaling=draw(st.sampled_from([{}, LLAMA3])), **flags,
    )  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=specs(), seed=st.integers(0, 9), count=st.integers(3, 9), sharded=st.booleans())
def test_any_head_drafts_as_the_reference(
    small_target: Callable[..., Target], spec: Spec, seed: int, count: int, sharded: bool
) -> None:
    w = weights(spec, seed)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), speculators(spec, w), sharded=sharded)
        check(small_target(), Path(folder), spec, w, count)


# -- files that are not as they should be -----------------------------------------------------------


def test_torch_files_and_shards_are_read_and_never_run(small_target: Callable[..., Target], tmp_path: Path) -> None:
    w = weights(PLAIN)
    for number, (kind, sharded) in enumerate([("bin", False), ("bin", True), ("safetensors", True)]):
        check(small_target(), write(tmp_path / str(number), safeailab(PLAIN, w), kind, sharded), PLAIN, w)

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path(tmp_path / "sprung").touch, ()

    folder = write(tmp_path / "trap", safeailab(PLAIN, w))
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(HeadError, match="cannot read the weights"):
        load_head(folder, VOCAB)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", "missing.safetensors"])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "head", safeailab(PLAIN, weights(PLAIN)), sharded=True)
    write(tmp_path, safeailab(PLAIN, weights(PLAIN)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(HeadError, match=r"which is no \.safetensors file of this folder|which its index names"):
        load_head(folder, VOCAB)


def test_older_names_of_the_newer_norms(small_target: Callable[..., Target], tmp_path: Path) -> None:
    spec = replace(PLAIN, fc_norm=True)
    w = weights(spec)
    config, tensors = speculators(spec, w)
    for i, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    check(small_target(), write(tmp_path, (config, tensors)), spec, w)


def test_d2t_that_holds_ids_is_taken_where_t2d_bears_it_out(
    small_target: Callable[..., Target], tmp_path: Path
) -> None:
    w = weights(PLAIN)
    config, tensors = safeailab(PLAIN, w)
    check(small_target(), write(tmp_path, (config, tensors | {"d2t": DRAFT_TOKENS})), PLAIN, w)


Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
BROKEN: list[tuple[Callable[..., Files], Spec, Edit, str]] = [
    (safeailab, PLAIN, lambda c, t: t.update(d2t=torch.full((32,), 40)), "does not map into the target's vocabulary"),
    (safeailab, PLAIN, lambda c, t: t.update(d2t=torch.zeros(32, dtype=torch.int64)), "never filled in"),
    (safeailab, PLAIN, lambda c, t: t.update(d2t=torch.zeros(31, dtype=torch.int64)), r"shape \[31\]"),
    (safeailab, PLAIN, lambda c, t: t["fc.weight"].fill_(float("nan")), "fc.weight .* not finite"),
    (safeailab, PLAIN, lambda c, t: t.update({"mask_hidden": torch.ones(3)}), "not understood .*mask_hidden"),
    (safeailab, PLAIN, lambda c, t: t.update({"fc.weight_scale": torch.ones(3)}), "not understood .*weight_scale"),
    (safeailab, PLAIN, lambda c, t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(3)}), "twice"),
    (safeailab, PLAIN, lambda c, t: t.pop("midlayer.hidden_norm.weight"), "hidden_norm.weight missing"),
    (safeailab, PLAIN, lambda c, t: t.pop("lm_head.weight"), "draft vocabulary of 32 and no lm_head"),
    (safeailab, PLAIN, lambda c, t: t.update({"fc.weight": torch.ones(32, 100)}), "no whole number of states"),
    (safeailab, PLAIN, lambda c, t: c.update(num_hidden_layers=2), "says 2 blocks, and the weights have 1"),
    (safeailab, PLAIN, lambda c, t: c.update(num_attention_heads=3), "which must divide them"),
    (safeailab, PLAIN, lambda c, t: c.update(hidden_act="maxout"), "hidden_act is 'maxout'"),
    (safeailab, PLAIN, lambda c, t: c.update(rope_scaling={"type": "dynamic", "factor": 2.0}), "of type 'dynamic'"),
    (safeailab, PLAIN, lambda c, t: c.update(rope_scaling={"type": "linear"}), "lacks factor"),
    (safeailab, PLAIN, lambda c, t: c.update(partial_rotary_factor=0.5), "a part of each head"),
    (safeailab, PLAIN, lambda c, t: (c.update(vocab_size=65), t.pop("t2d")), "for a vocabulary of 65"),
    (safeailab, PLAIN, lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2]), "the layers .* reads 3 states"),
    (safeailab, PLAIN, lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=["1", 2, 3]), "they are whole numbers"),
    (safeailab, Spec(eagle=1, features=0, own_head=False), lambda c, t: t.update({"fc.weight": torch.ones(32, 99)}),
     "an EAGLE-1 head of width 32 reads 64"),
    (safeailab, PLAIN, lambda c, t: [t.pop(k) for k in list(t) if k.startswith("midlayer")], "no midlayer or layers.0"),
    (modelopt, replace(PLAIN, norm_before_fc=True), lambda c, t: t.pop("model.input_norm.weight"), "have no"),
    (modelopt, PLAIN, lambda c, t: c["eagle_config"].update(use_aux_hidden_state=False), "the weights have an fc"),
    (speculators, PLAIN, lambda c, t: c.update(norm_before_fc=True), "norm_before_fc true, and the weights have no"),
    (speculators, PLAIN, lambda c, t: c.update(norm_before_residual="yes"), "norm_before_residual 'yes'"),
    (speculators, PLAIN, lambda c, t: c.pop("transformer_layer_config"), "no transformer_layer_config"),
    (speculators, PLAIN, lambda c, t: c.update(speculators_model_type="dflash"), "kind 'dflash' cannot be used"),
    (speculators, PLAIN, lambda c, t: c["transformer_layer_config"].update(model_type="nope"), "is damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "spec", "edit", "message"), BROKEN)
def test_what_cannot_be_right_is_told(
    form: Callable[..., Files], spec: Spec, edit: Edit, message: str, tmp_path: Path
) -> None:
    config, tensors = form(spec, weights(spec))
    edit(config, tensors)
    with pytest.raises(HeadError, match=message):
        load_head(write(tmp_path, (config, tensors)), VOCAB)


def test_layers_that_the_target_has_not_got(small_target: Callable[..., Target], tmp_path: Path) -> None:
    spec = replace(PLAIN, layer_ids=(1, 2, 9))
    head = load_head(write(tmp_path, speculators(spec, weights(spec))), VOCAB)
    with pytest.raises(HeadError, match="reads layer 9 and the target has 4 blocks"):
        EagleDrafter(small_target(), head)
    four = Spec(features=4)
    head = load_head(write(tmp_path, safeailab(four, weights(four))), VOCAB)
    with pytest.raises(HeadError, match="reads 4 states of the target and does not say which"):
        EagleDrafter(small_target(), head)


def test_what_is_guessed_is_told(tmp_path: Path) -> None:
    config, tensors = speculators(PLAIN, weights(PLAIN))
    del config["norm_before_residual"]
    with pytest.warns(HeadWarning, match="does not say norm_before_residual"):
        assert not load_head(write(tmp_path, (config, tensors)), VOCAB).config.norm_before_residual
    config, tensors = specforge(PLAIN, weights(PLAIN))
    with pytest.warns(HeadWarning, match="by which SpecForge means"):
        load_head(write(tmp_path, (config | {"norm_output": False}, tensors)), VOCAB)
    config, tensors = specforge(replace(PLAIN, layer_ids=(1, 2, 3)), weights(PLAIN))
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    with pytest.warns(HeadWarning, match="which do not mean the same"):
        assert load_head(write(tmp_path, (config, tensors)), VOCAB).config.layer_ids == (0, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_head(write(tmp_path, safeailab(PLAIN, weights(PLAIN))), VOCAB)


# -- long texts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("window", [0, 7])
def test_rows_dropped_flushed_and_passed_in_pieces_change_nothing(
    small_target: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, window: int
) -> None:
    """A text longer than all the buffers, and behind the positions of the head's training."""
    from decoding.eagle import drafter as module

    monkeypatch.setattr(module, "WAITING", 11)
    monkeypatch.setattr(module, "CHUNK", 4)
    spec = replace(PLAIN, layers=layers, window=window)
    w = weights(spec)
    config, tensors = speculators(spec, w)
    config["transformer_layer_config"]["max_position_embeddings"] = 100
    target = small_target()
    drafter = EagleDrafter(target, load_head(write(tmp_path, (config, tensors)), VOCAB), top_k=2)
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (180,), generator=g).tolist()
    states = torch.randn(180, 3 * WIDTH, generator=g)
    request = Request(0, tokens[:40], max_new_tokens=200, tokens=tokens[:41])
    drafter.start(request, states[:40])
    for end in (*range(43, 170, 3), 176):
        request.tokens = tokens[: end + 1]
        drafter.observe(request, states[len(tokens[:40]) if end == 43 else end - 3 if end < 176 else 169 : end])
    with pytest.warns(HeadWarning, match="longer than the 100 tokens"):
        [tree] = drafter.propose([request], [FixedBudget(6, 3)])
    assert tree is not None
    told: dict[int, torch.Tensor] = {}
    for node, line in enumerate(tree.ancestors):
        path = [tree.tokens[j] for j in line]
        parent = tree.parents[node]
        if parent not in told:
            told[parent] = reference(w, spec, target, states[:176], request.tokens, path[:-1])
        expected = told[parent]
        assert tree.logq[node] == pytest.approx(float(expected[DRAFT_TOKENS.tolist().index(path[-1])]), abs=2e-3)
    kept = drafter._states[request].keys.shape[2]
    assert kept < 176 if window else kept >= 176


def test_a_window_may_be_set_for_a_head_that_has_none(small_target: Callable[..., Target], tmp_path: Path) -> None:
    w = weights(PLAIN)
    head = load_head(write(tmp_path, safeailab(PLAIN, w)), VOCAB)
    target, spec = small_target(), replace(PLAIN, window=3)
    g = torch.Generator().manual_seed(4)
    tokens, states = torch.randint(VOCAB, (13,), generator=g).tolist(), torch.randn(12, 96, generator=g)
    drafter = EagleDrafter(target, head, window=3)
    request = Request(0, tokens[:-1], max_new_tokens=9, tokens=tokens)
    drafter.start(request, states)
    expected = reference(w, spec, target, states, tokens, [7])
    assert drafter.forced(request, [7])[1] == DRAFT_TOKENS[expected.argmax()]
    assert drafter.describe()["window"] == 3


def test_nothing_is_kept_twice(small_target: Callable[..., Target], tmp_path: Path) -> None:
    """The file's copy of the target's embedding, and the matrices that were joined."""
    target = small_target()
    config, tensors = safeailab(PLAIN, weights(PLAIN))
    tensors["embed_tokens.weight"] = target.embed.weight.clone()
    head = load_head(write(tmp_path, (config, tensors)), VOCAB)
    drafter = EagleDrafter(target, head)
    assert drafter.embed is target.embed
    gone = [weakref.ref(head), weakref.ref(head.midlayer.mlp.gate_proj)]
    del head
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_values_that_are_not_finite_are_an_error_and_no_draft(
    small_target: Callable[..., Target], tmp_path: Path
) -> None:
    target = small_target()
    drafter = EagleDrafter(target, load_head(write(tmp_path, safeailab(PLAIN, weights(PLAIN))), VOCAB))
    request = Request(0, [1, 2], max_new_tokens=9, tokens=[1, 2, 3])
    drafter.start(request, torch.full((2, 96), float("nan")))
    with pytest.raises(HeadError, match="not finite"):
        drafter.propose([request], [FixedBudget(4, 2)])
