"""Schedulers own the requests and order the halves of their steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence

import torch

from decoding.engine import LOG, Commit, Engine
from decoding.request import Request

ABORTED = "aborted"
"""Why a request ends that was given up from outside."""


class Scheduler(ABC):
    """As many requests at a time as the engine has room for; a free place is filled at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._aborted: set[Request] = set()

    def run(self, requests: Iterable[Request], ended: Callable[[Commit], bool]) -> Generator[Commit, None, None]:
        """Yield every commit, the prefill's first token included. `ended` takes each commit before it is yielded,
        and says whether its request is complete; it may shorten what the commit added."""
        waiting = iter(requests)
        more = True
        held: Request | None = None  # found no memory, and waits until fewer than `crowd` requests run
        engine = self.engine
        rows = crowd = engine.rows
        try:
            while True:
                while more and len(engine.requests) < crowd:
                    request = held or next(waiting, None)
                    held, crowd = None, rows
                    if request is None:
                        more = False
                        break
                    try:
                        commit = given_up(request) if request in self._aborted else engine.admit(request)
                    except Exception as error:
                        if not out_of_memory(error):
                            raise
                        if engine.requests:
                            held, crowd = request, len(engine.requests)
                            break
                        commit = cut(request)
                    over = ended(commit)
                    if not commit.cut:  # else it has not come in
                        self._enter(request)
                        self._leave([request] if over else [])
                    yield commit
                if not engine.requests:
                    return
                yield from self._advance(ended)
        finally:
            self._leave(list(engine.requests))
            self._aborted.clear()

    def abort(self, request: Request) -> None:
        """Give a request up, from any thread: before the next step its last commit says so, and it leaves. One that
        has ended is not known any more; one that is yet to come does not come in."""
        self._aborted.add(request)

    def _advance(self, ended: Callable[[Commit], bool]) -> list[Commit]:
        """The commits of the next step, whose ended requests have left."""
        engine = self.engine
        commits = [given_up(r) for r in engine.requests if r in self._aborted]
        self._aborted.difference_update(c.request for c in commits)
        if not commits:
            try:
                commits = self._step()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                commits = [cut(max(engine.requests, key=lambda r: len(r.tokens)))]
        self._leave([c.request for c in commits if ended(c) or c.cut])
        return commits

    # -- what the kinds differ in ---------------------------------------------------------------------

    @abstractmethod
    def _step(self) -> list[Commit]:
        """Draft and verify, for whom it is time."""

    def _enter(self, request: Request) -> None:  # noqa: B027 - not every kind takes note
        """A request has been admitted, and goes on."""

    def _leave(self, requests: Sequence[Request]) -> None:
        """Requests that were admitted have ended, or are given up."""
        self.engine.leave(requests)


class SequentialScheduler(Scheduler):
    """Draft, then verify, for all requests together."""

    def _step(self) -> list[Commit]:
        return self.engine.verify(self.engine.draft())


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, in Python, on a GPU or in torch's CPU allocator, which has no type of its own for it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "not enough memory" in str(error))
    )


def cut(request: Request) -> Commit:
    """The end of a request for which there is no memory: it keeps what it has."""
    LOG.warning("Out of memory: request %d ends after %d tokens.", request.number, len(request.generated))
    return Commit(request, [], [], cut="out of memory")


def given_up(request: Request) -> Commit:
    """The end of a request that was aborted: it keeps what it has."""
    return Commit(request, [], [], cut=ABORTED)
