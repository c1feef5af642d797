"""What a suffix matcher looks for, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatchConfig:
    """What counts as a match, and how much of what follows it is handed out."""

    kappa: int = 5
    """Shortest match: the last `kappa` tokens, pending token included, must occur earlier."""
    candidates: int = 10
    """Most candidates handed out (W), the most recent first."""
    depth: int = 20
    """Most tokens of a candidate (D)."""
    max_length: int = 32
    """Match lengths are measured up to this many tokens."""

    def __post_init__(self) -> None:
        for name in ("kappa", "candidates", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.max_length < self.kappa:
            raise ValueError(f"max_length is {self.max_length}; it must be at least kappa ({self.kappa})")


@dataclass(frozen=True, slots=True)
class Matches:
    """The suffix matches of one context of `end` tokens.

    A candidate starts at p if tokens[p-kappa:p] equals the context's last kappa tokens and p < end; what it
    copies from may overlap the suffix itself.
    """

    end: int
    """Tokens in the context, pending token included: a candidate's tokens lie before it."""
    count: int
    """Occurrences in the whole context; at most `candidates` of them are listed."""
    starts: tuple[int, ...]
    """Where each candidate starts, the most recent first."""
    lengths: tuple[int, ...]
    """Match length of each candidate, up to `max_length`."""
    agreement: float
    """Share of the candidates whose first token is the most recent one's; 0 without a match."""

    @property
    def longest(self) -> int:
        """The largest match length among the candidates; 0 without a match."""
        return max(self.lengths, default=0)

    @property
    def distance(self) -> int:
        """Tokens from the most recent candidate's start to the end of the context; 0 without a match."""
        return self.end - self.starts[0] if self.starts else 0
