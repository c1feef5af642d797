"""Copy intent along a text is what the artifact says of the anchor's state, and never looks ahead."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from activations.cache import KVCache
from activations.target import Target
from probes.artifact import ChoiceError, Probe, ProbeConfig
from probes.intent import copy_intent

IDS = torch.randint(0, 63, (12,), generator=torch.Generator().manual_seed(5)).tolist()


def make_probe(target: Target, site: str) -> Probe:
    config = ProbeConfig(
        site=site, width=target.width, label="follow", label_settings={"match": 1}, threshold=0.5,
        threshold_rule="none", target=target.fingerprint, target_name=target.name, store="0" * 64, split={},
        metrics={}, provenance={},
    )  # fmt: skip
    weight = torch.randn(target.width * len(config.sites), generator=torch.Generator().manual_seed(4))
    return Probe(config, weight, bias=0.3)


@pytest.fixture
def target(small_target: Callable[..., Target]) -> Target:
    return small_target("llama")


def test_scores_are_those_of_the_states(target: Target) -> None:
    sites = ["resid_post.0", "resid_mid.2+resid_post.0"]
    found = copy_intent(target, [make_probe(target, site) for site in sites], IDS)
    assert found.shape == (2, 11)
    with target.read(["resid_post.0", "resid_mid.2"]) as reader:
        target.hidden(torch.tensor([IDS]), KVCache(1, capacity=12))
    post, mid = (state[0] for state in reader.states.values())
    for row, state in zip(found, (post, torch.cat([mid, post], dim=-1)), strict=True):
        expected = make_probe(target, sites[0] if state is post else sites[1]).score(state)[:-1]
        np.testing.assert_allclose(row, expected.numpy(), rtol=1e-4)


def test_no_score_knows_a_later_token(target: Target) -> None:
    probe = make_probe(target, "resid_post.2")
    whole = copy_intent(target, [probe], IDS)
    other = copy_intent(target, [probe], [*IDS[:7], *[(i + 1) % 63 for i in IDS[7:]]])
    np.testing.assert_allclose(other[:, :7], whole[:, :7], rtol=1e-5)
    assert not np.allclose(other[:, 7:], whole[:, 7:], rtol=1e-3)


def test_a_probe_of_another_target_is_refused(target: Target, small_target: Callable[..., Target]) -> None:
    with pytest.raises(ChoiceError, match="was trained on"):
        copy_intent(small_target("gemma3"), [make_probe(target, "resid_post.0")], IDS)
