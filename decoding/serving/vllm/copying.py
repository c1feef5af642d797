"""Copying alone, through vLLM's own place for proposers: no probe, no head, no plug-in.

    {"method": "custom_class", "model": "decoding.serving.vllm.copying.CopyProposer", "num_speculative_tokens": 8}

The shortest match is `additional_config={"switchsd": {"kappa": ...}}`, by default 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from activations.matching import MatchConfig, SuffixIndex

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KAPPA = 5
TAIL = 16
"""Last tokens by which a row's context is found again."""
SAMPLES = 32
"""Places, spread over the context and others at each length, at which it must agree too."""
WAITS = 4
"""Steps that a context is kept for while its request is not scheduled."""
Key = tuple[int, bytes]


class CopyProposer:
    """Drafts what followed the longest suffix match of each request, and nothing where there is none.

    vLLM hands over rows and not requests, and moves them about. So a context is known by its length and last tokens,
    wherever it stands; one that is mistaken for another after all only drafts worse.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self.limit = vllm_config.model_config.max_model_len
        kappa = shortest_match(vllm_config.additional_config)
        self.config = MatchConfig(kappa, 1, speculative.num_speculative_tokens, max(kappa, MatchConfig.max_length))
        self._known: dict[Key, list[tuple[int, SuffixIndex]]] = {}
        self._step = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There is none; an engine calls it once its sampling is in place."""
        from vllm.platforms import current_platform

        from decoding.serving.vllm.sampling import repair

        if current_platform.is_cpu():
            repair()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each row, [] for none.

        sampled_token_ids: what each row has just got; nothing where its prompt is still being read.
        num_tokens_no_spec [rows]: tokens of each row, those included. token_ids_cpu [rows, limit]: the tokens.
        """
        before, self._known = self._known, {}
        self._step += 1
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            if not sampled or length >= self.limit:
                drafts.append([])
                continue
            tokens = token_ids_cpu[row]
            index = self._context(before, tokens, length - len(sampled))
            index.extend(tokens[len(index) : length].tolist())
            self._known.setdefault(key(tokens, length), []).append((self._step, index))
            drafts.append(self._copy(index)[: self.limit - length])
        for name, waiting in before.items():
            recent = [(seen, index) for seen, index in waiting if self._step - seen <= WAITS]
            if recent:
                self._known.setdefault(name, []).extend(recent)
        return drafts

    def _context(self, known: dict[Key, list[tuple[int, SuffixIndex]]], tokens: np.ndarray, length: int) -> SuffixIndex:
        """The context that had these tokens at the last step, taken out of `known`; or an empty one."""
        found = known.get(key(tokens, length), [])
        places = [k * length // SAMPLES for k in range(SAMPLES)]
        sample = tokens[places].tolist() if found else []
        for number, (_, index) in enumerate(found):
            if [index.tokens[place] for place in places] == sample:
                return found.pop(number)[1]
        return SuffixIndex(self.config)

    @staticmethod
    def _copy(index: SuffixIndex) -> list[int]:
        matches = index.find()
        return index.candidates(matches)[0] if matches.starts else []


def key(tokens: np.ndarray, length: int) -> Key:
    """Length and last tokens of a context, the first `length` entries of tokens [capacity]."""
    return length, tokens[max(length - TAIL, 0) : length].tobytes()


def shortest_match(additional: Any) -> int:
    """kappa of vLLM's `additional_config`. Raises ValueError."""
    values = additional.get("switchsd", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(values, Mapping) or set(values) - {"kappa"}:
        raise ValueError(f"additional_config.switchsd is {values!r}; copying alone takes 'kappa' and nothing else")
    kappa = values.get("kappa", KAPPA)
    if not isinstance(kappa, int) or isinstance(kappa, bool) or kappa < 1:
        raise ValueError(f"additional_config.switchsd.kappa is {kappa!r}; it must be 1 or more")
    return kappa
