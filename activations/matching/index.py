"""The suffix matcher for the CPU: a tree of the context's kappa-grams and of what stands before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from activations.matching.match import MatchConfig, Matches


class SuffixIndex:
    """One growing context and where each of its suffixes of kappa to `max_length` tokens occurred.

    The places that follow one kappa-gram form a tree, read backwards: a node's places agree in `depth` tokens and
    branch where they stop agreeing. A new token is one place, and walks down one path: at most
    `max_length - kappa + 1` nodes, mostly one or none. What lies on that path are the matches, so that `find` only
    picks them up from its deep end. Each node keeps its `candidates` most recent places, which is enough: a place
    is ranked at the deepest node that holds it. Nothing depends on the length of the context, but for the moments
    when a dictionary doubles.

    Memory: about 150 bytes a token of new text, up to about 500 where everything branches.
    """

    # A branch is a number: of a place (0 or more), which needs no node while it is alone, or ~ that of a node. Nodes
    # are rows of flat arrays, because Python's garbage collector would visit a million small objects again and again.

    def __init__(
        self, config: MatchConfig | None = None, tokens: Sequence[int] = (), prompt: int | None = None
    ) -> None:
        """`tokens` is the context so far; `prompt` says how many of its first tokens are the prompt (None: all)."""
        self.config = config or MatchConfig()
        self.tokens = array("I")
        """The context so far."""
        self.prompt = len(tokens) if prompt is None else prompt
        self._heads: dict[bytes, int] = {}  # kappa-gram -> branch
        self._edges: dict[int, int] = {}  # node << 32 | token before its places -> branch
        self._depths = array("I")  # of each node
        self._counts = array("I")  # places of each node, kept only for the tops of the trees
        self._places: list[array[int]] = []  # the most recent places of each node, in order
        self._path: list[int] = []  # nodes that hold the context's end
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens (host integers, 0 or more) to the context."""
        if not tokens:
            return
        heads, size = self._heads, self.tokens.itemsize
        first = max(len(self.tokens) - self.config.kappa + 1, 0)
        self.tokens.extend(tokens)
        self._path = []
        grams, width = self.tokens[first:].tobytes(), self.config.kappa * size
        known: int | None = None
        for at in range(0, len(grams) - width + 1, size):
            gram = grams[at : at + width]
            place = first + (at + width) // size
            known = heads.get(gram)
            if known is None:
                heads[gram] = place
            else:
                top = self._insert(place, known)
                if top != known:
                    heads[gram] = top
        if known is None:
            self._path = []

    def find(self) -> Matches:
        """The matches of the context as it stands, its last token being the pending one."""
        tokens, path, wanted = self.tokens, self._path, self.config.candidates
        if not path:
            return Matches(len(tokens), 0, (), (), 0.0)
        starts: list[int] = []
        lengths: list[int] = []
        for node in reversed(path):
            depth = self._depths[node]
            for place in self._places[node][-2::-1]:  # the last one is the context's end
                if place not in starts:
                    starts.append(place)
                    lengths.append(depth)
                    if len(starts) == wanted:
                        break
            if len(starts) == wanted:
                break
        first = tokens[starts[0]]
        agreeing = sum([tokens[p] == first for p in starts])
        return Matches(
            len(tokens),
            self._counts[path[0]] - 1,
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

    def _insert(self, place: int, branch: int) -> int:
        """Add a place to the tree of its kappa-gram and keep its path; the tree's top, which may be a new one."""
        tokens, edges, depths, rows = self.tokens, self._edges, self._depths, self._places
        limit, keep = self.config.max_length, self.config.candidates + 1  # the context's end is among them
        full = 4 * keep
        path: list[int] = []
        edge, known = -1, self.config.kappa  # the place agrees with the branch in `known` tokens
        while True:
            if branch < 0 and depths[~branch] == known:
                node = ~branch
            else:
                other, reach = (branch, limit) if branch >= 0 else (rows[~branch][-1], depths[~branch])
                depth = self._agreeing(other, place, known, reach)
                if branch < 0 and depth == reach:
                    node = ~branch
                else:
                    node = self._new_node(depth, branch)
                    if depth < other and depth < limit:
                        edges[node << 32 | tokens[other - depth - 1]] = branch
                    if edge >= 0:
                        edges[edge] = ~node
            path.append(node)
            places = rows[node]
            places.append(place)
            if len(places) > full:
                del places[:-keep]
            depth = depths[node]
            if depth == limit:
                break
            edge = node << 32 | tokens[place - depth - 1]
            following = edges.get(edge)
            if following is None:
                edges[edge] = place
                break
            branch, known = following, depth + 1
        self._counts[path[0]] += 1
        self._path = path
        return ~path[0]

    def _new_node(self, depth: int, branch: int) -> int:
        """A node above a branch."""
        alone = branch >= 0
        self._depths.append(depth)
        self._counts.append(1 if alone else self._counts[~branch])
        self._places.append(array("I", (branch,)) if alone else self._places[~branch][:])
        return len(self._depths) - 1

    def _agreeing(self, earlier: int, later: int, known: int, limit: int) -> int:
        """How many tokens before two places are the same, at most `limit`; `known` of them are."""
        tokens = self.tokens
        limit = min(limit, earlier)
        if tokens[earlier - limit : earlier - known] == tokens[later - limit : later - known]:
            return limit
        while tokens[earlier - known - 1] == tokens[later - known - 1]:
            known += 1
        return known
