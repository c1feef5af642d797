"""The suffix matcher for the CPU: an index of every kappa-gram, kept up to date token by token."""

from __future__ import annotations

from collections.abc import Sequence

from activations.matching.match import MatchConfig, Matches


class SuffixIndex:
    """One growing context and where each of its kappa-grams ends.

    A token costs one dictionary entry; `find` looks at no more than `candidates` places of `max_length` tokens.
    Neither depends on the length of the context.
    """

    def __init__(self, config: MatchConfig | None = None, tokens: Sequence[int] = ()) -> None:
        self.config = config or MatchConfig()
        self.tokens: list[int] = []
        """The context so far."""
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens (host integers) to the context."""
        kappa, ends = self.config.kappa, self._ends
        old = len(self.tokens)
        self.tokens.extend(tokens)
        for end in range(max(old + 1, kappa), len(self.tokens) + 1):
            gram = tuple(self.tokens[end - kappa : end])
            places = ends.get(gram)
            if places is None:
                ends[gram] = [end]
            else:
                places.append(end)

    def find(self) -> Matches:
        """The matches of the context as it stands, its last token being the pending one."""
        tokens, end, config = self.tokens, len(self.tokens), self.config
        places = self._ends.get(tuple(tokens[-config.kappa :]), ()) if end >= config.kappa else ()
        if len(places) < 2:  # the suffix itself is always there
            return Matches(end, 0, (), (), 0.0)
        starts = tuple(places[-2 : -2 - config.candidates : -1])
        first = tokens[starts[0]]
        agreeing = sum(tokens[p] == first for p in starts)
        lengths = tuple(self._length(p) for p in starts)
        return Matches(end, len(places) - 1, starts, lengths, agreeing / len(starts))

    def candidates(self, matches: Matches) -> list[list[int]]:
        """The tokens of each candidate, up to `depth`; also right after the context has grown."""
        depth = self.config.depth
        return [self.tokens[p : min(p + depth, matches.end)] for p in matches.starts]

    def _length(self, start: int) -> int:
        """Length of the longest common suffix of tokens[:start] and the context, up to `max_length`."""
        tokens, gap = self.tokens, len(self.tokens) - start
        at = start - self.config.kappa
        stop = max(start - self.config.max_length, 0)
        while at > stop and tokens[at - 1] == tokens[at - 1 + gap]:
            at -= 1
        return start - at
