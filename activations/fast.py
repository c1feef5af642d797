"""The forward of the common decoder block without the general model code around it.

Llama, Mistral, Qwen 2 and 3, SmolLM and many more are the same block: RMS norm, rotary attention with grouped heads
(maybe with a norm of queries and keys), RMS norm, gated MLP. Written out for few tokens it is a third faster than
code that serves every architecture. It is used only where it was seen to give what the general forward gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from activations.attention import attend
from activations.linear import PackedLinear
from activations.sites import Site, SiteReader

if TYPE_CHECKING:
    from activations.cache import KVCache

PARTS = {
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}
"""Weights that every such block has."""
MAYBE = {
    *(f"self_attn.{name}_proj.bias" for name in "qkvo"),
    *(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")),
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
}
"""Weights that some have."""


class _Norm:
    """RMS norm with float32 inside, rounded where the general code rounds.

    In float32 it is the module itself, whose sums do not depend on what else is in the batch."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.weight: torch.Tensor = module.weight
        self._eps = torch.tensor(float(module.variance_epsilon), device=self.weight.device)
        self._share = 1 / self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            normed: torch.Tensor = self._module(x)
            return normed
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=self._share).rsqrt_()
        return torch.mul(x, scale, out=torch.empty_like(x)).mul_(self.weight)  # in float32, rounded once


@dataclass(frozen=True)
class _Block:
    enter: _Norm
    qkv: Callable[[torch.Tensor], torch.Tensor]
    q_norm: _Norm | None
    k_norm: _Norm | None
    out: Callable[[torch.Tensor], torch.Tensor]
    middle: _Norm
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]
    heads: int
    kv_heads: int
    width: int
    """Of a head."""
    scaling: float
    slides: bool


