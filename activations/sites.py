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


def _first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def _place(layer: nn.Module, kind: str) -> tuple[nn.Module, bool]:
    """The module to hook for a site of one block, and whether its input (True) or its output is the state."""
    children = dict(layer.named_children())
    gemma = "pre_feedforward_layernorm" in children  # norms before and after each branch
    if kind == "resid_pre":
        return layer, True
    if kind == "resid_post":
        return layer, False
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
        for site in sites:
            if site.kind == "embed":
                self._handles.append(embed.register_forward_hook(self._output(site)))
                continue
            module, is_input = _place(layers[site.block], site.kind)
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
