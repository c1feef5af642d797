"""What the context and the last step's logits say about a draft, before it is made: the features of a length head.

All are known at the anchor and the pending token. The copied candidate is the one of the longest match, the most
recent among equals, as the copy drafter takes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from activations.matching.match import Matches

EDGES = (1, 2, 3, 4, 5, 7, 10, 16, 32)
"""Match lengths at which a step function of it may rise."""
SURFACE = (
    *(f"length>={n}" for n in EDGES),
    "count", "single", "distance", "from_prompt", "ties", "gap", "prompt*length", "count*length", "share", "share3",
    "distinct", "share*length", "share3*length",
)  # fmt: skip
"""Of the suffix matches; all 0 without one."""
LOGITS = ("sure", "entropy", "margin")
"""Of the anchor's logits; all 0 where they are not known."""
FEATURES = (*SURFACE, *LOGITS)
NOTHING = (0.0,) * len(SURFACE)


def surface(matches: Matches | None, candidates: Sequence[Sequence[int]], prompt: int) -> tuple[float, ...]:
    """SURFACE of a context's matches; `candidates` are their tokens, that of the longest match first, and `prompt` is
    the number of tokens of the prompt."""
    if matches is None or not matches.starts or not candidates or not candidates[0]:
        return NOTHING
    lengths, first = matches.lengths, candidates[0]
    longest = max(lengths)
    start = matches.starts[lengths.index(longest)]
    ties = lengths.count(longest)
    second = longest if ties > 1 else max((n for n in lengths if n < longest), default=0)
    log_length, many = math.log1p(longest), math.log1p(matches.count)
    source = float(start < prompt)
    heads = [c[0] if c else -1 for c in candidates]
    share = heads.count(first[0]) / len(heads)
    three = list(first[:3])
    share3 = sum(list(c[:3]) == three for c in candidates) / len(candidates)
    return (
        *(float(longest >= n) for n in EDGES),
        many, float(matches.count == 1), math.log1p(matches.end - start), source, math.log1p(ties),
        math.log1p(longest - second), source * log_length, many * log_length, share, share3,
        math.log(len(set(heads))), share * log_length, share3 * log_length,
    )  # fmt: skip


def sureness(max_prob: float, entropy: float, margin: float) -> tuple[float, ...]:
    """LOGITS of the anchor's largest probability, its entropy in nats, and the gap of its two largest logits."""
    p = min(max(max_prob, 1e-4), 1 - 1e-4)
    return math.log(p / (1 - p)), entropy, margin
