"""Schedulers own the requests and order the halves of their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from decoding.engine import Commit, Engine
from decoding.request import Request


class SequentialScheduler:
    """Draft, then verify, for one group of at most `rows` requests; a free row is refilled at once."""

    def __init__(self, engine: Engine, rows: int) -> None:
        self.engine = engine
        self.rows = rows

    def run(self, requests: Iterable[Request], ended: Callable[[Commit], bool]) -> Iterator[Commit]:
        """Yield every commit, the prefill's first token included. `ended` takes each commit before it is yielded,
        and says whether its request is complete; it may shorten what the commit added."""
        waiting = iter(requests)
        more = True
        engine = self.engine
        try:
            while True:
                while more and len(engine.requests) < self.rows:
                    request = next(waiting, None)
                    if request is None:
                        more = False
                        break
                    commit = engine.admit(request)
                    if ended(commit):
                        engine.leave([request])
                    yield commit
                if not engine.requests:
                    return
                if not more:
                    engine.shrink()
                commits = engine.verify(engine.draft())
                engine.leave([c.request for c in commits if ended(c)])
                yield from commits
        finally:
            engine.close()
