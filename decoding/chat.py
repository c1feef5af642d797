"""A conversation whose turns share what was computed: only what is new to the target is read."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from decoding.decoder import Decoder, Event, Generation
from decoding.engine import Engine
from decoding.trace import Trace


class Chat:
    """Turns with one decoder, in one mode.

    The texts are those that `Decoder.stream` writes after the same messages. The tokens that a turn has in common with
    the latest one, states and drafters' memory included, are not computed again. Use as a context manager, or call
    `close()`.
    """

    def __init__(self, decoder: Decoder, system: str | None = None, **options: Any) -> None:
        """`options`: those of `Decoder.stream`, but for `batch`. Raises DecodingError."""
        self.decoder = decoder
        self._call = decoder.call(**options)
        self._start = [{"role": "system", "content": system}] if system else []
        self._engine: Engine | None = None
        self._trace: Trace | None = None
        """Of all turns, also of those before a reset."""
        self.messages: list[dict[str, str]] = list(self._start)
        """The conversation so far; an interrupted answer stands in it as far as it went."""
        self.reused = 0
        """Prompt tokens of the latest turn that were not computed again."""
        self.prompt_tokens = 0
        """All prompt tokens of the latest turn."""

    def stream(self, text: str) -> Generator[Event, None, None]:
        """The answer to a user's turn, as it comes. Raises TargetError for a turn that the target cannot take, which
        then is no part of the conversation."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.decoder.target.encode(messages)
        if self._engine is None:
            call, target = self._call, self.decoder.target
            if self._trace is None:
                self._trace = self.decoder.tracing(call.mode, call.plan, call.settings, call.sampling)
            self._engine = Engine(target, call.plan, trace=self._trace, mode=call.mode, keeps=True)
        self.decoder.trace = self._engine.trace
        request = self._call.request(0, ids, self.decoder.target.max_length)
        answer = ""
        try:
            for event in self.decoder.run([request], self._engine):
                self.reused, self.prompt_tokens = self._engine.reused, len(ids)
                answer += event.text
                yield event
        finally:
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def send(self, text: str) -> Generation:
        """The whole answer to a user's turn."""
        [done] = [event.done for event in self.stream(text) if event.done is not None]
        return done

    def reset(self) -> None:
        """Start again: only the system message stays. The trace goes on."""
        self.close()
        self.messages = list(self._start)

    def close(self) -> None:
        """Give back what is held. Safe to repeat; the next turn reads the whole conversation."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
