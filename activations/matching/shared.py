"""What finished texts say about how a text goes on: a store that requests share, scored by frequency.

Compare SuffixDecoding (arXiv 2411.04975), which does this with suffix trees.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

SHIFT = 32
"""A place in the store is the number of its text above the position in it."""


@dataclass(frozen=True)
class SharedConfig:
    """How much a shared store holds, and what it hands out."""

    max_tokens: int = 200_000
    """Most tokens held (about 250 bytes each); the oldest texts make room."""
    kappa: int = 5
    """Shortest match, in tokens."""
    max_length: int = 32
    """Match lengths are measured up to this many tokens."""
    depth: int = 20
    """Most tokens of a candidate."""
    nodes: int = 32
    """Most tokens of all candidates together, those of equal prefixes counted once."""
    factor: float = 1.0
    """A candidate has at most this many tokens for each matched one: short matches say little about the far."""
    occurrences: int = 32
    """Most occurrences counted, the most recent ones."""
    min_share: float = 0.1
    """A token is left out if fewer than this share of the counted occurrences go on to it."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "kappa", "depth", "nodes", "occurrences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.max_length < self.kappa:
            raise ValueError(f"max_length is {self.max_length}; it must be at least kappa ({self.kappa})")
        if not self.factor > 0:
            raise ValueError(f"factor is {self.factor}; it must be above 0")
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share is {self.min_share}; a share lies in [0, 1]")


@dataclass(frozen=True, slots=True)
class SharedMatches:
    """What a store knows of a suffix."""

    length: int
    """Longest match among the counted occurrences, up to `max_length`; 0 = none."""
    count: int
    """Occurrences of the last kappa tokens in the whole store."""
    candidates: tuple[tuple[int, ...], ...]
    """Tokens that followed, the highest score first."""
    scores: tuple[float, ...]
    """For each candidate the sum over its tokens of the share of counted occurrences that go on to them: how many
    of them would be right in such a text."""


NOTHING = SharedMatches(0, 0, (), ())


class SharedStore:
    """Texts of requests that have ended, and what followed each of their kappa-grams.

    Rules: a text enters by `add`, whole and once, when its request has ended; until then nothing of it is seen by
    anybody, itself included. Stores know nothing of each other. The store only grows by `add`, only shrinks by
    dropping its oldest texts when `max_tokens` is reached, and `reset` empties it. A match never crosses from one
    text into another. Texts may be private: a store is to be shared only by those who may see each other's.

    `add` costs about two microseconds a token. `find` looks at no more than `occurrences` places, however many there
    are.
    """

    def __init__(self, config: SharedConfig | None = None) -> None:
        self.config = config or SharedConfig()
        self.reset()

    def __len__(self) -> int:
        """Tokens held."""
        return self._size

    def reset(self) -> None:
        """Forget every text."""
        self._texts: dict[int, array[int]] = {}  # by number, oldest first
        self._order: deque[int] = deque()
        self._places: dict[bytes, list[int]] = {}  # what a gram is followed by, oldest first
        self._next = 0
        self._size = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Take in the text of a request that has ended (token ids); the last `max_tokens` of it."""
        text = array("I", tokens[-self.config.max_tokens :])
        if len(text) <= self.config.kappa:  # nothing follows anything
            return
        while self._size + len(text) > self.config.max_tokens:
            self._drop_oldest()
        number = self._next
        self._next += 1
        self._texts[number] = text
        self._order.append(number)
        self._size += len(text)
        for place, gram in enumerate(self._grams(text), (number << SHIFT) + self.config.kappa):
            self._places.setdefault(gram, []).append(place)

    def find(self, context: Sequence[int]) -> SharedMatches:
        """What followed the end of a context (only its last `max_length` tokens are looked at).

        Two sets of occurrences are weighed: those of the longest match, which know the situation best, and all
        that are counted, which know what is usual. Either grows a tree of the likeliest continuations; the one
        whose tokens are expected to be right more often, by their shares, is handed out.
        """
        c = self.config
        suffix = array("I", context[-c.max_length :])
        every = self._places.get(suffix[-c.kappa :].tobytes()) if len(suffix) >= c.kappa else None
        if not every:
            return NOTHING
        counted = every[-c.occurrences :]
        lengths = [self._length(place, suffix) for place in counted]
        longest = max(lengths)
        closest = [place for place, length in zip(counted, lengths, strict=True) if length == longest]
        found = self._grow(closest, longest)
        if len(closest) < len(counted):
            found = max(found, self._grow(counted, c.kappa), key=lambda grown: grown[0])
        _, chains = found
        chains.sort(key=lambda chain: -chain[0])
        return SharedMatches(longest, len(every), tuple(t for _, t in chains), tuple(s for s, _ in chains))

    def _grow(self, places: list[int], matched: int) -> tuple[float, list[tuple[float, tuple[int, ...]]]]:
        """The likeliest tokens first, each with the share of `places` that go on to it: the sum of the shares, and
        (score, tokens) of every leaf."""
        c = self.config
        depth = min(c.depth, max(1, int(c.factor * matched)))
        chains: list[tuple[int, ...]] = [()]
        scores = [0.0]
        inner = set()
        open_nodes: list[tuple[float, int, int, int, list[int]]] = []  # -share, age, parent, token, places
        age, total, node, here = 0, 0.0, 0, places
        while True:
            if len(chains[node]) < depth:
                for token, those in self._following(here, len(chains[node])).items():
                    if len(those) >= c.min_share * len(places):
                        age += 1
                        heappush(open_nodes, (-len(those) / len(places), age, node, token, those))
            if not open_nodes or len(chains) > c.nodes:  # the first is the root
                break
            share, _, parent, token, here = heappop(open_nodes)
            node = len(chains)
            chains.append((*chains[parent], token))
            scores.append(scores[parent] - share)
            inner.add(parent)
            total -= share
        leaves = [(scores[n], chains[n]) for n in range(1, len(chains)) if n not in inner]
        return total, leaves

    def _following(self, places: list[int], ahead: int) -> dict[int, list[int]]:
        """The token `ahead` of each place, and the places that have it."""
        found: dict[int, list[int]] = {}
        for place in places:
            text, at = self._texts[place >> SHIFT], (place & 0xFFFFFFFF) + ahead
            if at < len(text):
                found.setdefault(text[at], []).append(place)
        return found

    def _length(self, place: int, suffix: array[int]) -> int:
        """How many tokens before a place, in its own text, are the suffix's last ones."""
        text, at = self._texts[place >> SHIFT], place & 0xFFFFFFFF
        length, limit = self.config.kappa, min(len(suffix), at)
        if text[at - limit : at] == suffix[len(suffix) - limit :]:
            return limit
        while length < limit and text[at - length - 1] == suffix[-length - 1]:
            length += 1
        return length

    def _grams(self, text: array[int]) -> list[bytes]:
        """The kappa-grams of a text that are followed by a token, in order."""
        size = text.itemsize
        raw, width = text.tobytes(), self.config.kappa * size
        return [raw[at : at + width] for at in range(0, len(raw) - width, size)]

    def _drop_oldest(self) -> None:
        number = self._order.popleft()
        text = self._texts.pop(number)
        self._size -= len(text)
        for gram in set(self._grams(text)):
            places = self._places[gram]
            del places[: bisect_left(places, (number + 1) << SHIFT)]
            if not places:
                del self._places[gram]
