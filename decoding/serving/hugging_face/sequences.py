"""The texts of one call of `generate`, as its logits processors, stopping criteria and streamer see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process, stopping_criteria

from activations.sampling import Sampling, choose

ALONE = {
    logits_process: (
        "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper",
        "RepetitionPenaltyLogitsProcessor", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper",
        "MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor",
        "ExponentialDecayLengthPenalty", "LogitNormalization", "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor", "WatermarkLogitsProcessor",
    ),
    stopping_criteria: ("MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria"),
}  # fmt: skip
"""What transformers has that judges each row by itself, whatever stands in the others, and remembers nothing."""


def judges_rows_alone(one: Any) -> bool:
    """Whether a processor or criterion may be called where only some rows of a batch are as long as the ids say. Of
    what users write it is not known: it may count its calls, or compare the rows."""
    return any(
        type(one).__module__ == module.__name__ and type(one).__name__ in names for module, names in ALONE.items()
    )


class Sequences:
    """Texts that grow by one token after the other, each chosen from processed logits and followed by the criteria.

    However many tokens are verified in a forward, processors and criteria are called as `generate` calls them: once a
    token, in order, with the texts as they stand. Rows of a batch need not be in step, unless something needs it.
    """

    def __init__(
        self,
        prompts: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        limit: int,
        pad: int | None,
        sampling: Sampling,
        aside: Callable[[], AbstractContextManager[None]],
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        """prompts: ids [rows, width], padded on the left. limit: most tokens that a row grows by. pad: stands behind an
        end. sampling: of processed logits. aside: entered around processors and criteria, which may run the model."""
        self.rows, self.width = prompts.shape
        self.limit = limit
        fill = prompts.new_full((self.rows, limit), 0 if pad is None else pad)
        self.ids = torch.cat([prompts, fill], dim=1)
        """[rows, width + limit]"""
        self.counts = [0] * self.rows
        """Tokens chosen for each row."""
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        """Processed logits [rows, V] of each new position, where they are kept; zeros where a row had ended."""
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        self.in_step = self.rows > 1 and not all(map(judges_rows_alone, [*processors, *criteria]))
        """Something needs whole batches, so that all rows must be of one length."""
        self._processors, self._criteria = processors, criteria
        self._sampling, self._aside = sampling, aside
        self._ends: list[int | None] = [None] * self.rows  # how many tokens a row had when a criterion was first met
        # Without a stop token `generate` has nothing to put behind an end: all rows go on until the last one ends.
        self._rests = any(hasattr(one, "eos_token_id") for one in criteria)

    def extend(self, rows: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Choose the next token of each of these rows from the target's logits [N, V].

        Raises torch.OutOfMemoryError where rows that must stay in step cannot.
        """
        if self.in_step and not all(self.over(row) for row in range(self.rows) if row not in rows):
            raise torch.OutOfMemoryError(f"no memory for all {self.rows} rows, which must be in step: use fewer")
        tokens = [0] * len(rows)
        alike: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            alike.setdefault(self.counts[row], []).append(i)
        for count, places in alike.items():
            chosen = self._step([rows[i] for i in places], logits[places], count)
            for i, token in zip(places, chosen, strict=True):
                tokens[i] = token
        return tokens

    def over(self, row: int) -> bool:
        """Whether a row grows no further."""
        if self.counts[row] == self.limit:
            return True
        if self._rests:
            return self._ends[row] is not None
        return None not in self._ends and self.counts[row] >= self.length

    @property
    def length(self) -> int:
        """New tokens of the longest row; final once all rows are over."""
        return max(self.limit if end is None else end for end in self._ends)

    @property
    def settled(self) -> int:
        """How many new positions stand in all rows: no later token changes them."""
        return min((self.counts[row] for row in range(self.rows) if not self.over(row)), default=self.length)

    def _step(self, rows: list[int], logits: torch.Tensor, count: int) -> list[int]:
        """The next tokens of rows that have `count` new tokens. Processors and criteria see all rows, each in its
        place; what they say of the others is not asked."""
        end = self.width + count
        raw = logits.to(self.ids.device, torch.float32)
        every = raw.new_zeros(self.rows, raw.shape[1])
        every[rows] = raw
        with self._aside():
            scores = self._processors(self.ids[:, :end].clone(), every)[rows]  # type: ignore[arg-type]
        tokens = choose([self._sampling] * len(rows), scores, rows, [end] * len(rows))
        self.ids[rows, end] = tokens
        for kept, new in ((self.scores, scores), (self.logits, raw)):
            if kept is not None:
                if count == len(kept):
                    kept.append(torch.zeros_like(every))
                kept[count][rows] = new
        told = None if self.scores is None else tuple(self.scores[: count + 1])
        with self._aside():
            met = self._criteria(self.ids[:, : end + 1].clone(), told).tolist()  # type: ignore[arg-type]
        for row in rows:
            self.counts[row] = count + 1
            if met[row] and self._ends[row] is None:
                self._ends[row] = count + 1
        return [int(token) for token in tokens.tolist()]
