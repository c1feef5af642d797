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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from activations.structure import ENTERING, LEAVING, Layout, Place, entering_tensor, leaving_tensor

KINDS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
BRANCHES = ("attn_out", "resid_mid", "mlp_out")
"""Kinds whose places differ between families; the other ones are a block's input and output."""


@dataclass(frozen=True, order=True)
class Site:
    """A named place in the target. `block` is -1 for `embed`."""

    kind: str
    block: int = -1

    @classmethod
    def parse(cls, text: str) -> Site:
        """The site of a name such as `resid_mid.14`. Raises ValueError for other names."""
        if text == "embed":
            return cls("embed")
        match = re.fullmatch(r"([a-z_]+)\.(\d+)", text)
        if not match or match[1] not in KINDS:
            raise ValueError(f"unknown site {text!r}: write 'embed' or one of {', '.join(k + '.K' for k in KINDS)}")
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return self.kind if self.block < 0 else f"{self.kind}.{self.block}"


def parse_sites(sites: Iterable[str | Site], blocks: int) -> list[Site]:
    """Sites of a model with `blocks` blocks. A star (`resid_mid.*`) means every block; negative is not allowed.

    Raises ValueError for an unknown name and for a block that the model does not have.
    """
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

    Published heads read blocks 2, n // 2 and n - 3; in a target of fewer than seven these are not three. Raises
    ValueError if there are fewer than four blocks. Source: EAGLE-3, arXiv 2503.01840, and its released code.
    """
    chosen = (2, blocks // 2, blocks - 3) if blocks > 6 else (1, blocks // 2, blocks - 1)
    if len(set(chosen)) < 3:
        raise ValueError(f"the target has {blocks} blocks; an EAGLE-3 head needs three different states: 4 or more")
    return [f"resid_pre.{k}" for k in chosen]


def last_site(blocks: int) -> str:
    """The state from which the target's own logits follow, by its final norm and output matrix."""
    return f"resid_post.{blocks - 1}"


def find(
    embed: nn.Module, layers: nn.ModuleList, site: Site, layouts: Sequence[Layout]
) -> tuple[nn.Module, Place, Site, float | None]:
    """The module at which a site is read, where there, the site itself, and what its state is multiplied by.

    `layouts`, one a block, are needed for branches only. Raises ValueError for a site that a block does not have.
    """
    if site.kind == "embed":
        return embed, LEAVING, site, None
    block = layers[site.block]
    if site.kind not in BRANCHES:
        return block, ENTERING if site.kind == "resid_pre" else LEAVING, site, None
    place = layouts[site.block].place(site.kind)
    return block.get_submodule(place.path), place, site, getattr(block, place.scale) if place.scale else None


class SiteReader:
    """Forward hooks that keep the states of chosen sites of the latest forward pass.

    The tensors are the model's own, bit for bit; nothing is recomputed, except that a branch which the block scales
    is scaled here the same way. Use as a context manager, or call `close()`.
    """

    def __init__(
        self,
        embed: nn.Module,
        layers: nn.ModuleList,
        sites: Iterable[Site],
        layouts: Sequence[Layout] = (),
        device: torch.device | None = None,
        closed: Callable[[SiteReader], None] | None = None,
    ) -> None:
        """`layouts`, one a block, are needed for branches only. States are moved to `device`, if there is one; `closed`
        is told of the end.

        Raises ValueError for a site that a block does not have.
        """
        self.sites = tuple(sites)
        self.states: dict[Site, torch.Tensor] = {}
        self._closed = closed
        self._handles: list[RemovableHandle] = []
        self._device = device
        # All places first: an unknown one must leave no hook behind.
        for module, place, site, scale in [find(embed, layers, site, layouts) for site in self.sites]:
            keep = self._keep(site, scale, place.overwritten)
            if place.is_input:
                self._handles.append(module.register_forward_pre_hook(_on_input(keep), with_kwargs=True))
            else:
                self._handles.append(module.register_forward_hook(_on_output(keep)))

    def _keep(self, site: Site, scale: float | None, overwritten: bool) -> Callable[[torch.Tensor | None], None]:
        def keep(state: torch.Tensor | None) -> None:
            if state is None:
                raise ValueError(f"no state passed at {site}")
            if scale is not None:
                state = state * scale
            elif overwritten:
                state = state.clone()
            self.states[site] = state if self._device is None else state.to(self._device)

        return keep

    @property
    def hooks(self) -> int:
        """How many are attached."""
        return len(self._handles)

    def close(self) -> None:
        """Detach. Safe to repeat."""
        if self._closed is not None:
            self._closed(self)
            self._closed = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> SiteReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _on_input(keep: Callable[[torch.Tensor | None], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        keep(entering_tensor(args, kwargs))

    return hook


def _on_output(keep: Callable[[torch.Tensor | None], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        keep(leaving_tensor(output))

    return hook
