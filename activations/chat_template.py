"""A tokenizer's chat template, applied once: text that is already in template form stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


class MarkerError(ValueError):
    """A message that holds markers of the template where they would forge turns."""


class ChatTemplate:
    """Turns messages into the text that the target reads, with the opening of its answer at the end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that the template writes, the longest first."""
        special = {t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special}
        special |= set(self.tokenizer.all_special_tokens)
        written = f"{self.tokenizer.chat_template}\n{self._opening}"
        return tuple(sorted((t for t in special if t and t in written), key=lambda t: (-len(t), t)))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation in template form.

        A single user message that begins with a marker of the template, or with all that the template writes
        before a user's words, is already in that form, and is returned as it is: nothing is put before or behind
        it. A marker at any other place would be read as the end of a turn, and raises MarkerError. A conversation
        that the template refuses raises jinja2.TemplateError.
        """
        if len(messages) == 1 and messages[0]["role"] == "user" and self._in_form(messages[0]["content"]):
            return messages[0]["content"]
        for number, message in enumerate(messages):
            for marker in self.markers:
                if (at := message["content"].find(marker)) >= 0:
                    raise MarkerError(
                        f"message {number} holds {marker!r}, a marker of the chat template, at character {at}: remove "
                        "it, or give the whole conversation in template form, as one text that begins with a marker"
                    )
        return self._apply(messages)

    def _in_form(self, text: str) -> bool:
        text = text.lstrip()
        opening = self._opening.strip()
        return text.startswith(self.markers) or (bool(opening) and text.startswith(opening))

    @cached_property
    def _opening(self) -> str:
        """What the template writes before the first user's words."""
        probe = "\x00"
        try:
            before, found, _ = self._apply([{"role": "user", "content": probe}]).partition(probe)
        except TemplateError:  # one that wants more than a user's turn
            return ""
        return before if found else ""

    def _apply(self, messages: Sequence[Mapping[str, str]]) -> str:
        conversation = [dict(m) for m in messages]
        return str(self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
