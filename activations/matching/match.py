"""What a suffix matcher looks for, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatchConfig:
    """What counts as a match, and how much of what follows it is handed out."""

    kappa: int = 5
    """Shortest match: the last `kappa` tokens, pending token included, must occur earlier."""
    candidates: int = 10
    """Most candidates handed out (W): of all occurrences the longest matches, the most recent of equals first."""
    depth: int = 20
    """Tokens of a candidate (D)."""
    max_length: int = 32
    """Match lengths are measured up to this many tokens: longer ones count as equal."""

    def __post_init__(self) -> None:
        for name in ("kappa", "candidates", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.max_length < self.kappa:
            raise ValueError(f"max_length is {self.max_length}; it must be at least kappa ({self.kappa})")


@dataclass(frozen=True, slots=True)
class Matches:
    """The suffix matches of one context of `end` tokens.

    A candidate starts at p if tokens[p-kappa:p] equals the context's last kappa tokens and p < end. Its tokens are
    tokens[p:end], over and over until there are `depth` of them: what it copies from may overlap the suffix, and
    one that reaches the context's end goes on as if the context repeated itself with period end - p.

    Candidates are ranked over all occurrences by (match length up to `max_length`, recency), and every back end
    gives the same ones in the same order. What is said of *the* match is said of the first.
    """

    end: int
    """Tokens in the context, pending token included."""
    count: int
    """Occurrences of the last kappa tokens in the whole context; at most `candidates` of them are listed."""
    starts: tuple[int, ...]
    """Where each candidate starts."""
    lengths: tuple[int, ...]
    """Match length of each candidate, up to `max_length`; never increasing."""
    agreement: float
    """Share of the candidates whose first token is the first one's; 0 without a match."""
    in_prompt: bool = False
    """The first candidate starts in the prompt."""
    shared: int = 0
    """Match length in a store of other texts, where that is longer than any in the context; else 0."""

    @property
    def longest(self) -> int:
        """The largest match length; 0 without a match."""
        return max(self.shared, self.lengths[0] if self.lengths else 0)

    @property
    def distance(self) -> int:
        """Tokens from the first candidate's start to the end of the context; 0 without a match in it."""
        return self.end - self.starts[0] if self.starts else 0
