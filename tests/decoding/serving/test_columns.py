"""Which columns of the captured states are whose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decoding.serving.vllm.columns import Columns, layer_of

WIDTH = 3


class Model(torch.nn.Module):
    """What the columns need of vLLM's models: layers are named once, and captured in order."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = tuple(sorted(set(layers)))


def probe(site: str, blocks: int = 8) -> Any:
    return SimpleNamespace(site=site, width=WIDTH, target=SimpleNamespace(blocks=blocks))


@pytest.mark.parametrize(("site", "layer"), [("resid_pre.0", 0), ("resid_pre.7", 7), ("resid_post.6", 7), ("embed", 0)])
def test_layer_of_a_site(site: str, layer: int) -> None:
    assert layer_of(site, 8) == layer


@pytest.mark.parametrize("site", ["resid_post.7", "resid_mid.3", "mlp_out.0", "attn_out.7", "resid_pre.8"])
def test_sites_that_are_not_handed_out(site: str) -> None:
    with pytest.raises(ValueError, match=rf"the probe reads {site}, and vLLM hands out what enters a block"):
        layer_of(site, 8)


@pytest.mark.parametrize("site", ["resid_post.0", "resid_pre.3", "resid_post.4", "resid_pre.7", "resid_pre.2"])
@pytest.mark.parametrize("layers", [(2, 4, 5), (5, 2)])
def test_each_gets_its_own(site: str, layers: tuple[int, ...]) -> None:
    model = Model()
    columns = Columns.install(model, probe(site))
    model.set_aux_hidden_state_layers(layers)
    captured = torch.cat([torch.full((4, WIDTH), float(layer)) for layer in model.layers], dim=1)
    captured += torch.arange(4)[:, None] / 10
    rows = torch.tensor([3, 1])
    assert torch.equal(columns.probe(captured, rows), layer_of(site, 8) + rows[:, None].expand(2, WIDTH) / 10)
    wanted = torch.cat([torch.full((4, WIDTH), float(layer)) for layer in sorted(layers)], dim=1)
    assert torch.equal(columns.head(captured), wanted + torch.arange(4)[:, None] / 10)
