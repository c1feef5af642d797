"""The law of what mode smcsd samples, through the whole step loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_draft_drafter import draft_of
from test_modes_law import PROMPT, TARGET, joint

from decoding.decoder import Decoder
from decoding.draft.drafter import DraftModelDrafter
from decoding.modes import ModeSettings

DRAFT = draft_of(TARGET, 0.06)
N = 1200


def proposed() -> torch.Tensor:
    """Probabilities [512] of an exact token, a drafted one and an exact one: what a single particle writes."""
    ids = torch.tensor([[*PROMPT, a, b] for a in range(8) for b in range(8)])
    p, q = (m.model(ids, use_cache=False).logits.double().softmax(-1) for m in (TARGET, DRAFT))
    n, row = len(PROMPT), torch.arange(64)
    weight = p[row, n - 1, ids[:, n]] * q[row, n, ids[:, n + 1]]
    return (weight[:, None] * p[:, n + 1]).flatten()


def errors(particles: int, f: np.ndarray) -> float:
    """Mean of f over sampled texts, less its exact mean."""
    settings = ModeSettings(particles=particles, draft_tokens=1)
    decoder = Decoder(TARGET, neural=DraftModelDrafter(TARGET, DRAFT), settings=settings)
    out = decoder.generate([PROMPT] * N, mode="smcsd", max_new_tokens=3, temperature=1.0, seed=7, batch=64)
    cells = [a * 64 + b * 8 + c for a, b, c in (g.tokens for g in out)]
    return float(f[cells].mean() - joint().numpy() @ f)


@pytest.mark.slow
@torch.no_grad()
def test_particles_come_nearer_to_the_targets_joint_law() -> None:
    exact, single = joint().numpy(), proposed().numpy()
    f = (single > exact).astype(float)
    distance, spread = np.abs(single - exact).sum() / 2, 0.5 / N**0.5
    assert distance > 8 * spread
    assert errors(1, f) == pytest.approx(distance, abs=3.5 * spread)
    c = -(single * (exact / single) ** 2 * (f - exact @ f)).sum()  # of weighted samples the error is nearly c / N
    assert errors(8, f) == pytest.approx(c / 8, abs=0.5 * c / 8 + 3 * spread)
    assert 1.5 * c / 8 + 3 * spread < distance / 2
