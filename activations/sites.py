"""Where a hidden state can be read, and the hooks that read it.

A site is written `embed` or `<kind>.<block>`, blocks counted from 0:

    resid_pre.k   the residual stream entering block k
    attn_out.k    the attention branch exactly as it is added (after a post-norm, where there is one)
    resid_mid.k   the residual stream after the attention add
    mlp_out.k     the MLP branch exactly as it is added
    resid_post.k  the residual stream leaving block k, before any final norm

The last `resid_post` is therefore not `hidden_states[-1]` of transformers, which is after the final norm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

KINDS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
PRE_NORMS = {"input_layernorm", "post_attention_layernorm"}
"""Norms of a Llama-like block, each before its branch; a Gemma-like block has POST_NORMS too, and the second of these
stands behind attention."""
POST_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


@dataclass(frozen=True, order=True)
class Site:
    """A named place in the target. `block` is -1 for `embed`."""

    kind: str
    block: int = -1

    @classmethod
    def parse(cls, text: str) -> Site:
        if text == "embed":
            return cls("embed")
        match = re.fullmatch(r"([a-z_]+)\.(\d+)", text)
        if not match or match[1] not in KINDS:
            raise ValueError(f"unknown site {text!r}: write 'embed' or one of {', '.join(k + '.K' for k in KINDS)}")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return self.kind if self.block < 0 else f"{self.kind}.{self.block}"


def parse_sites(sites: Iterable[str | Site], blocks: int) -> list[Site]:
    """Sites of a model with `blocks` blocks. A star (`resid_mid.*`) means every block; negative is not allowed."""
    out: list[Site] = []
    for site in sites:
        if isinstance(site, str) and site.endswith(".*"):
            expanded = [Site.parse(f"{site[:-2]}.{k}") for k in range(blocks)]
        else:
            expanded = [site if isinstance(site, Site) else Site.parse(site)]
        for one in expanded:
            if one.block >= blocks:
                raise ValueError(f"site {one} does not exist: the target has blocks 0 to {blocks - 1}")
            if one not in out:
                out.append(one)
    return out


def eagle_sites(blocks: int) -> list[str]:
    """The three sites that an EAGLE-3 head reads: what enters a low, a middle and a high block.

    Published heads read blocks 2, n // 2 and n - 3; in a target of fewer than seven these are not three.
    """
    chosen = (2, blocks // 2, blocks - 3) if blocks > 6 else (1, blocks // 2, blocks - 1)
    if len(set(chosen)) < 3:
        raise ValueError(f"the target has {blocks} blocks; an EAGLE-3 head needs three different states: 4 or more")
    return [f"resid_pre.{k}" for k in chosen]


def last_site(blocks: int) -> str:
    """The state from which the target's own logits follow, by its final norm and output matrix."""
    return f"resid_post.{blocks - 1}"


def _first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def _place(layer: nn.Module, kind: str) -> tuple[nn.Module, bool]:
    """The module to hook for a site of one block, and whether its input (True) or its output is the state."""
    if kind == "resid_pre":
        return layer, True
    if kind == "resid_post":
        return layer, False
    children = dict(layer.named_children())
    norms = {name for name in children if "norm" in name}
    gemma = norms == PRE_NORMS | POST_NORMS
    # Elsewhere (parallel branches, post-norms alone, scaled branches) the same names stand for other states.
    scaled = any(getattr(layer, name, 1.0) != 1.0 for name in ("residual_multiplier", "residual_scale"))
    if scaled or getattr(layer, "use_parallel_residual", False) or not (gemma or norms == PRE_NORMS):
        raise ValueError(
            f"{kind} of {type(layer).__name__} is not known (norms {', '.join(sorted(norms)) or 'none'}): "
            "read resid_pre, resid_post or embed, which every target has"
        )
    names = {
        "attn_out": "post_attention_layernorm" if gemma else "self_attn",
        "resid_mid": "pre_feedforward_layernorm" if gemma else "post_attention_layernorm",
        "mlp_out": "post_feedforward_layernorm" if gemma else "mlp",
    }
    name = names[kind]
    if name not in children:
        raise ValueError(f"cannot find {kind} in {type(layer).__name__}: it has no {name!r}, only {list(children)}")
    return children[name], kind == "resid_mid"


class SiteReader:
    """Forward hooks that keep the states of chosen sites of the latest forward pass.

    The tensors are the model's own, bit for bit; nothing is recomputed. Use as a context manager, or call
    `close()`.
    """

    def __init__(self, embed: nn.Module, layers: nn.ModuleList, sites: Iterable[Site]) -> None:
        self.states: dict[Site, torch.Tensor] = {}
        self._handles = []
        # All places first: an unknown one must leave no hook behind.
        places = [(s, *((embed, False) if s.kind == "embed" else _place(layers[s.block], s.kind))) for s in sites]
        for site, module, is_input in places:
            if is_input:
                self._handles.append(module.register_forward_pre_hook(self._input(site), with_kwargs=True))
            else:
                self._handles.append(module.register_forward_hook(self._output(site)))

    def _output(self, site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.states[site] = _first(output)

        return hook

    def _input(self, site: Site) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.states[site] = args[0] if args else kwargs["hidden_states"]

        return hook

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> SiteReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
