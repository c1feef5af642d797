"""How much the target itself makes of a text: what can be measured of modes that are not lossless."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from activations.cache import KVCache
from activations.sampling import Sampling
from activations.target import Target
from probes.evaluation import Interval, interval


def log_probabilities(
    target: Target, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling | None = None
) -> NDArray[np.float64]:
    """float64 [tokens]: the target's log-probability, in nats, of each generated token behind those before it.

    `sampling` changes the law as it would in decoding (temperature, top-k, top-p); without it, and where it is greedy,
    the law is the model's own at temperature 1. One forward. Raises ValueError without a prompt or without tokens.
    """
    if not prompt or not tokens:
        raise ValueError(f"a prompt of {len(prompt)} and a text of {len(tokens)} tokens: both need at least 1")
    ids = [*prompt, *tokens]
    fed = torch.tensor([ids[:-1]], device=target.device)
    logits = target.forward(fed, KVCache(1, capacity=len(ids)), logits_to_keep=len(tokens))[0].float()
    if sampling is not None and not sampling.greedy:
        logits = sampling.process(logits)
    chosen = torch.tensor(list(tokens), device=target.device)[:, None]
    found: NDArray[np.float64] = logits.double().log_softmax(-1).gather(-1, chosen)[:, 0].cpu().numpy()
    return found


def mean_interval(values: Sequence[float], seed: int = 0, resamples: int = 2000) -> Interval:
    """The mean of one value a text, and its 95 % interval from a bootstrap over texts."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:  # one text has no spread
        return Interval(float(x.mean()) if len(x) else float("nan"), float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(len(x), size=(resamples, len(x)))
    return interval(np.concatenate([[x.mean()], x[drawn].mean(1)]))
