"""Anchors from rows, margins, and means over documents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activations.cache import KVCache
from activations.generation import Request, complete
from activations.labels import LabelConfig, follow_rows
from activations.target import Target
from activations.texts import StoredText
from probes.anchors import Clusters, anchored, margins, margins_behind


@given(st.lists(st.integers(0, 3), min_size=6, max_size=40), st.integers(1, 3), st.booleans())
def test_anchors_are_the_matches_whose_outcome_is_known(ids: list[int], kappa: int, stopped: bool) -> None:
    labels = LabelConfig(kappa=1, candidates=5)
    rows = follow_rows(ids, 3, labels, stopped)
    rows["document"] = np.full(len(rows["position"]), 7)
    found = anchored(StoredText(7, ids, 3), rows, labels, kappa)
    assert found.document == 7
    expected = []
    for t in range(2, len(ids) - 2):
        context = ids[: t + 2]

        def length(p: int, context: list[int] = context) -> int:
            n = 0
            while n < min(p, 32) and context[p - 1 - n] == context[-1 - n]:
                n += 1
            return n

        starts = [p for p in range(1, len(context)) if context[p - 1] == context[-1]]
        starts = sorted(starts, key=lambda p: (length(p), p), reverse=True)[:5]
        follows = [ids[t + 2] == context[p] for p in starts]
        longest = max(map(length, starts), default=0)
        censored = rows["censored"][rows["position"] == t][0]
        if longest >= kappa and not censored and (follows[0] or not any(follows)):
            expected.append((t, longest, context[starts[0]], follows[0]))
    assert [(a.position, a.match_length, a.candidate, a.genuine) for a in found.anchors] == expected
    if expected:
        assert found.ids == ids[: expected[-1][0] + 2]


def test_margins() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.0], [1.0, 4.0, 3.0], [2.0, 2.0, 0.0]])
    assert margins(logits, [1, 0, 0]).tolist() == [1.0, -3.0, 0.0]


def test_the_margin_behind_the_pending_token_tells_what_was_written(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    prompt = torch.randint(0, 20, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    [done] = complete(target, [Request(0, prompt * 2, 40)])
    ids = done.request.prompt + done.tokens
    labels = LabelConfig(kappa=1)
    rows = follow_rows(ids, len(prompt) * 2, labels, done.stopped)
    rows["document"] = np.zeros(len(rows["position"]), dtype=int)
    text = anchored(StoredText(0, ids, len(prompt) * 2), rows, labels, 1)
    found = margins_behind(target, text)
    assert len({a.genuine for a in text.anchors}) == 2
    assert [m > 0 for m in found.tolist()] == [a.genuine for a in text.anchors]  # greedy, in float32
    one = text.anchors[0]
    context = torch.tensor([ids[: one.position + 2]])
    logits = target.forward(context, KVCache(1, capacity=len(ids)))[0, -1:]
    torch.testing.assert_close(found[:1], margins(logits, [one.candidate]), rtol=1e-4, atol=1e-4)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=30))
def test_means_and_correlations_are_those_of_resampled_documents(rows: list[tuple[int, float, float]]) -> None:
    documents, x, y = (np.array(v) for v in zip(*rows, strict=True))
    clusters = Clusters(documents, resamples=40, seed=3)
    names = np.unique(documents)
    found = clusters.mean(x)
    assert found.estimate == pytest.approx(x.mean())
    if len(names) == 1:
        assert np.isnan(found.lower)
        return
    draws = np.random.default_rng(3).multinomial(len(names), np.full(len(names), 1 / len(names)), 40)
    again = [
        np.concatenate([np.tile(x[documents == n], c) for n, c in zip(names, draw, strict=True)]) for draw in draws
    ]
    expected = np.quantile([values.mean() for values in again], [0.025, 0.975])
    assert (found.lower, found.upper) == pytest.approx(tuple(expected))
    if x.std() > 0.1 and y.std() > 0.1:
        assert clusters.correlation(x, y).estimate == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
        assert clusters.correlation(x, -3 * x + 1).estimate == pytest.approx(-1)


def test_what_does_not_vary_has_no_correlation() -> None:
    assert np.isnan(Clusters([0, 0, 1], 10, 0).correlation([1, 2, 3], [0.5, 0.5, 0.5]).estimate)
