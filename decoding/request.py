"""A text being written: its tokens, its limits and who drafted what."""

from __future__ import annotations

from dataclasses import dataclass, field

from activations.sampling import Sampling

TARGET = "target"
"""Source of a token that the target chose where no draft was followed."""


@dataclass(eq=False)
class Request:
    """One sequence. Requests are compared and hashed by identity, so that drafters may key their state by them."""

    number: int
    """Keys the sampling noise; unique in a decoder's call."""
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

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def room(self) -> int:
        """How deep a draft can be of use: the verifier adds one token of its own."""
        return self.max_new_tokens - (len(self.tokens) - len(self.prompt)) - 1
