from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from probes.baselines import (
    BASE_RATE,
    COSINE,
    FITS,
    LEAK,
    LOGITS,
    LOOKBACK,
    SURFACE,
    WITH_PROBE,
    baselines,
    cosines,
    logits_features,
    skipped,
    surface_features,
    with_probe,
)
from probes.task import LabelOf, Task, measured_task, task_of

SPAN = LabelOf("span_1")


def task(store: Any) -> Task:
    return task_of(store, SPAN, 0.2, 20, 0)


def test_features_are_finite_and_zero_without_a_match(fake_store: Any) -> None:
    rows = fake_store().rows()
    surface, logits = surface_features(rows), logits_features(rows)
    assert surface.shape == (2400, len(SURFACE)) and logits.shape == (2400, len(LOGITS))
    assert np.isfinite(surface).all() and np.isfinite(logits).all()
    without = rows["match_length"] == 0
    assert (surface[without] == 0).all() and (surface[~without, 0] == 1).all()
    row = int(np.flatnonzero(rows["source"] == "prompt")[0])
    expected = [1, *(np.log1p(rows[k][row]) for k in SURFACE[1:4]), rows["agreement"][row], 1]
    np.testing.assert_allclose(surface[row], expected, rtol=1e-6)


def test_scores_use_only_fit_rows_labels(fake_store: Any) -> None:
    """Labels outside the fit part change no score."""
    store = fake_store()
    first = task(store)
    column = store._rows["span_1"]
    away = (first.split.part != "fit") & (column >= 0)
    column[away] = 1 - column[away]
    other = task(store)
    scores, changed = baselines(first, store), baselines(other, store)
    assert scores.keys() == changed.keys()
    for name, found in scores.items():
        assert np.isfinite(found.score[first.test]).all()
        np.testing.assert_array_equal(found.score, changed[name].score)
    probe = np.random.default_rng(0).normal(size=len(first.y))
    states = probe[:, None].repeat(3, axis=1)
    for name, found in with_probe(first, probe, states, 1e-2).items():
        np.testing.assert_array_equal(found.score, with_probe(other, probe, states, 1e-2)[name].score)


def test_cross_fitted_scores_do_not_see_their_own_group(fake_store: Any) -> None:
    store = fake_store(split=False)
    first = measured_task(store, SPAN, 5, 20, 0)
    flipped = first.folds[0].score & (first.y >= 0)
    y = np.where(flipped, 1 - first.y, first.y).astype(np.int8)
    other = Task(SPAN, first.rows, y, first.split, first.folds, 20, 0)
    scores, changed = baselines(first, store), baselines(other, store)
    for name, found in scores.items():
        assert np.isfinite(found.score[first.scope]).all()
        if name != BASE_RATE:
            np.testing.assert_array_equal(found.score[flipped], changed[name].score[flipped])
    assert np.ptp(scores[BASE_RATE].score) == 0  # or folds would be told apart by it


def test_order_of_the_baselines_is_that_of_what_they_know(fake_store: Any) -> None:
    store, told = fake_store(), list[str]()
    mine = task(store)
    scores = baselines(mine, store, told.append)
    test = mine.tests["all"]
    auc = {name: roc_auc_score(mine.y[test], found.score[test]) for name, found in scores.items()}
    assert auc[LEAK] > auc["surface, boosted trees"] > 0.7
    assert abs(auc["last-step logits, logistic"] - 0.5) < 0.05  # the fake logits are noise
    assert auc[BASE_RATE] == 0.5
    knows = np.where(mine.y == 1, 1.0, 0.0) + np.random.default_rng(0).normal(size=len(mine.y))
    stacked = with_probe(mine, knows, None, 1e-2, told.append)
    assert set(stacked) == set(WITH_PROBE[:2])
    with_it = roc_auc_score(mine.y[test], stacked[WITH_PROBE[0]].score[test])
    assert with_it > auc["surface + logits, logistic"] + 0.02
    assert len(told) == FITS - 1  # without the state


def test_what_a_store_lacks_is_told(fake_store: Any) -> None:
    store = fake_store()
    assert [line.split(":")[0] for line in skipped(store.rows(), store)] == [LOOKBACK, COSINE]
    store._rows["next_logprob"] = np.full(2400, np.nan, dtype=np.float32)
    assert [line.split(":")[0] for line in skipped(store.rows(), store)] == [LOOKBACK, COSINE, LEAK]
    assert not {LOOKBACK, COSINE, LEAK} & set(baselines(task(store), store))


def test_lookback_ratios_of_all_heads(fake_store: Any) -> None:
    store = fake_store()
    rng = np.random.default_rng(0)
    heads = rng.normal(size=(2400, 8))
    heads[:, 3] -= store._rows["span_1"]  # one head looks less at the prompt where text is copied
    store._states["lookback"] = torch.from_numpy(heads).to(torch.bfloat16)
    mine = task(store)
    found = baselines(mine, store)[LOOKBACK]
    test = mine.tests["all"]
    one = roc_auc_score(mine.y[test], -heads[test, 3])
    assert found.probability and roc_auc_score(mine.y[test], found.score[test]) > one - 0.03 > 0.65


def test_cosine_of_the_state_and_that_at_its_match(fake_store: Any) -> None:
    store = fake_store()
    rng = np.random.default_rng(0)
    matched, copied = store._rows["match_length"] > 0, store._rows["span_1"] == 1
    for site, noise in (("resid_mid.1", 2.0), ("resid_post.1", 30.0)):
        here = store.states(site).float().numpy()
        there = here + rng.normal(size=here.shape) * np.where(copied, noise / 2, noise)[:, None]
        store._states[f"{site}@source"] = torch.from_numpy(there * matched[:, None])
    here, there = (store.states(name).double().numpy() for name in ("resid_mid.1", "resid_mid.1@source"))
    found = cosines(store, "resid_mid.1", 2400)
    assert np.isnan(found[~matched]).all()
    for row in np.flatnonzero(matched)[:50]:
        expected = here[row] @ there[row] / np.linalg.norm(here[row]) / np.linalg.norm(there[row])
        assert abs(found[row] - expected) < 1e-3
    mine = task(store)
    scores = baselines(mine, store)
    [name] = [name for name in scores if name.startswith(COSINE)]
    assert name == f"{COSINE} at resid_mid.1", "the selection part chooses the site that knows more"
    assert roc_auc_score(mine.y[mine.test], scores[name].score[mine.test]) > 0.6
    assert np.isfinite(scores[name].score[mine.tests["all"]]).all()


def test_a_stack_on_scores_of_its_own_fit_rows_is_worse(fake_store: Any) -> None:
    """Why the probe's log-odds on the fit rows must be of refits: here they are right there and noise elsewhere."""
    mine = task(fake_store())
    noise = np.random.default_rng(0).normal(size=len(mine.y))
    overfit = np.where(mine.split.part == "fit", 4.0 * mine.y, noise)
    auc = {}
    for name, score in (("overfit", overfit), ("unseen", noise)):
        stacked = with_probe(mine, score, None, 1e-2)[WITH_PROBE[0]].score
        auc[name] = roc_auc_score(mine.y[mine.test], stacked[mine.test])
    assert auc["unseen"] > auc["overfit"] + 0.02
