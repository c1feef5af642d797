"""The contexts of an engine's requests on the host, and where their ends occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from activations.matching import MatchConfig, SuffixIndex

Key = TypeVar("Key")


class Gap(Exception):
    """A context whose next tokens were never seen."""


class Context:
    """One request's tokens, the pending one included. A step's cost does not depend on their number."""

    def __init__(self, config: MatchConfig, tokens: Sequence[int] = ()) -> None:
        self.index = SuffixIndex(config, tokens)
        self.copied = 0
        """Tokens of the copy that was drafted last, as long as its outcome is not known."""

    def __len__(self) -> int:
        return len(self.index)

    def write(self, start: int, tokens: Sequence[int], ask: Callable[[int], int]) -> None:
        """Tokens stand at positions `start` and on. Known ones are compared; from the first that differs on, the
        context is another one. Positions before `start` that are unknown (their states were cached, or others drafted)
        are asked for; raises Gap where the answer is negative."""
        known = self.index.tokens
        if start > len(known):
            missing = [ask(place) for place in range(len(known), start)]
            if min(missing) < 0:
                raise Gap(f"position {len(known) + missing.index(min(missing))} is unknown")
            self.index.extend(missing)
        shared = min(len(known) - start, len(tokens))
        if shared and known[start : start + shared] != array("I", tokens[:shared]):
            same = next(i for i in range(shared) if known[start + i] != tokens[i])
            self.cut(start + same)
            shared = same
        self.index.extend(tokens[shared:])

    def cut(self, length: int) -> None:
        """Forget what stands behind the first `length` tokens."""
        if length < len(self.index):  # an index only grows; this is rare
            self.index = SuffixIndex(self.index.config, self.index.tokens[:length].tolist())

    def copy(self) -> list[int]:
        """What followed the longest match of the context's end, the most recent one of equals: `depth` tokens; none
        without a match."""
        matches = self.index.find()
        return self.index.candidates(matches)[0] if matches.starts else []


class Contexts(Generic[Key]):
    """The contexts of the requests that an engine runs, by whatever tells requests apart."""

    def __init__(self, config: MatchConfig) -> None:
        self.config = config
        self._contexts: dict[Key, tuple[object, Context]] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def of(self, key: Key, owner: object) -> Context:
        """The request's context. A key may be used again: another `owner` begins an empty one."""
        found = self._contexts.get(key)
        if found is None or found[0] is not owner:
            found = (owner, Context(self.config))
            self._contexts[key] = found
        return found[1]

    def keep(self, running: Callable[[Key], bool]) -> None:
        """Forget the requests that do not run any more."""
        for key in [key for key in self._contexts if not running(key)]:
            del self._contexts[key]
