"""Schedulers own the requests and order the halves of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from decoding.engine import LOG, Commit, Engine
from decoding.request import Request


class SequentialScheduler:
    """Draft, then verify, for as many requests as the engine has rows; a free row is refilled at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, requests: Iterable[Request], ended: Callable[[Commit], bool]) -> Iterator[Commit]:
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
                        commit = engine.admit(request)
                    except Exception as error:
                        if not out_of_memory(error):
                            raise
                        if engine.requests:
                            held, crowd = request, len(engine.requests)
                            break
                        commit = cut(request)
                    if ended(commit):
                        engine.leave([request])
                    yield commit
                if not engine.requests:
                    return
                try:
                    commits = engine.verify(engine.draft())
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    commits = [cut(max(engine.requests, key=lambda r: len(r.tokens)))]
                engine.leave([c.request for c in commits if ended(c)])
                yield from commits
        finally:
            engine.leave(list(engine.requests))


def out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, in Python, on a GPU or in torch's CPU allocator, which has no type of its own for it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("allocate memory" in str(error) or "not enough memory" in str(error))
    )


def cut(request: Request) -> Commit:
    """The end of a request for which there is no memory: it keeps what it has."""
    LOG.warning("Out of memory: request %d ends after %d tokens.", request.number, len(request.generated))
    return Commit(request, [], [], cut="out of memory")
