"""The self-check finds the wrong setting of a head that was good before it was set wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_eagle_head import random_head, reference_outputs

from activations import packaged
from activations.target import Fingerprint, Target
from decoding.eagle import selfcheck
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.head import EagleHead, HeadConfig, HeadWarning
from decoding.eagle.selfcheck import check_head, choices, ensure_head, neighbours, write

PROMPTS = [[1, 2, 3, 4], [60, 9, 9, 12, 40], [33, 21, 8]]
TOKENS = 16


@pytest.fixture(scope="module")
def good_head(small_target: Callable[..., Target]) -> EagleHead:
    """A random block whose output matrix is fitted to the target's own text, with norm_before_residual."""
    target, plain = small_target(), random_head(1)
    config = HeadConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64,
        draft_vocab_size=64, layer_ids=(1, 2, 3), norm_before_residual=True,
    )  # fmt: skip
    head = EagleHead(config)
    head.load_state_dict({k: v for k, v in plain.state_dict().items() if k not in ("lm_head.weight", "d2t")}, False)
    head.set_vocabulary(torch.arange(64))
    head = head.eval().requires_grad_(False)
    outputs, wanted = [], []
    for text in write(target, PROMPTS, TOKENS + 4, config.sites(4)):
        states = torch.cat([text.states[s] for s in config.sites(4)], dim=-1)
        for row in range(1, len(text.tokens) - 2):
            output = reference_outputs(head, target.embed, states[: row + 1], text.tokens[: row + 2], [])
            outputs.append(head.norm(output))
            wanted.append(text.tokens[row + 2])
    x, y = torch.stack(outputs), torch.nn.functional.one_hot(torch.tensor(wanted), 64).float()
    head.lm_head.weight.copy_(torch.linalg.lstsq(x.T @ x + 1e-3 * torch.eye(32), x.T @ y).solution.T * 10)
    return head


def test_a_good_head_passes(small_target: Callable[..., Target], good_head: EagleHead) -> None:
    check = check_head(small_target(), good_head, PROMPTS, TOKENS, steps=3)
    assert check.fits and not check.better
    assert check.agreement[0] > 0.6 and len(check.agreement) == len(check.accepted) == 3
    assert check.accepted[0] == check.agreement[0]
    assert all(a >= b for a, b in zip(check.accepted, check.accepted[1:], strict=False))
    assert check.tokens_per_step == pytest.approx(1 + sum(check.accepted))
    assert sum(s.rows for s in check.positions) == check.rows > 2 * TOKENS


def test_choices_are_compared_at_the_right_places(small_target: Callable[..., Target], good_head: EagleHead) -> None:
    """Against the reference, which feeds true tokens one by one."""
    target = small_target()
    sites = good_head.config.sites(4)
    texts = write(target, PROMPTS, 6, sites)
    hits, at = choices(EagleDrafter(target, good_head), texts, steps=2)
    row = 0
    for text in texts:
        ids = text.tokens
        states = torch.cat([text.states[s] for s in sites], dim=-1)
        for first in range(text.prompt + 1, len(ids) - 1):
            assert at[row] == first
            for step in range(2):
                chain = ids[first : first + step]
                output = reference_outputs(good_head, target.embed, states[: first - 1], ids[:first], chain)
                assert hits[row, step] == (int(good_head.logits(output).argmax()) == ids[first + step])
            row += 1
    assert row == len(hits)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"layer_ids": (0, 1, 2)}, "eagle_aux_hidden_state_layer_ids [1, 2, 3]"),
        ({"layer_ids": (2, 3, 4)}, "eagle_aux_hidden_state_layer_ids [1, 2, 3]"),
        ({"norm_before_residual": False}, "norm_before_residual true"),
    ],
)
def test_the_wrong_setting_is_named(
    small_target: Callable[..., Target],
    good_head: EagleHead,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict,
    named: str,
) -> None:
    """The small target's text is so regular that a wrong head still agrees now and then: the bar is set higher."""
    monkeypatch.setattr(selfcheck, "LOW", 0.99)
    other = selfcheck._with(good_head, **wrong)
    check = check_head(small_target(), other, PROMPTS, TOKENS)
    assert not check.fits
    assert check.better[0][0] == named
    assert named in check.told() and "is probably wrong" in check.told()


def test_neighbours_of_other_kinds(small_target: Callable[..., Target], good_head: EagleHead) -> None:
    target = small_target()
    scaled = selfcheck._with(good_head, rope_theta=500.0, rope_scaling={"rope_type": "linear", "factor": 2.0})
    found = neighbours(target, scaled)
    assert {"rope_theta 10000", "no rope_scaling", "norm_output true", "norm_before_residual false"} < set(found)
    assert found["eagle_aux_hidden_state_layer_ids [2, 3, 4]"][1] == ("resid_pre.2", "resid_pre.3", "resid_post.3")
    lowest = selfcheck._with(good_head, layer_ids=(0, 2, 4))
    assert not any("layer_ids" in name for name in neighbours(target, lowest)), "there is nothing beyond the ends"


def test_a_head_is_checked_once(
    small_target: Callable[..., Target], good_head: EagleHead, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packaged, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(selfcheck, "LOW", 1.1)  # no head is good enough
    target = small_target()
    known = replace(target.fingerprint, revision="abc")
    monkeypatch.setattr(target, "fingerprint", known)
    calls = []

    def counted(*arguments: object) -> selfcheck.HeadCheck:
        calls.append(arguments)
        return check_head(target, good_head, PROMPTS, 4)

    monkeypatch.setattr(selfcheck, "check_head", counted)
    for _ in range(2):
        with pytest.warns(HeadWarning, match="switchsd head check some/folder"):
            ensure_head(target, good_head, Path("some/folder"))
    assert len(calls) == 1
    monkeypatch.setattr(target, "fingerprint", Fingerprint(**{**known.to_dict(), "revision": "other"}))
    monkeypatch.setattr(selfcheck, "LOW", 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ensure_head(target, good_head, Path("some/folder"))
    assert len(calls) == 2
