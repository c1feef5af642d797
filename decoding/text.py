"""Text from tokens as they come: incremental, and never showing what a stop string may still take back."""

from __future__ import annotations

from collections.abc import Sequence

from activations.target import Target

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one generation. `push` gives what may be shown; `stopped` says that a stop string was met."""

    def __init__(self, target: Target, stop: Sequence[str] = ()) -> None:
        self._target = target
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._from = 0
        """Tokens before this one are not decoded again; those from here to `_done` are context for the next ones."""
        self._done = 0
        self._held = ""
        self._shown: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was shown."""
        return "".join(self._shown)

    def push(self, tokens: Sequence[int]) -> str:
        """More tokens; returns the new text. With stop strings, push one at a time to know which token met one."""
        self._tokens.extend(tokens)
        before = self._target.decode(self._tokens[self._from : self._done])
        after = self._target.decode(self._tokens[self._from :])
        if after.endswith(_BROKEN):  # a character whose last bytes are still to come
            return ""
        self._from, self._done = self._done, len(self._tokens)
        return self._show(after[len(before) :], last=False)

    def finish(self) -> str:
        """What was held back."""
        if self.stopped:
            return ""
        before = self._target.decode(self._tokens[self._from : self._done])
        after = self._target.decode(self._tokens[self._from :])
        self._done = self._from = len(self._tokens)
        return self._show(after[len(before) :], last=True)

    def _show(self, new: str, last: bool) -> str:
        text = self._held + new
        self._held = ""
        if self._stop:
            ends = [at for s in self._stop if (at := text.find(s)) >= 0]
            if ends:
                self.stopped = True
                text = text[: min(ends)]
            elif not last:
                keep = max(_overlap(text, s) for s in self._stop)
                self._held = text[len(text) - keep :]
                text = text[: len(text) - keep]
        self._shown.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
