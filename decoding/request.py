"""A text being written: its tokens, its limits and who drafted what."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from activations.sampling import Sampling

TARGET = "target"
"""Source of a token that the target chose where no draft was followed."""


@dataclass(eq=False)
class Request:
    """One sequence. Requests are compared and hashed by identity, so that drafters may key their state by them."""

    number: int
    """Unique in a decoder's call."""
    prompt: list[int]
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Texts that end the generation; none of them is part of the output."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and everything generated. After prefill the last one is the pending token: it has no state yet,
    so that `len(tokens) - 1` positions are verified."""
    sources: list[str] = field(default_factory=list)
    """Who drafted each generated token: `target`, or a drafter's name."""
    particle: int = 0
    """Which of a group's particles this is."""
    owner: Request | None = field(default=None, repr=False)
    """The request whose particle this is."""
    particles: list[Request] = field(default_factory=list, repr=False)
    """The rows that a group owns, each a request of its own; none where the request is its only row."""
    ended: bool = False
    """A particle that has met its end: it is drafted no further, and rests."""

    @property
    def rows(self) -> list[Request]:
        """The requests that hold a row of the cache for this one."""
        return self.particles or [self]

    @property
    def group(self) -> Request:
        """The request that was asked for: this one, or the one whose particle it is."""
        return self.owner or self

    @property
    def key(self) -> int:
        """Keys the sampling noise."""
        return self.number + (self.particle << 20)

    def split(self, particles: int) -> list[Request]:
        """The rows of this request, made if there are to be several."""
        if particles > 1:
            self.particles = [
                replace(self, particle=i, owner=self, tokens=[], sources=[], particles=[]) for i in range(particles)
            ]
        return self.rows

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def room(self) -> int:
        """How deep a draft can be of use: the verifier adds one token of its own."""
        return self.max_new_tokens - (len(self.tokens) - len(self.prompt)) - 1
