"""Which request holds which row of a KV cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from activations.cache import KVCache
from decoding.request import Request


class Rows:
    """Rows of one cache, held by requests from the first row on without gaps.

    A forward is given the rows of some requests as a cache of its own, which shares the memory of the whole: what
    the other rows hold costs it nothing.
    """

    def __init__(self, most: int) -> None:
        self.cache = KVCache(most)
        self.requests: list[Request] = []
        """In the order of their rows."""
        self._row: dict[Request, int] = {}

    def __contains__(self, request: Request) -> bool:
        return request in self._row

    def length(self, request: Request) -> int:
        """Tokens that the request's row holds."""
        return self.cache.lengths[self._row[request]]

    def free(self, keep: int = 0) -> KVCache:
        """The first free row as a cache to prefill, with the first `keep` tokens of what it held. Raises IndexError
        where no row is free."""
        row = len(self.requests)
        if row == self.cache.rows:
            raise IndexError(f"all {row} rows are held")
        cache = self.cache.view(row, row + 1)
        cache.crop_row(0, keep)
        return cache

    def hold(self, requests: Sequence[Request]) -> None:
        """What was prefilled in the first free row is now held by these requests, a row each."""
        row = len(self.requests)
        if len(requests) > 1:
            rows = self.cache.view(row, row + len(requests))
            rows.select([0] * len(requests))
        for at, request in enumerate(requests, start=row):
            self._row[request] = at
            self.requests.append(request)

    def widen(self, most: int) -> None:
        """Room for that many rows."""
        have = self.cache.rows
        if most > have:
            self.cache.select([*range(have), *[0] * (most - have)])
            self.cache.lengths[have:] = [0] * (most - have)

    def pass_on(self, before: Request, request: Request) -> None:
        """The request takes over the row of another one, with what it holds."""
        row = self._row[request] = self._row.pop(before)
        self.requests[row] = request

    def leave(self, requests: Sequence[Request]) -> None:
        """Rows are given up, and the last ones move into the gaps; requests without a row have none to give. Without
        another to move there, what a row held stays in it until it is prefilled."""
        for request in requests:
            if request not in self._row:
                continue
            row = self._row.pop(request)
            last = self.requests.pop()
            if last is not request:
                self.cache.move_row(len(self.requests), row)
                self.requests[row], self._row[last] = last, row

    def take(self, requests: Sequence[Request]) -> KVCache:
        """The rows of these requests, in this order, as a cache that shares their memory: for one forward and its
        commit. Rows change places where they do not lie so."""
        n = len(requests)
        offsets = Counter(self._row[request] - i for i, request in enumerate(requests))
        start = max((o for o in offsets if 0 <= o <= len(self.requests) - n), key=lambda o: offsets[o], default=0)
        for row, request in enumerate(requests, start=start):
            at = self._row[request]
            if at != row:
                self.cache.swap_rows(at, row)
                other = self.requests[row]
                self.requests[row], self.requests[at] = request, other
                self._row[request], self._row[other] = row, at
        return self.cache.view(start, start + n)

    def order(self, requests: Sequence[Request]) -> list[Request]:
        """The requests as their rows lie."""
        return sorted(requests, key=self._row.__getitem__)
