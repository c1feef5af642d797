"""Choosing the next token, so that every mode that draws from the same law draws the same token.

The next token at a position is argmax(processed logits + Gumbel noise), the noise a function of
(seed, request, position) and the token id alone. Whatever path a decoder takes to a position, it meets the
same noise there: the sampled text does not depend on drafts, batch or scheduling.

Who must draw independently of the target (a drafter whose drafts are accepted by their probabilities, for one) draws
from a stream of its own: another noise under the same keys.

Sources: the Gumbel-max trick (Maddison et al. 2014, arXiv 1411.0030); shared noise for target and drafter (Daliri et
al. 2024, arXiv 2408.07978).
"""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from activations.draws import LARGE, M1, M2, PER_TOKEN, noisy_argmax

LOWEST = 1e-6
"""Lowest temperature above 0."""


@dataclass(frozen=True)
class Sampling:
    """How the target's next token is chosen."""

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it, and must stay finite."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p; 1 keeps all."""
    seed: int = 0
    """Keys the noise, together with the request's number and the position."""

    def __post_init__(self) -> None:
        for names, kind, word in (
            (("temperature", "top_p"), numbers.Real, "number"),
            (("top_k", "seed"), numbers.Integral, "whole number"),
        ):
            for name in names:
                if not isinstance(getattr(self, name), kind):
                    raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a {word}")
        if self.temperature != 0 and not LOWEST <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy), or {LOWEST} or more")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def law(self, logits: torch.Tensor) -> Law:
        """What is sampled after logits [..., V]. Only the kept tokens need noise, and a sort for top-p only sees what
        top-k left."""
        size = logits.shape[-1]
        logits = logits.float()
        if self.greedy:
            return Law(logits, None, size)
        tokens = None
        logits = logits / self.temperature
        if 0 < self.top_k < size:
            logits, tokens = logits.topk(self.top_k, dim=-1)  # sorted
        if self.top_p < 1:
            if tokens is None:
                logits, tokens = logits.sort(dim=-1, descending=True)
            probability = logits.softmax(-1)
            before = probability.cumsum(-1) - probability  # mass of the more likely ones: the first always stays
            logits = logits.masked_fill(before >= self.top_p, -torch.inf)
        return Law(logits, tokens, size)

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        """Float32 logits [..., V] of the law that is sampled; excluded tokens are -inf."""
        return self.law(logits).full()

    def next_tokens(
        self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, stream: str = ""
    ) -> torch.Tensor:
        """Next token ids [N] for logits [N, V], of the given requests [N] at the given positions [N]."""
        if self.greedy:
            return logits.argmax(-1)
        law = self.law(logits)
        return law.ids(law.draw(self.seed, requests, positions, stream))


@dataclass(frozen=True)
class Law:
    """Distributions over the vocabulary, of the tokens that a sampling keeps."""

    logits: torch.Tensor
    """Float32 [..., k]; excluded ones are -inf."""
    tokens: torch.Tensor | None
    """Their ids [..., k]; None = all, in order."""
    size: int
    """Of the vocabulary."""

    def draw(self, seed: int, requests: torch.Tensor, positions: torch.Tensor, stream: str = "") -> torch.Tensor:
        """A draw [N] from each of N laws, as a place among its tokens."""
        keys = _keys(seed, requests, positions, stream)
        if self.tokens is None and self.size >= LARGE and self.logits.device.type == "cpu":
            return noisy_argmax(self.logits, keys, _gumbel)
        tokens = self.tokens if self.tokens is not None else torch.arange(self.size, device=self.logits.device)
        return (self.logits + _gumbel(keys, tokens)).argmax(-1)

    def ids(self, places: torch.Tensor) -> torch.Tensor:
        """The token ids [N] of places [N]."""
        return places if self.tokens is None else self.tokens.gather(-1, places[..., None])[..., 0]

    def full(self) -> torch.Tensor:
        """Logits [..., V]."""
        if self.tokens is None:
            return self.logits
        shape = (*self.logits.shape[:-1], self.size)
        return torch.full(shape, -torch.inf, device=self.logits.device).scatter_(-1, self.tokens, self.logits)


def choose(
    samplings: Sequence[Sampling],
    logits: torch.Tensor,
    requests: Sequence[int],
    positions: Sequence[int] | torch.Tensor,
) -> torch.Tensor:
    """Next token ids [N] for logits [N, V], each row by its own sampling; rows that share one go together."""
    first = samplings[0]
    alike = all(s == first for s in samplings)
    if alike and first.greedy:
        return logits.argmax(-1)
    numbers = torch.tensor(requests, device=logits.device)
    positions = torch.as_tensor(positions, device=logits.device)
    if alike:
        return first.next_tokens(logits, numbers, positions)
    out = torch.empty(len(samplings), dtype=torch.long, device=logits.device)
    for sampling in set(samplings):
        index = [i for i, s in enumerate(samplings) if s == sampling]
        out[index] = sampling.next_tokens(logits[index], numbers[index], positions[index])
    return out


_MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (xor-shift-multiply) on int64 tensors, exact on every device."""
    x = ((x ^ (x >> 16)) * M1) & _MASK
    x = ((x ^ (x >> 15)) * M2) & _MASK
    return x ^ (x >> 16)


def gumbel(
    seed: int, requests: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, stream: str = ""
) -> torch.Tensor:
    """Standard Gumbel noise [N, k] for token ids [k] or [N, k]: a pure function of (stream, seed, request, position,
    token)."""
    return _gumbel(_keys(seed, requests, positions, stream), tokens)


def uniform(seed: int, requests: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor:
    """Float64 numbers [N] in (0, 1), each a pure function of (stream, seed, request, position)."""
    keys = _keys(seed, requests, positions, stream)
    return _uniform(keys, torch.zeros(1, dtype=torch.int64, device=positions.device))[:, 0]


def _keys(seed: int, requests: torch.Tensor, positions: torch.Tensor, stream: str) -> torch.Tensor:
    """32 bits [N] of which all noise of a position is a function."""
    key = _mix(torch.as_tensor((seed * 0x9E3779B9 + 0x6A09E667) & _MASK, device=positions.device))
    if stream:  # the target's own stream has no name
        key = _mix(key ^ zlib.crc32(stream.encode()))
    key = _mix((key + requests.to(torch.int64) * 0x85EBCA6B) & _MASK)
    return _mix((key + positions.to(torch.int64) * 0xC2B2AE35) & _MASK)


def _gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log(_uniform(keys, tokens))).to(torch.float32)


def _uniform(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    high = _mix((keys[:, None] + tokens * PER_TOKEN) & _MASK)
    low = _mix(((high ^ 0x5BD1E995) + tokens) & _MASK)
    # 48 random bits: float32 uniforms would put an atom of 6e-8 at the end of the tail
    return ((high << 16) | (low & 0xFFFF)).to(torch.float64).add_(0.5).mul_(2.0**-48)
