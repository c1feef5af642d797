"""Contexts far above a sliding window: every mode still writes the target's own text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import MODE_NAMES, RELAXED, Coin, decoder_for, greedy
from test_eagle_head import random_head

from decoding.decoder import Decoder
from decoding.eagle.drafter import EagleDrafter
from decoding.modes import ModeSettings

WINDOW = 8
LONGEST = 6 * WINDOW


def long_prompts(data: st.DataObject) -> list[list[int]]:
    """Above the window from the start; each repeats itself, from inside the window and from before it."""
    out = []
    for first in range(data.draw(st.integers(1, 3))):
        far = data.draw(st.lists(st.integers(0, 62), min_size=5, max_size=9))
        near = data.draw(st.lists(st.integers(0, 62), min_size=3, max_size=4))
        between = data.draw(st.lists(st.integers(0, 62), min_size=2 * WINDOW, max_size=LONGEST))
        out.append([first, *far, *between, *near * 3, *far[: data.draw(st.integers(2, 5))]])
    return out


@settings(max_examples=10, **RELAXED)
@given(data=st.data())
def test_every_mode_writes_what_transformers_writes(small_target, reference_model, data) -> None:  # type: ignore[no-untyped-def]
    target, model = small_target("gemma3"), reference_model("gemma3")
    assert (target.window, target.hybrid) == (WINDOW, True)
    prompts, n = long_prompts(data), data.draw(st.integers(WINDOW, 3 * WINDOW))
    truth = {tuple(p): greedy(model, p, n) for p in prompts}
    decoder = decoder_for(target, truth, data.draw(st.integers(0, 99)))
    batch = data.draw(st.integers(1, 3))
    for mode in MODE_NAMES:
        made = decoder.generate(prompts, mode=mode, max_new_tokens=n, batch=batch)
        assert [g.tokens for g in made] == list(truth.values()), mode
        if mode == "eagle" and min(map(len, truth.values())) >= WINDOW:
            assert all(g.steps < len(g.tokens) for g in made), "half of what it drafts is right"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_real_head_drafts_above_the_window(small_target: Any, reference_model: Any, temperature: float) -> None:
    target = small_target("gemma3")
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(63, (n,), generator=draw).tolist() for n in (2 * WINDOW, 5 * WINDOW)]
    drafter = EagleDrafter(target, random_head(), sites=("resid_pre.1", "resid_pre.2", "resid_pre.3"))
    decoder = Decoder(target, probe=Coin(), neural=drafter, settings=ModeSettings(kappa=2, tau=0.5))  # type: ignore[arg-type]
    options = {"max_new_tokens": 4 * WINDOW, "temperature": temperature, "seed": 1}
    alone = [g.tokens for g in decoder.generate(prompts, mode="ar", **options)]
    if temperature == 0:
        assert alone == [greedy(reference_model("gemma3"), p, 4 * WINDOW) for p in prompts]
    for mode in ("copy", "eagle", "switchsd"):
        made = decoder.generate(prompts, mode=mode, batch=2, **options)
        assert [g.tokens for g in made] == alone, mode
