"""Probes of several targets beside each other: by relative depth, and along one text."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch

from activations.target import Target
from probes import plots
from probes.artifact import ChoiceError, Probe, ProbeConfig, ProbeError
from probes.evaluation import Interval
from probes.families import Reading, auc_by_depth, read_along, relative_depth
from probes.intent import copy_intent
from probes.train import TrainConfig, train


def test_relative_depth_runs_from_the_first_block_to_the_last() -> None:
    assert [relative_depth(f"resid_post.{k}", 5) for k in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert relative_depth("resid_mid.0", 1) == 0.0
    with pytest.raises(ValueError, match="embed lies in no block"):
        relative_depth("embed", 5)
    with pytest.raises(ValueError, match=r"resid_post\.5"):
        relative_depth("resid_post.5", 5)


def test_the_auc_of_every_kept_site_in_order(fake_store: Any) -> None:
    kept = ("resid_post.2", "resid_post.1")
    config = TrainConfig(label="span_0", l2=(1e-2,), resamples=20, sites=("resid_post.*",), keep=kept)
    result = train(fake_store(documents=48), config)
    blocks = result.probes["best"].config.target.blocks
    assert auc_by_depth(result, "all") == [
        (k / (blocks - 1), result.evaluations[f"resid_post.{k}"]["all"].roc_auc) for k in (1, 2)
    ]


def test_a_training_that_kept_nothing_is_told_so(fake_store: Any) -> None:
    config = TrainConfig(label="span_0", l2=(1e-2,), resamples=20, sites=("resid_post.*",))
    with pytest.raises(ProbeError, match="no site was kept"):
        auc_by_depth(train(fake_store(documents=48), config), "all")


# -- along a text -------------------------------------------------------------------------------------


def make_probe(target: Target, site: str) -> Probe:
    config = ProbeConfig(
        site=site, width=target.width, label="span_2", label_settings={}, threshold=0.5, threshold_rule="none",
        target=target.fingerprint, target_name=target.name, store="0" * 64, split={}, metrics={}, provenance={},
    )  # fmt: skip
    return Probe(config, torch.randn(target.width, generator=torch.Generator().manual_seed(4)))


PROMPT, ANSWER = [{"role": "user", "content": "ABCABD"}], "ABCXYABD"


def test_an_answer_is_read_from_the_end_of_the_prompt(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    probe = make_probe(target, "resid_post.2")
    found = read_along(target, probe, PROMPT, ANSWER)
    prompt = target.encode_messages(PROMPT)
    tokens = target.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    assert list(found.ends) == list(range(1, len(ANSWER) + 1))  # one letter a token here
    expected = copy_intent(target, [probe], [*prompt, *tokens])[0, len(prompt) - 1 :]
    np.testing.assert_array_equal(found.intent, expected)
    assert len(found.intent) == len(found.ends)


def test_no_reading_has_seen_its_token(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    probe = make_probe(target, "resid_post.2")
    one, other = (read_along(target, probe, PROMPT, text).intent for text in ("ABCX", "ABCY"))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    changed = read_along(target, probe, PROMPT, "AYCX").intent
    np.testing.assert_allclose(changed[:2], one[:2], rtol=1e-5)
    assert not np.allclose(changed[2:], one[2:], rtol=1e-3)


def test_bad_readings_are_refused(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    with pytest.raises(ValueError, match="the answer is empty"):
        read_along(target, make_probe(target, "resid_post.2"), PROMPT, "")
    with pytest.raises(ChoiceError, match="was trained on"):
        read_along(small_target("gemma3"), make_probe(target, "resid_post.2"), PROMPT, ANSWER)


# -- pictures -----------------------------------------------------------------------------------------


def svg(figure: Any) -> str:
    file = StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()


def test_curves_by_depth_have_their_intervals() -> None:
    found = {
        "one": [(0.0, Interval(0.6, 0.5, 0.7)), (1.0, Interval(0.9, 0.8, 0.95))],
        "$two$": [(0.5, Interval(0.7, 0.6, 0.8))],
    }
    figure: Any = plots.families(found)
    svg(figure)
    [axes] = figure.axes
    line, first, second, two, _, chance = axes.lines
    assert list(line.get_ydata()) == [0.6, 0.9] and list(two.get_ydata()) == [0.7]
    assert list(first.get_ydata()) == [0.5, 0.7] and list(second.get_ydata()) == [0.8, 0.95]
    np.testing.assert_allclose(line.get_xdata(), [0, 1], atol=0.02)
    assert list(chance.get_ydata()) == [0.5, 0.5]
    assert axes.get_xlabel() and axes.get_ylabel() and line.get_color() != two.get_color()


def test_a_text_is_drawn_with_its_words_and_what_stands_in_the_prompt() -> None:
    readings = {"one": Reading(np.array([3, 7]), np.array([0.2, 0.9], dtype=np.float32))}
    figure: Any = plots.along(readings, "old $x bus", [(0, 3), (7, 10)])
    assert "old" in svg(figure)
    [axes] = figure.axes
    [line] = axes.lines
    assert list(line.get_xdata()) == [3, 7] and list(line.get_ydata()) == pytest.approx([0.2, 0.9])
    assert [(p.get_x(), p.get_x() + p.get_width()) for p in axes.patches] == [(0, 3), (7, 10)]
    assert list(axes.get_xticks()) == [3, 6, 10]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["old", r"\$x", "bus"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["stands in the prompt", "one"]
    plots.along(readings, "no spans")
