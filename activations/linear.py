"""Linear layers as a CPU multiplies them fastest: weights in oneDNN's blocked layout, and layers that are given the
same input as one product.

`torch.nn.Linear` hands a CPU row-major weights, which the bfloat16 product of a few rows rearranges at every call: on
the machine of FINDINGS.md that takes twice the time of the product itself. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that are usually given the same input. Where they are not, only time is lost."""


class Product:
    """One weight [out, in], packed where that is faster, and the result of the latest input for all who share it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, takers: int = 1) -> None:
        """`takers`: how many layers will ask for each result."""
        self.packed = packs(weight)
        self.weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight
        self.bias = bias
        self._takers = takers
        self._left = 0
        self._input: torch.Tensor | None = None
        self._version = 0
        self._output: torch.Tensor | None = None

    @property
    def dense(self) -> torch.Tensor:
        """The weight in the usual layout."""
        return self.weight.to_dense() if self.packed else self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        """The product, computed once for all layers that ask for it with the same unchanged tensor."""
        if self._takers == 1 or x.is_inference():  # such a tensor does not tell whether it was changed
            return self(x)
        if self._output is None or self._input is not x or self._version != x._version:
            self._input, self._version, self._output, self._left = x, x._version, self(x), self._takers
        found = self._output
        self._left -= 1
        if self._left == 0:
            self._input = self._output = None
        return found


class PackedLinear(nn.Module):
    """Rows `start` to `stop` of a product, in the place of the `nn.Linear` that it was made of."""

    def __init__(self, product: Product, start: int, stop: int) -> None:
        super().__init__()
        self.product = product
        self.start, self.stop = start, stop
        self.in_features, self.out_features = int(product.weight.shape[1]), stop - start

    @property
    def alone(self) -> bool:
        """Whether the product is this layer's only."""
        return self.out_features == self.product.weight.shape[0]

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in] in the usual layout, made for the caller."""
        return self.product.dense[self.start : self.stop]

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        bias = self.product.bias
        return None if bias is None else bias[self.start : self.stop]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's part [..., out] of the product of x [..., in], which its neighbours share."""
        out = self.product.shared(x)
        return out if self.alone else out[..., self.start : self.stop]

    def dense(self) -> nn.Linear:
        """An ordinary layer with the same weights."""
        bias = self.bias
        made = nn.Linear(self.in_features, self.out_features, bias is not None, device="meta")
        made.weight = nn.Parameter(self.weight.clone(), requires_grad=False)
        if bias is not None:
            made.bias = nn.Parameter(bias.clone(), requires_grad=False)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """A copy of a model is an ordinary model."""
        return self.dense()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def packs(weight: torch.Tensor) -> bool:
    """Whether packing a weight [out, in] pays: bfloat16, on a CPU that multiplies it in hardware."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def can_pack(module: nn.Module) -> bool:
    """An ordinary linear layer whose weight packs, and that nobody watches."""
    return (
        type(module) is nn.Linear
        and packs(module.weight)
        and not hasattr(module, "_hf_hook")  # spread over devices
        and not (module._forward_hooks or module._forward_pre_hooks)
    )


def pack(model: nn.Module) -> int:
    """Replace the linear layers that can be packed; returns how many. A tied weight stays where else it is used."""
    count = 0
    for parent in list(model.modules()):
        children: dict[str, Any] = {name: child for name, child in parent.named_children() if can_pack(child)}
        groups = [names for names in TOGETHER if _alike([children.get(name) for name in names])]
        for names in (*groups, *((name,) for name in children if not any(name in group for group in groups))):
            layers = [children[name] for name in names]
            weight = torch.cat([layer.weight.detach() for layer in layers])
            bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
            product, start = Product(weight, bias, len(layers)), 0
            for name, layer in zip(names, layers, strict=True):
                stop = start + layer.out_features
                setattr(parent, name, PackedLinear(product, start, stop))
                start = stop
            count += len(layers)
    return count


def _alike(layers: Sequence[Any]) -> bool:
    """Whether all are there and take the same width, with a bias each or none."""
    if any(layer is None for layer in layers):
        return False
    kinds = {(layer.in_features, layer.bias is None) for layer in layers}
    return len(kinds) == 1


@contextmanager
def unpacked(model: nn.Module, kept: dict[str, nn.Linear]) -> Iterator[None]:
    """Within, the model has ordinary linear layers; they are made once and kept in `kept` for the next time."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    for name, module in packed.items():
        if name not in kept:
            kept[name] = module.dense()
        model.set_submodule(name, kept[name])
    try:
        yield
    finally:
        for name, module in packed.items():
            model.set_submodule(name, module)
