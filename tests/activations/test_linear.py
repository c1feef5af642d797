"""Packed linear layers against ordinary ones."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from activations.linear import PackedLinear, can_pack, pack, unpacked

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU that oneDNN multiplies bfloat16 on"
)


class Attention(nn.Module):
    def __init__(self, width: int, out: int, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n, bias) for n in (out, 3, 5))
        self.o_proj = nn.Linear(out, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def made(width: int = 12, out: int = 7, bias: bool = False) -> Attention:
    torch.manual_seed(0)
    return Attention(width, out, bias).to(torch.bfloat16).requires_grad_(False)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 70),
    out=st.integers(1, 70),
    rows=st.integers(1, 40),
    bias=st.booleans(),
    ranks=st.integers(1, 3),
)
def test_same_products(width: int, out: int, rows: int, bias: bool, ranks: int) -> None:
    plain = made(width, out, bias)
    packed = copy.deepcopy(plain)
    assert pack(packed) == 4
    x = torch.randn(*[1] * (ranks - 1), rows, width).bfloat16()
    for a, b in zip(plain(x), packed(x), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer, old = getattr(packed, name), getattr(plain, name)
        assert torch.equal(layer.weight, old.weight) and (layer.bias is None) == (old.bias is None)
        assert layer.bias is None or torch.equal(layer.bias, old.bias)
        assert (layer.in_features, layer.out_features) == (old.in_features, old.out_features)


def test_siblings_share_a_product_only_while_their_input_is_the_same() -> None:
    layers = made()
    pack(layers)
    plain = copy.deepcopy(layers)
    assert all(type(x) is nn.Linear for x in plain.children())  # a copy is an ordinary model
    x, other = torch.randn(3, 12).bfloat16(), torch.randn(3, 12).bfloat16()
    assert torch.equal(layers.q_proj(x), plain.q_proj(x))
    assert torch.equal(layers.k_proj(other), plain.k_proj(other))  # another tensor
    assert torch.equal(layers.q_proj(x), plain.q_proj(x))
    x.mul_(2)  # the same tensor with other values
    assert torch.equal(layers.v_proj(x), plain.v_proj(x))
    with torch.inference_mode():
        y = torch.randn(3, 12).bfloat16()
        first = layers.q_proj(y).clone()
        y.mul_(2)
        assert not torch.equal(first, layers.q_proj(y)) and torch.equal(layers.k_proj(y), plain.k_proj(y))


def test_what_is_not_packed() -> None:
    assert not can_pack(nn.Linear(3, 3))  # float32
    assert not can_pack(nn.Embedding(3, 3).bfloat16())
    hooked = nn.Linear(3, 3).bfloat16()
    hooked.register_forward_hook(lambda *_: None)
    assert not can_pack(hooked)
    mixed = made()
    mixed.k_proj = nn.Linear(11, 3, bias=False).bfloat16()  # cannot be given the same input
    assert pack(mixed) == 4
    assert all(x.alone for x in mixed.children() if isinstance(x, PackedLinear))


def test_state_and_unpacking() -> None:
    layers = made(bias=True)
    before = {k: v.clone() for k, v in layers.state_dict().items()}
    pack(layers)
    after = layers.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    kept: dict[str, nn.Linear] = {}
    with unpacked(layers, kept):
        assert all(type(x) is nn.Linear for x in layers.children())
        inside = dict(layers.named_children())
    assert all(isinstance(x, PackedLinear) for x in layers.children())
    with unpacked(layers, kept):
        assert dict(layers.named_children()) == inside  # not made again
