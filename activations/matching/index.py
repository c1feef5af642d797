"""The suffix matcher for the CPU: a tree of the context's kappa-grams and of what stands before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

from activations.matching.match import MatchConfig, Matches


class _Node:
    """Places whose last `depth` tokens are the same; they are told apart by the token before these."""

    __slots__ = ("children", "count", "depth", "places")

    def __init__(self, depth: int, places: list[int], count: int) -> None:
        self.depth = depth
        self.places = places  # the most recent ones, in order
        self.count = count  # of all; kept only where no node is above
        self.children: dict[int, _Branch] = {}


_Branch: TypeAlias = "_Node | int"
"""A place alone needs no node."""


class SuffixIndex:
    """One growing context and where each of its suffixes of kappa to `max_length` tokens occurred.

    The places that follow one kappa-gram form a tree, read backwards: a node's places agree in `depth` tokens and
    branch where they stop agreeing. A new token is one place, and walks down one path: at most
    `max_length - kappa + 1` nodes, mostly one or none. What lies on that path are the matches, so that `find` only
    picks them up from its deep end. Each node keeps its `candidates` most recent places, which is enough: a place
    is ranked at the deepest node that holds it. Nothing depends on the length of the context.

    Memory: about 150 bytes a token of new text, up to about 500 where everything occurs again.
    """

    def __init__(
        self, config: MatchConfig | None = None, tokens: Sequence[int] = (), prompt: int | None = None
    ) -> None:
        """`tokens` is the context so far; `prompt` says how many of its first tokens are the prompt (None: all)."""
        self.config = config or MatchConfig()
        self.tokens = array("I")
        """The context so far."""
        self.prompt = len(tokens) if prompt is None else prompt
        self._keep = self.config.candidates + 1  # the suffix itself is always among them
        self._heads: dict[bytes, _Branch] = {}
        self._path: list[_Node] = []  # of the place at the context's end
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens (host integers, 0 or more) to the context."""
        if not tokens:
            return
        kappa, heads = self.config.kappa, self._heads
        old = len(self.tokens)
        self.tokens.extend(tokens)
        self._path = []
        first = max(old - kappa + 1, 0)
        size = self.tokens.itemsize
        grams, width = self.tokens[first:].tobytes(), kappa * size
        at, end = 0, first + kappa
        for at in range(0, len(grams) - width + 1, size):
            key = grams[at : at + width]
            known = heads.get(key)
            if known is None:
                heads[key] = end
            else:
                head = self._insert(end, known)
                if head is not known:
                    heads[key] = head
            end += 1
        if len(self.tokens) < kappa or known is None:
            self._path = []

    def find(self) -> Matches:
        """The matches of the context as it stands, its last token being the pending one."""
        end, wanted = len(self.tokens), self.config.candidates
        if not self._path:
            return Matches(end, 0, (), (), 0.0)
        starts: list[int] = []
        lengths: list[int] = []
        for node in reversed(self._path):
            depth = node.depth
            for place in node.places[-2::-1]:  # the last one is the context's end
                if place not in starts:
                    starts.append(place)
                    lengths.append(depth)
                    if len(starts) == wanted:
                        break
            if len(starts) == wanted:
                break
        tokens = self.tokens
        first = tokens[starts[0]]
        agreeing = sum(tokens[p] == first for p in starts)
        return Matches(
            end,
            self._path[0].count - 1,
            tuple(starts),
            tuple(lengths),
            agreeing / len(starts),
            starts[0] < self.prompt,
        )

    def candidates(self, matches: Matches) -> list[list[int]]:
        """The tokens of each candidate, `depth` of them; also right after the context has grown."""
        depth, end, tokens = self.config.depth, matches.end, self.tokens
        found = []
        for start in matches.starts:
            piece = tokens[start : min(start + depth, end)].tolist()
            if len(piece) < depth:
                piece = (piece * -(-depth // len(piece)))[:depth]
            found.append(piece)
        return found

    def _insert(self, place: int, branch: _Branch) -> _Node:
        """Add a place to the tree of its kappa-gram and keep its path; the tree's top, which may be a new one."""
        tokens, limit, keep = self.tokens, self.config.max_length, self._keep
        path: list[_Node] = []
        above, key, known = None, 0, self.config.kappa  # the place agrees with the branch in `known` tokens
        while True:
            if isinstance(branch, _Node):
                node = branch
                if node.depth > known:
                    other = node.places[-1]
                    depth = self._agreeing(other, place, known, node.depth)
                    if depth < node.depth:
                        node = _Node(depth, branch.places[:], branch.count)
                        node.children[tokens[other - depth - 1]] = branch
            else:
                node = _Node(self._agreeing(branch, place, known, limit), [branch], 1)
                if node.depth < limit and branch > node.depth:
                    node.children[tokens[branch - node.depth - 1]] = branch
            if node is not branch and above is not None:
                above.children[key] = node
            path.append(node)
            places = node.places
            places.append(place)
            if len(places) > 4 * keep:
                del places[:-keep]
            depth = node.depth
            if depth == limit:
                break
            key = tokens[place - depth - 1]
            following = node.children.get(key)
            if following is None:
                node.children[key] = place
                break
            above, branch, known = node, following, depth + 1
        path[0].count += 1
        self._path = path
        return path[0]

    def _agreeing(self, earlier: int, later: int, known: int, limit: int) -> int:
        """How many tokens before two places are the same, at most `limit`; `known` of them are."""
        tokens = self.tokens
        limit = min(limit, earlier)
        if tokens[earlier - limit : earlier - known] == tokens[later - limit : later - known]:
            return limit
        while tokens[earlier - known - 1] == tokens[later - known - 1]:
            known += 1
        return known
