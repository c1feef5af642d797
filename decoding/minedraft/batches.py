"""The two batches of overlapped decoding: while one is verified, the other is drafted for.

Source: MineDraft, arXiv 2603.18016.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


@dataclass(frozen=True)
class HalfStep(Generic[R]):
    """What happens at the same time."""

    verify: list[R]
    """Have a draft, and it is their turn."""
    draft: list[R]
    """Their turn comes next, and they have no draft yet."""


@dataclass
class _Turn:
    """Where a request stands."""

    side: int
    drafted: bool = False
    """It has a draft that is not verified yet."""
    waited: int = 0
    """Half-steps in a row in which it was to sit out."""


class BatchManager(Generic[R]):
    """Says who is verified and who is drafted for, and keeps both batches of one size. Knows of no tensors and no time.

    A half-step verifies one batch and drafts for the other; then they change places. A request that is moved to the
    other batch sits out one half-step: what was drafted for it stays valid, because nothing of it was verified since.
    With a single request the half-steps draft and verify in turn: plain speculative decoding.
    """

    def __init__(self) -> None:
        self.drafting = 0
        """The batch that is drafted for in this half-step; the other one is verified."""
        self._turns: dict[R, _Turn] = {}
        self._began = False

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, request: object) -> bool:
        return request in self._turns

    def batch(self, side: int) -> list[R]:
        """The requests of batch 0 or 1, the oldest first."""
        return [r for r, turn in self._turns.items() if turn.side == side]

    def admit(self, request: R) -> None:
        """Before the first half-step new requests fill both batches alike; later ones join the batch that is drafted
        for, so that they have a draft when their turn comes. Raises ValueError for a request that is in a batch."""
        if request in self._turns:
            raise ValueError(f"request {request!r} is in a batch already")
        side = self.drafting
        if not self._began and len(self.batch(side)) > len(self.batch(1 - side)):
            side = 1 - side
        self._turns[request] = _Turn(side)

    def leave(self, requests: Iterable[R]) -> None:
        """They have ended or were given up; those that are in no batch are passed over."""
        for request in requests:
            self._turns.pop(request, None)
        if not self._turns:  # nothing runs: the next request begins anew
            self.drafting, self._began = 0, False

    def half_step(self) -> HalfStep[R]:
        """Who is verified and who is drafted for now, after evening out the batches. Nothing changes until `drafted`,
        `verified` and `flip` are called."""
        self._began = True
        self._even_out()
        verify = [r for r in self.batch(1 - self.drafting) if self._turns[r].drafted]
        draft = [r for r in self.batch(self.drafting) if not self._turns[r].drafted]
        return HalfStep(verify, draft)

    def drafted(self, requests: Iterable[R]) -> None:
        """They have a draft now; those that have left are passed over."""
        for request in requests:
            if request in self._turns:
                self._turns[request].drafted = True

    def verified(self, requests: Iterable[R]) -> None:
        """Their draft is used up."""
        for request in requests:
            if request in self._turns:
                self._turns[request].drafted = False
                self._turns[request].waited = 0

    def flip(self) -> None:
        """The half-step is over: the batches change places."""
        self.drafting = 1 - self.drafting

    def _even_out(self) -> None:
        """Move requests from the larger batch until the sizes differ by one at most.

        Who has waited least is moved, so that nobody is passed over again and again: to be moved twice in a row a
        request needs a batch of nothing but such, half of which ended in between.
        """
        sides = self.batch(0), self.batch(1)
        larger = int(len(sides[1]) > len(sides[0]))
        surplus = abs(len(sides[0]) - len(sides[1])) // 2
        for request in sorted(sides[larger], key=lambda r: self._turns[r].waited)[:surplus]:
            turn = self._turns[request]
            turn.side, turn.waited = 1 - larger, turn.waited + 1
