"""Whose columns are whose in the states that vLLM captures for a draft head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from activations.sites import Site
from probes.artifact import JOIN, ProbeConfig


def layer_of(site: str, blocks: int) -> int:
    """vLLM's number of a site: k for what enters block k. Raises ValueError for a site that vLLM does not hand out."""
    if JOIN in site:
        raise ValueError(f"the probe reads several sites ({site}), and the switch hands it one")
    parsed = Site.parse(site)
    layer = parsed.block + {"resid_pre": 0, "resid_post": 1}.get(parsed.kind, blocks)
    if parsed.kind == "embed":
        layer = 0
    if layer >= blocks:
        raise ValueError(
            f"the probe reads {site}, and vLLM hands out what enters a block, resid_pre.0 to resid_pre.{blocks - 1} "
            f"(or resid_post.0 to resid_post.{blocks - 2}): train a probe there, `switchsd train probe --sites ...`"
        )
    return layer


@dataclass
class Columns:
    """vLLM hands captured states out in the order of their layers, side by side; those that only the probe reads
    must not reach the head."""

    width: int
    layer: int
    layers: tuple[int, ...] = ()
    """Those captured, in order."""
    shared: bool = False
    """The head reads the probe's layer too."""

    @classmethod
    def install(cls, target: Any, probe: ProbeConfig) -> Columns:
        """Let the target capture the probe's layer beside those of the head, whichever these are: the runner names
        them once the head is loaded."""
        columns = cls(probe.width, layer_of(probe.site, probe.target.blocks))
        name_layers = target.set_aux_hidden_state_layers

        def with_probe(layers: tuple[int, ...]) -> None:
            columns.shared = columns.layer in layers
            columns.layers = tuple(sorted({*layers, columns.layer}))
            name_layers(columns.layers)

        target.set_aux_hidden_state_layers = with_probe  # of this model alone
        return columns

    @property
    def place(self) -> int:
        return self.layers.index(self.layer)

    def probe(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[rows, width] of states [tokens, layers * width]."""
        return states[rows, self.place * self.width : (self.place + 1) * self.width]

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """[tokens, head layers * width]."""
        if self.shared:
            return states
        before, after = states[:, : self.place * self.width], states[:, (self.place + 1) * self.width :]
        return torch.cat([before, after], dim=1)
