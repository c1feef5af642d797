"""Overlapped decoding (MineDraft): two batches take turns, one being drafted for while the other is verified.

Source: arXiv 2603.18016.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decoding.engine import Commit, Draft, Engine
from decoding.minedraft.batches import BatchManager
from decoding.request import Request
from decoding.scheduler import Scheduler


class OverlappedScheduler(Scheduler):
    """Asks the drafters about one batch, verifies the other meanwhile, and takes the answers.

    Only a drafter with a process or a device of its own (`RemoteDrafter`) gains time by it: any other drafts when its
    answer is taken. A request is drafted for after its own last verification, never before, so that its text is
    the one that it has in any other scheduler.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.batches: BatchManager[Request] = BatchManager()
        self._drafts: dict[Request, list[Draft]] = {}

    def _enter(self, request: Request) -> None:
        self.batches.admit(request)

    def _leave(self, requests: Sequence[Request]) -> None:
        super()._leave(requests)
        self.batches.leave(requests)
        for request in requests:
            self._drafts.pop(request, None)

    def _step(self) -> list[Commit]:
        """Half a step of every request: the one batch's first half, the other one's second half. The target leaves as
        many threads as the drafters' processes keep busy."""
        threads = torch.get_num_threads()
        elsewhere = sum(getattr(drafter, "cpu_threads", 0) for drafter in self.engine.plan.drafters)
        torch.set_num_threads(max(threads - elsewhere, 1))
        try:
            return self._half_step()
        finally:
            torch.set_num_threads(threads)

    def _half_step(self) -> list[Commit]:
        engine, now = self.engine, self.batches.half_step()
        asked = engine.begin(now.draft)
        try:
            commits = engine.verify([draft for request in now.verify for draft in self._drafts[request]])
        finally:  # if that found no memory, drafts that were not verified stay valid
            for draft in engine.finish(asked):
                self._drafts.setdefault(draft.request.group, []).append(draft)
            self.batches.drafted(now.draft)
        for request in now.verify:
            del self._drafts[request]
        self.batches.verified(now.verify)
        self.batches.flip()
        return commits