def _together(*layers: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layers' outputs side by side: one product where their weights are one."""
    first = layers[0]
    if isinstance(first, PackedLinear) and all(getattr(x, "product", None) is first.product for x in layers):
        return first.product
    if len(layers) == 1:
        call: Callable[[torch.Tensor], torch.Tensor] = first
        return call
    return lambda x: torch.cat([layer(x) for layer in layers], dim=-1)


class FastForward:
    """A decoder's forward from token ids to normed final states. `fast_forward` makes one."""

    def __init__(self, embed: nn.Module, layers: Sequence[Any], norm: Any, rotary: Any, slides: Sequence[bool]) -> None:
        self._embed, self._rotary, self._norm = embed, rotary, norm
        self._blocks = [_block(layer, windowed) for layer, windowed in zip(layers, slides, strict=True)]

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache,
        full: torch.Tensor | None,
        windowed: torch.Tensor | None,
        readers: Sequence[SiteReader] = (),
    ) -> torch.Tensor:
        """Normed final states [B, Q, width] of tokens [B, Q] at positions [B, Q], written to `cache`; the states that
        `readers` want go to them. Masks are boolean [B, 1, Q, K]; None = a causal pass that needs none."""
        x = self._embed(tokens)
        wanted: dict[int, dict[str, list[tuple[SiteReader, Site]]]] = {}
        for reader in readers:
            for site in reader.sites:
                wanted.setdefault(site.block, {}).setdefault(site.kind, []).append((reader, site))
        nobody: dict[str, list[tuple[SiteReader, Site]]] = {}

        def show(state: torch.Tensor, to: list[tuple[SiteReader, Site]] | None) -> None:
            for reader, site in to or ():
                reader.states[site] = state

        show(x, wanted.get(-1, nobody).get("embed"))
        cos, sin = self._rotary(x, positions)
        cos, sin = cos[:, :, None], sin[:, :, None].clone()
        sin[..., : sin.shape[-1] // 2].neg_()  # so that a rolled copy need not be negated
        masks: dict[tuple[int, bool], torch.Tensor | None] = {}
        for i, block in enumerate(self._blocks):
            here = wanted.get(i, nobody)
            show(x, here.get("resid_pre"))
            y = block.qkv(block.enter(x)).unflatten(-1, (-1, block.width))
            turned = y[:, :, : block.heads + block.kv_heads]
            if block.q_norm is not None and block.k_norm is not None:
                parts = block.q_norm(turned[:, :, : block.heads]), block.k_norm(turned[:, :, block.heads :])
                turned = torch.cat(parts, dim=2)
            turned = (turned * cos).add_(turned.roll(block.width // 2, -1).mul_(sin))
            keys, values = cache.update(
                turned[:, :, block.heads :].transpose(1, 2), y[:, :, block.heads + block.kv_heads :].transpose(1, 2), i
            )
            groups = block.heads // block.kv_heads
            if (groups, block.slides) not in masks:
                masks[groups, block.slides] = _additive(windowed if block.slides else full, groups, keys.shape[2], x)
            query = turned[:, :, : block.heads].transpose(1, 2)
            mixed = attend(query, keys, values, masks[groups, block.slides], block.scaling).flatten(2)
            branch = block.out(mixed)
            show(branch, here.get("attn_out"))
            x = branch + x if "attn_out" in here else branch.add_(x)
            show(x, here.get("resid_mid"))
            gate, up = block.gate_up(block.middle(x)).chunk(2, dim=-1)
            branch = block.down(F.silu(gate).mul_(up))
            show(branch, here.get("mlp_out"))
            x = branch + x if "mlp_out" in here else branch.add_(x)
            show(x, here.get("resid_post"))
        final: torch.Tensor = self._norm(x)
        return final


def _additive(mask: torch.Tensor | None, groups: int, keys: int, like: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask [B, 1, Q, K'] as what is added to the scores [B, 1, groups * Q, K], once for all blocks."""
    if mask is None:
        return None
    added = torch.zeros(*mask.shape[:3], keys, dtype=like.dtype, device=mask.device)
    hidden = torch.finfo(like.dtype).min
    added[..., : mask.shape[-1]].masked_fill_(~mask, hidden)
    added[..., mask.shape[-1] :] = hidden
    return added.repeat(1, 1, groups, 1) if groups > 1 else added


def _block(layer: Any, slides: bool) -> _Block:
    attn, mlp = layer.self_attn, layer.mlp
    norms = [_Norm(getattr(attn, name)) if hasattr(attn, name) else None for name in ("q_norm", "k_norm")]
    return _Block(
        enter=_Norm(layer.input_layernorm),
        qkv=_together(attn.q_proj, attn.k_proj, attn.v_proj),
        q_norm=norms[0],
        k_norm=norms[1],
        out=_together(attn.o_proj),
        middle=_Norm(layer.post_attention_layernorm),
        gate_up=_together(mlp.gate_proj, mlp.up_proj),
        down=_together(mlp.down_proj),
        heads=attn.q_proj.out_features // attn.head_dim,
        kv_heads=attn.k_proj.out_features // attn.head_dim,
        width=attn.head_dim,
        scaling=float(attn.scaling),
        slides=slides,
    )


def fast_forward(backbone: Any, layers: Sequence[Any], slides: Sequence[bool]) -> FastForward | None:
    """The fast forward of a decoder whose blocks look like the common one, not yet compared with anything; None where
    they do not, or where accelerate moves them between devices."""
    rotary, norm = getattr(backbone, "rotary_emb", None), getattr(backbone, "norm", None)
    if rotary is None or norm is None or any(hasattr(module, "_hf_hook") for module in backbone.modules()):
        return None
    if not hasattr(norm, "variance_epsilon") or getattr(norm, "bias", None) is not None:
        return None
    for layer in layers:
        names = set(layer.state_dict(keep_vars=True))
        activation = getattr(getattr(layer, "mlp", None), "act_fn", None)
        if not names >= PARTS or names - PARTS - MAYBE or not _is_silu(activation):
            return None
        both = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"} & names
        if len(both) == 1 or not hasattr(layer.self_attn, "head_dim"):
            return None
        if both and layer.self_attn.q_norm.weight.shape != (layer.self_attn.head_dim,):
            return None  # a norm over all heads at once
        if not all(
            hasattr(getattr(layer, n), "variance_epsilon") for n in ("input_layernorm", "post_attention_layernorm")
        ):
            return None
    return FastForward(backbone.get_input_embeddings(), layers, norm, rotary, slides)


def _is_silu(activation: Any) -> bool:
    if activation is None:
        return False
    points = torch.linspace(-3, 3, 7)
    try:
        return torch.equal(activation(points), F.silu(points))
    except (RuntimeError, TypeError):
        return False
