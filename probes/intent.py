"""Copy intent at every position of a finished text, by several probes: what notebooks and pictures look at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from activations.cache import KVCache
from activations.target import Target
from probes.artifact import Probe


def copy_intent(target: Target, probes: Sequence[Probe], ids: Sequence[int]) -> NDArray[np.float32]:
    """float32 [probes, tokens - 1]: the score of each probe at each position as an anchor.

    The last token is nobody's anchor, because no pending token stands behind it. All come from one forward, whose
    attention is causal, so that no score knows what stands behind its position. Raises ChoiceError for a probe of
    another target.
    """
    for probe in probes:
        probe.check_target(target.fingerprint, target.name)
    names = dict.fromkeys(site for probe in probes for site in probe.config.sites)
    with target.read(names) as reader:
        tokens = torch.tensor([list(ids[:-1])], device=target.device)
        target.hidden(tokens, KVCache(1, capacity=len(ids)))
    states = {str(site): state[0] for site, state in reader.states.items()}
    scores = [probe.score(torch.cat([states[site] for site in probe.config.sites], dim=-1)) for probe in probes]
    found: NDArray[np.float32] = torch.stack(scores).cpu().numpy()
    return found
