"""Probes of different targets side by side: by relative depth, and along one text that all of them read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from activations.sites import parse_sites
from activations.target import Target
from probes.artifact import JOIN, Probe, ProbeError
from probes.evaluation import Interval
from probes.intent import copy_intent
from probes.result import TrainResult


def relative_depth(site: str, blocks: int) -> float:
    """Where a site lies in a target of so many blocks: 0 in the first one, 1 in the last.

    Raises ValueError for a site that the target does not have, or that is in no block.
    """
    [place] = parse_sites([site], blocks)
    if place.block < 0:
        raise ValueError(f"{site} lies in no block: compare sites such as resid_post.0")
    return place.block / (blocks - 1) if blocks > 1 else 0.0


def auc_by_depth(result: TrainResult, scope: str = "match") -> list[tuple[float, Interval]]:
    """Relative depth and AUC on the test part of the probe at every kept site of one block, from the first block on.

    `scope` is `all` (rows) or `match` (rows with a suffix match). Raises ProbeError where no site was kept, or none has
    been measured in this scope.
    """
    blocks = result.probes["best"].config.target.blocks
    kept = [name for name, probe in result.probes.items() if name == probe.config.site and name != "embed"]
    found = [
        (relative_depth(site, blocks), result.evaluations[site][scope].roc_auc)
        for site in kept
        if scope in result.evaluations[site] and JOIN not in site
    ]
    if not found:
        raise ProbeError(f'no site was kept and measured on {scope!r}: train with keep=("resid_post.*",), for example')
    return sorted(found, key=lambda point: point[0])


@dataclass(frozen=True)
class Reading:
    """Copy intent along an answer that was given to a target, not written by it."""

    ends: NDArray[np.int64]
    """[tokens]: the letter of the answer at which each of its tokens ends, as the target's tokenizer cuts it."""
    intent: NDArray[np.float32]
    """[tokens]: the probe's output at the anchor behind which the token is pending. It has not seen the token."""


def read_along(target: Target, probe: Probe, messages: Sequence[Mapping[str, str]], answer: str) -> Reading:
    """Let a target read a prompt and an answer, and its probe say at each token of the answer what it makes of it.

    Tokenizers cut texts in different places; letters are what they have in common. Raises ValueError for an answer
    without tokens, and ChoiceError for a probe of another target.
    """
    prompt = target.encode_messages(messages)
    tokens = [int(t) for t in target.tokenizer(answer, add_special_tokens=False)["input_ids"]]
    if not tokens:
        raise ValueError("the answer is empty: give it some text")
    scores = copy_intent(target, [probe], [*prompt, *tokens])[0]
    ends = [len(target.decode(tokens[: n + 1])) for n in range(len(tokens))]
    return Reading(np.array(ends), scores[len(prompt) - 1 :])
