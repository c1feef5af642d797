"""Times of a step from published figures: bytes over bandwidth, or operations over peak, whichever takes longer.

Source: Williams et al. 2009 (Commun. ACM 52, 65-76).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device, by its maker's figures."""

    name: str
    bandwidth: float
    """GB/s."""
    flops: float
    """TFLOPS of dense bfloat16."""
    memory: float
    """GB."""
    source: str


@dataclass(frozen=True)
class ModelSize:
    """A decoder in bfloat16."""

    name: str
    parameters: float
    """Billions."""
    blocks: int
    kv_width: int
    """KV heads times head width."""
    source: str

    @property
    def weight_bytes(self) -> float:
        return 2e9 * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Of one token: keys and values of all blocks."""
        return 2 * 2 * self.blocks * self.kv_width


HARDWARE = {
    h.name: h
    for h in (
        Hardware("a100", 2039, 312, 80, "NVIDIA A100 80GB SXM data sheet: 2,039 GB/s, 312 TFLOPS bfloat16"),
        Hardware(
            "h100", 3350, 989, 80, "NVIDIA H100 SXM data sheet: 3.35 TB/s, 1,979 TFLOPS with sparsity, half dense"
        ),
        Hardware(
            "h200", 4800, 989, 141, "NVIDIA H200 SXM data sheet: 4.8 TB/s, 1,979 TFLOPS with sparsity, half dense"
        ),
    )
}
MODELS = {
    m.name: m
    for m in (
        ModelSize("0.5b", 0.494, 24, 128, "Qwen2.5-0.5B: config.json, 494 M parameters"),
        ModelSize("1b", 1.236, 16, 512, "Llama-3.2-1B: config.json, 1.24 B parameters"),
        ModelSize("8b", 8.03, 32, 1024, "Llama-3.1-8B: config.json, 8.03 B parameters"),
        ModelSize("32b", 32.8, 64, 1024, "Qwen3-32B: config.json, 32.8 B parameters"),
        ModelSize("70b", 70.6, 80, 1024, "Llama-3.3-70B: config.json, 70.6 B parameters"),
    )
}
REACHED = 0.8
"""Share of bandwidth and peak that kernels are assumed to reach."""
BLOCK_US = 10.0
"""Assumed microseconds a block costs at least, whatever its size: kernels that start one after the other."""


@dataclass(frozen=True)
class Roofline:
    """Times of a target and a draft model on the same kind of device."""

    hardware: Hardware
    target: ModelSize
    draft_model: ModelSize
    context: int = 1024
    """Tokens in each request's cache."""
    devices: int = 1
    """Over which the target is spread, without loss; the draft model has one."""
    shared: bool = False
    """The drafter works on the target's own device: bytes and operations of both add up, only latency hides."""
    rho: float = 0.0
    """Further contention: an overlapped half-step takes 1 + rho times as long."""

    def draft(self, rows: int, k: int) -> float:
        return k * self._forward(self.draft_model, rows, rows, 1)

    def verify(self, rows: int, k: int) -> float:
        return self._forward(self.target, rows * (k + 1), rows, self.devices)

    def together(self, drafted: int, verified: int, k: int) -> float:
        step = max(self.draft(drafted, k), self.verify(verified, k))
        if self.shared:
            moved, done = self._work(self.target, verified * (k + 1), verified)
            more_moved, more_done = self._work(self.draft_model, drafted, drafted)
            step = max(step, self._ms(moved + k * more_moved, done + k * more_done, self.devices))
        return step * (1 + self.rho)

    def extrapolated(self, rows: Iterable[int], ks: Iterable[int]) -> list[str]:
        return []  # nothing is measured

    def _forward(self, model: ModelSize, tokens: int, rows: int, devices: int) -> float:
        return max(self._ms(*self._work(model, tokens, rows), devices), model.blocks * BLOCK_US / 1e3)

    def _work(self, model: ModelSize, tokens: int, rows: int) -> tuple[float, float]:
        """Bytes that are read, and operations."""
        return model.weight_bytes + rows * self.context * model.kv_bytes, 2e9 * model.parameters * tokens

    def _ms(self, moved: float, done: float, devices: int) -> float:
        reached = REACHED * devices
        return 1e3 * max(moved / (self.hardware.bandwidth * 1e9), done / (self.hardware.flops * 1e12)) / reached


def devices_for(hardware: Hardware, *models: ModelSize, free: float = 0.2) -> int:
    """The fewest devices, a power of 2, that hold the weights and leave a share of their memory free."""
    least = weights_gb(*models) / (hardware.memory * (1 - free))
    return 2 ** max(math.ceil(math.log2(least)), 0)


def weights_gb(*models: ModelSize) -> float:
    """What the weights of these models take together, in GB."""
    return sum(model.weight_bytes for model in models) / 1e9
