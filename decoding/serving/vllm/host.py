"""The switch's rule on the host, for engines that compute there: a step costs nothing for the length of a context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from activations.matching import MatchConfig
from decoding.serving.contexts import Context, Contexts, Gap
from probes.artifact import Probe

if TYPE_CHECKING:
    from decoding.serving.vllm.counters import Counters


class Known(Protocol):
    """What the engine knows of a request."""

    def get_token_id(self, idx: int) -> int:
        """The token at a position; negative where the host does not know it."""
        ...


@dataclass(frozen=True)
class Step:
    """What the target has just computed, and what it wrote: R requests, side by side in N tokens."""

    names: Sequence[str]
    """Of the R requests."""
    unused: Sequence[bool]
    """Their drafts will not be used: a prompt is still being read."""
    tokens: torch.Tensor
    """int [N]: what the target read; behind a request's end stand rejected drafts."""
    positions: torch.Tensor
    """int [N]: where in its text."""
    starts: torch.Tensor
    """int [R + 1]: where each request's tokens start, and N."""
    ends: torch.Tensor
    """int [R]: where each request's last verified token is, whose state is the anchor's."""
    pending: torch.Tensor
    """int [R]: the token that follows it."""
    states: torch.Tensor
    """[R, width] of the anchors."""


class HostCopies:
    """What a step copies."""

    def __init__(self, rows: Sequence[Sequence[int] | None]) -> None:
        """For each request the copied tokens, none of them where no draft is used, or None where the head drafts."""
        self.rows = rows

    def everywhere(self) -> bool:
        """No request needs another draft."""
        return all(row is not None for row in self.rows)

    def over(self, neural: torch.Tensor) -> torch.Tensor:
        """The drafts int64 [R, K]: `neural` [R, K], and copies in the place of those that were chosen."""
        chosen = [i for i, row in enumerate(self.rows) if row]
        if chosen and neural.shape[1]:
            tokens = [list(self.rows[i] or ())[: neural.shape[1]] for i in chosen]
            neural[torch.tensor(chosen)] = torch.tensor(tokens, dtype=neural.dtype)
        return neural


class HostSwitch:
    """Copies where a suffix match exists and the probe's output at the anchor reaches tau."""

    def __init__(
        self,
        probe: Probe,
        config: MatchConfig,
        tau: float,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
        counters: Counters | None = None,
    ) -> None:
        """See `DeviceSwitch`."""
        self.probe, self.tau = probe, tau
        self.contexts: Contexts[str] = Contexts(config)
        self._agree, self._counters = agree, counters

    def decide(self, step: Step, requests: Mapping[str, Known]) -> HostCopies:
        """What to copy; `requests` are all that run, by name."""
        tokens, positions, starts = step.tokens.tolist(), step.positions.tolist(), step.starts.tolist()
        found: list[Sequence[int] | None] = []
        contexts = []
        for row, (end, pending) in enumerate(zip(step.ends.tolist(), step.pending.tolist(), strict=True)):
            first = starts[row]
            request = requests[step.names[row]]
            context = self.contexts.of(step.names[row], request)
            here = tokens[first : end + 1]
            drafted = starts[row + 1] - first - 1
            if context.copied and drafted and positions[first] == len(context) - 1 and self._counters:
                self._counters.settled(min(context.copied, drafted), len(here) - 1)
            context.copied = 0
            contexts.append(context)
            if step.unused[row]:
                _write(context, positions[first], here, request)
                found.append(())
            elif _write(context, positions[first], [*here, pending], request):
                context.cut(positions[first] + len(here) + 1)  # a text that is written again may be another one
                found.append(context.copy() or None)
            else:
                found.append(None)
        asked = [row for row, copy in enumerate(found) if copy]
        scores = self._scores(step.states[asked]) if asked else []
        for row, score in zip(asked, scores, strict=True):
            if score < self.tau:
                found[row] = None
            else:
                contexts[row].copied = len(found[row] or ())
        copies = HostCopies(found)
        if self._counters:
            drafting = sum(row is None or len(row) > 0 for row in found)
            self._counters.decided(scores, sum(map(bool, found)), drafting, bool(drafting) and copies.everywhere())
        if len(self.contexts) > len(requests):
            self.contexts.keep(requests.__contains__)
        return copies

    def _scores(self, states: torch.Tensor) -> list[float]:
        scores = self.probe.score(states)
        return (self._agree(scores) if self._agree else scores).tolist()


def _write(context: Context, start: int, tokens: Sequence[int], request: Known) -> bool:
    """False where the engine itself does not know what stands before."""
    try:
        context.write(start, tokens, request.get_token_id)
    except Gap:
        return False
    return True
