"""The MLP probe: one or more hidden layers of ReLUs, for what a linear probe cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.nn.functional import relu, softplus

from probes.base import BinaryProbe, Layer, column, fit_device
from probes.rows import Mask, ShardedStore, StateSource

LEAST_SPREAD = 1e-3
"""Smallest standard deviation that a state's entry is divided by, as a share of the RMS of all entries."""
Tensors = list[torch.Tensor]


class MLPProbe(BinaryProbe):
    """A multilayer perceptron over states [rows, width], trained by AdamW on minibatches of shuffled rows.

    Entries are brought to mean 0 and spread 1 first; after the fit this is folded into the first layer, so that
    `layers()` reads raw states. With `groups`, a share of them is held out and the fit stops where their loss no
    longer falls; without, it runs for `max_epochs`: held-out rows of documents that are fitted, too, would not tell.
    From a store, shards come in a new order each epoch and their rows are shuffled; memory holds one shard.
    """

    def __init__(
        self,
        *,
        hidden: Sequence[int] = (64,),
        weight_decay: float = 1e-2,
        learning_rate: float = 3e-3,
        batch_size: int = 256,
        max_epochs: int = 40,
        patience: int = 4,
        holdout: float = 0.1,
        seed: int = 0,
        device: str | None = None,
    ):
        """
        hidden: units of each hidden layer; (64,) and (64, 32) are one and two layers.
        weight_decay: AdamW's, of the weights and not of the biases; 0 or more.
        learning_rate: AdamW's; above 0.
        batch_size: rows in a minibatch.
        max_epochs: most passes over the rows.
        patience: epochs without a better held-out loss after which the fit stops; the best epoch's weights stay.
        holdout: share of the groups that is held out, at least one.
        seed: decides first weights, order and which groups are held out.
        device: where the fit runs; None is a GPU for float32 states if there is one, else the CPU.
        """
        self.hidden = hidden
        self.weight_decay = weight_decay
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.patience = patience
        self.holdout = holdout
        self.seed = seed
        self.device = device

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """Fit to states X [rows, width] and two-class labels y [rows]; `groups` [rows] are never split."""
        states, second, weights, kept = self._held(X, y, sample_weight)
        found = None if groups is None else column(groups, "groups", len(kept))[kept]
        self._learn(states, second, weights, found)
        return self

    def fit_store(
        self,
        store: ShardedStore,
        sites: str | Sequence[str],
        y: ArrayLike,
        rows: Mask | None = None,
        sample_weight: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> Self:
        """As LinearProbe.fit_store; `groups` [rows of the store] are never split."""
        states, second, weights, kept = self._stored(store, sites, y, rows, sample_weight)
        found = None if groups is None else column(groups, "groups", len(kept))[kept]
        self._learn(states, second, weights, found)
        return self

    def _check(self) -> None:
        for name, low in (("batch_size", 1), ("max_epochs", 1), ("patience", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {low} or more")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(f"hidden is {self.hidden!r}; give the units of each hidden layer, such as (64,)")
        if not self.learning_rate > 0 or not self.weight_decay >= 0:
            raise ValueError(
                f"learning_rate is {self.learning_rate!r} and weight_decay {self.weight_decay!r}: the first must be "
                "above 0, the second 0 or more"
            )
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout is {self.holdout!r}; it must lie between 0 and 1")

    def _learn(
        self,
        states: StateSource,
        second: Mask,
        weights: NDArray[np.floating],
        groups: NDArray[np.generic] | None = None,
    ) -> None:
        """Set `layers_`, `n_iter_` (epochs) and `best_loss_` (of the held-out groups, or None)."""
        self._check()
        rng = np.random.default_rng(self.seed)
        fitted, held = self._hold_out(second, groups, rng)
        inner, outer = (states, None) if held is None else (states.select(fitted), states.select(held))
        device = fit_device(self.device, states.dtype)
        weights = weights / weights[fitted].mean()
        mean, spread = _moments(inner, torch.from_numpy(weights[fitted]))
        mean, spread = mean.to(device), spread.to(device)
        signs = torch.from_numpy(np.where(second, 1.0, -1.0)).to(device, states.dtype)
        shares = torch.from_numpy(weights).to(device, states.dtype)
        parts = [(signs[torch.from_numpy(m)], shares[torch.from_numpy(m)]) for m in (fitted, held) if m is not None]
        net = self._start(states.width, rng, states.dtype, device)
        solver = torch.optim.AdamW(
            [
                {"params": net[0::2], "weight_decay": self.weight_decay},
                {"params": net[1::2], "weight_decay": 0.0},
            ],
            lr=self.learning_rate,
        )
        best, waited, kept = float("inf"), 0, [p.detach().clone() for p in net]
        for epoch in range(1, self.max_epochs + 1):
            self.n_iter_ = epoch
            for number in rng.permutation(inner.shards):
                rows, block = inner.shard(int(number))
                order = torch.from_numpy(rng.permutation(len(block)))
                for batch in order.split(self.batch_size):
                    at = (batch + rows.start).to(device)
                    x = (block[batch].to(device) - mean) / spread
                    loss = _loss(_forward(net, x), parts[0][0][at], parts[0][1][at])
                    solver.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    solver.step()
            if outer is None:
                kept = [p.detach().clone() for p in net]
                continue
            value = _held_out_loss(net, outer, mean, spread, *parts[1])
            waited = 0 if value < best else waited + 1
            if value < best:
                best, kept = value, [p.detach().clone() for p in net]
            if waited == self.patience:
                break
        self.best_loss_ = None if outer is None else best
        doubles = [p.double().cpu() for p in kept]
        mean, spread = mean.double().cpu(), spread.double().cpu()
        doubles[0] = doubles[0] / spread
        doubles[1] = doubles[1] - doubles[0] @ mean
        arrays = [p.to(states.dtype).numpy() for p in doubles]
        self.layers_: list[Layer] = list(zip(arrays[0::2], arrays[1::2], strict=True))

    def _hold_out(
        self, second: Mask, groups: NDArray[np.generic] | None, rng: np.random.Generator
    ) -> tuple[Mask, Mask | None]:
        """Masks of the rows that are fitted and of those that say when to stop."""
        if groups is None:
            return np.ones(len(second), dtype=bool), None
        names = np.unique(groups)
        if len(names) < 2:
            raise ValueError(f"early stopping holds out whole groups, and there is {len(names)}: leave groups out")
        count = min(max(1, round(self.holdout * len(names))), len(names) - 1)
        held: Mask = np.isin(groups, rng.permutation(names)[:count])
        for what, part in (("held-out", held), ("fitted", ~held)):
            if len(np.unique(second[part])) < 2:
                raise ValueError(
                    f"the rows of the {what} groups ({count} of {len(names)} groups are held out) have one class "
                    "only: give more groups, another seed or another holdout"
                )
        return ~held, held

    def _start(self, width: int, rng: np.random.Generator, dtype: torch.dtype, device: torch.device) -> Tensors:
        """Weights [out, in] and biases [out] of each layer in turn."""
        sizes = [width, *self.hidden, 1]
        net: Tensors = []
        for enters, leaves in pairwise(sizes):
            weight = rng.normal(size=(leaves, enters)) * (2 / enters) ** 0.5
            net += [torch.from_numpy(weight).to(device, dtype), torch.zeros(leaves, dtype=dtype, device=device)]
        return [p.requires_grad_() for p in net]

    def layers(self) -> list[Layer]:
        return self.layers_


def _forward(net: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Logits [rows] of standardised states."""
    for weight, bias in zip(net[0:-2:2], net[1:-2:2], strict=True):
        x = relu(x @ weight.T + bias)
    return x @ net[-2][0] + net[-1]


def _loss(logits: torch.Tensor, signs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Mean weighted log loss."""
    return (shares * softplus(-signs * logits)).mean()


@torch.no_grad()
def _held_out_loss(
    net: Tensors, states: StateSource, mean: torch.Tensor, spread: torch.Tensor, signs: torch.Tensor,
    shares: torch.Tensor,
) -> float:  # fmt: skip
    total = 0.0
    for rows, block in states.blocks():
        logits = _forward(net, (block.to(mean.device) - mean) / spread)
        total += float((shares[rows] * softplus(-signs[rows] * logits)).double().sum())
    return total / float(shares.sum())


def _moments(states: StateSource, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and spread [width] of the entries; a spread is never much smaller than the RMS of all."""
    weights = weights.double() / weights.double().sum()
    first, square = (torch.zeros(states.width, dtype=torch.float64) for _ in range(2))
    for rows, block in states.blocks():
        block = block.double()
        first += weights[rows] @ block
        square += weights[rows] @ block.square()
    rms = float(square.mean()) ** 0.5
    spread = (square - first.square()).clamp_min(0).sqrt().clamp_min(LEAST_SPREAD * rms or 1.0)
    return first.to(states.dtype), spread.to(states.dtype)
