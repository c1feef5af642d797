from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.estimator_checks import parametrize_with_checks

import probes.rows
from probes.means import SPREAD_ROWS, DifferenceOfMeans
from probes.rows import StoredStates


@parametrize_with_checks([DifferenceOfMeans()])
def test_scikit_learn_contract(estimator: Any, check: Any) -> None:
    check(estimator)


def two_clouds(rows: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.random(rows) < 0.3
    return rng.normal(size=(rows, width)) + 2 * y[:, None] * rng.normal(size=width) + 5, y


def test_against_its_definition() -> None:
    x, y = two_clouds(500, 4, seed=0)
    weights = np.random.default_rng(1).random(500)
    probe = DifferenceOfMeans().fit(x, y, weights)
    a, b = (np.average(x[y == c], axis=0, weights=weights[y == c]) for c in (False, True))
    d = b - a
    t = x @ d
    spread = np.average((t - np.where(y, d @ b, d @ a)) ** 2, weights=weights)
    # log of the ratio of two normal densities with these means and this spread, and of the classes' shares
    expected = ((t - d @ a) ** 2 - (t - d @ b) ** 2) / (2 * spread) + np.log(weights[y].sum() / weights[~y].sum())
    np.testing.assert_allclose(probe.decision_function(x), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(probe.means_, [a, b])
    assert (probe.predict(x) == y).mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fit_store_is_fit_in_one_pass(stored: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x, y = two_clouds(2 * SPREAD_ROWS + 500, 4, seed=2)  # the spread from every second row
    states = torch.from_numpy(x).to(dtype)
    rows = np.random.default_rng(3).random(len(x)) < 0.99
    passes = []
    blocks = StoredStates.blocks
    monkeypatch.setattr(StoredStates, "blocks", lambda self: passes.append(1) or blocks(self))
    monkeypatch.setattr(probes.rows, "BLOCK_BYTES", 5000)
    store = stored({"embed": states[:, :1], "resid_mid.0": states[:, 1:]}, shard=3000)
    with pytest.raises(Exception, match="differ"):
        DifferenceOfMeans().fit_store(store, store.sites, y, rows)
    store = stored({"embed": states[:, :2], "resid_mid.0": states[:, 2:]}, shard=3000)
    streamed = DifferenceOfMeans().fit_store(store, store.sites, y, rows)
    assert len(passes) == 1
    kind = np.float64 if dtype == torch.float64 else np.float32
    whole = states.double().numpy().astype(kind)
    held = DifferenceOfMeans().fit(whole[rows], y[rows])
    np.testing.assert_allclose(streamed.decision_function(whole), held.decision_function(whole), rtol=1e-5, atol=1e-5)


def test_two_classes_with_one_mean_know_nothing_but_their_shares() -> None:
    x = np.array([[1.0], [-1.0], [1.0], [-1.0], [1.0], [-1.0]])
    probe = DifferenceOfMeans().fit(x, [0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(probe.predict_proba(x)[:, 1], 1 / 3)


def test_clouds_without_spread_stay_finite() -> None:
    probe = DifferenceOfMeans().fit([[0.0], [0.0], [1.0], [1.0]], [0, 0, 1, 1])
    assert np.isfinite(probe.decision_function([[0.0], [1.0]])).all()
    assert probe.predict([[0.1], [0.9]]).tolist() == [0, 1]


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="two classes"):
        DifferenceOfMeans().fit([[0.0], [1.0]], [0, 0])
