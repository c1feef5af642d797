"""The switch's rule on the device that the engine runs on: fixed shapes, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from activations.matching import MatchConfig, TensorMatches, reference
from activations.matching.device import backend_for
from probes.artifact import Probe

SKIPS = 2
"""Up to so many requests, a step asks whether all of them copy before the head makes its further passes. The answer
costs a wait for the target's forward, which the host otherwise runs ahead of; that all of many requests copy at once is
too rare to wait for."""


class Texts(NamedTuple):
    """The contexts of a batch of R requests: buffer[row, :lengths[row]], pending token included, for each of `rows`."""

    buffer: torch.Tensor
    """int32 [slots, capacity], contiguous."""
    lengths: torch.Tensor
    """int32 or int64 [slots]."""
    rows: torch.Tensor
    """int32 or int64 [R]: the slot of each request."""


class Copies(NamedTuple):
    """What a step copies, and why."""

    tokens: torch.Tensor
    """int32 [R, K]: what followed the longest match of each context's end; -1 without one. The next decision
    overwrites it."""
    scores: torch.Tensor
    """float32 [R]: copy intent."""
    eligible: torch.Tensor
    """bool [R]: a draft of the request will be used."""
    asked: torch.Tensor
    """bool [R]: of these, the ones with a match, whose score decides."""
    chosen: torch.Tensor
    """bool [R]: of these, the ones that copy."""

    def over(self, neural: torch.Tensor) -> torch.Tensor:
        """The drafts int64 [R, n]: `neural` [R, n <= K], and copies in the place of the chosen ones."""
        return torch.where(self.chosen[:, None], self.tokens[:, : neural.shape[1]], neural).long()

    def everywhere(self) -> bool:
        """No request needs another draft. Waits for the device."""
        return bool((self.chosen | ~self.eligible).all())


class DeviceSwitch:
    """Copies where a suffix match exists and the probe's output at the anchor reaches tau."""

    def __init__(
        self,
        probe: Probe,
        config: MatchConfig,
        tau: float,
        requests: int,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """At most `requests` are decided at a time. `config` says how long a match and a copy are; the first candidate
        alone is looked at. `agree` makes one rank's scores every rank's: where ranks compute one model together, they
        must draft the same tokens, whatever the last bit of their states."""
        self.probe = probe
        self.config = config
        self.tau = tau
        self._requests = requests
        self._agree = agree
        self._find: Callable[[Texts], TensorMatches] | None = None

    def decide(self, states: torch.Tensor, texts: Texts, eligible: torch.Tensor) -> Copies:
        """`states` [R, width] of the anchors, any float dtype; `eligible` bool [R]."""
        scores = self.probe.score(states)
        if self._agree is not None:
            scores = self._agree(scores)
        if self._find is None:
            self._find = self._finder(texts.buffer)
        matches = self._find(texts)
        tokens = matches.tokens[:, 0]
        asked = eligible & (tokens >= 0).all(dim=1)  # an engine marks tokens that it does not know yet as negative
        return Copies(tokens, scores, eligible, asked, asked & (scores >= self.tau))

    def _finder(self, buffer: torch.Tensor) -> Callable[[Texts], TensorMatches]:
        # where a prompt ends is told of a match and decides nothing here: any tensor of the right shape will do
        if backend_for(buffer.device) != "triton":
            return lambda t: reference.find_matches(t.buffer, t.lengths, t.lengths, self.config, t.rows)
        from activations.matching import kernel  # needs Triton

        space = kernel.Workspace.of(buffer, self.config, rows=self._requests)
        return lambda t: kernel.find_matches(t.buffer, t.lengths, t.lengths, self.config, space, t.rows)
