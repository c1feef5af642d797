from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

import probes.logistic
import probes.rows
from probes.linear import LinearProbe
from probes.rows import StoredStates


@parametrize_with_checks([LinearProbe(), LinearProbe(fit_intercept=False)])
def test_scikit_learn_contract(estimator: Any, check: Any) -> None:
    check(estimator)


def states_like_a_model(rows: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """States with a few huge entries and a large mean, as residual streams have, and labels from a noisy direction."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, width)) * np.exp(rng.normal(size=width))
    x[:, :2] = 300 + 20 * rng.normal(size=(rows, 2))
    direction = rng.normal(size=width) / np.exp(rng.normal(size=width))
    direction[:2] = 0
    z = x @ direction
    y = rng.random(rows) < 1 / (1 + np.exp(-(z - np.median(z)) / z.std() * 2))
    return x, y


def reference(x: np.ndarray, y: np.ndarray, l2: float, intercept: bool) -> np.ndarray:
    """The objective of the module's docstring, minimised by scipy: raw weights and bias, joined."""
    r = np.sqrt((x**2).mean())
    signs = np.where(y, 1.0, -1.0)

    def objective(p: np.ndarray) -> tuple[float, np.ndarray]:
        z = signs * (x @ p[:-1] / r + p[-1] * intercept)
        pull = -signs / (1 + np.exp(z)) / len(x)
        gradient = np.append(x.T @ pull / r + l2 * p[:-1], pull.sum() * intercept)
        return float(np.logaddexp(0, -z).mean() + l2 / 2 * p[:-1] @ p[:-1]), gradient

    p = minimize(objective, np.zeros(x.shape[1] + 1), jac=True, method="L-BFGS-B",
                 options={"maxiter": 20000, "maxfun": 40000, "ftol": 1e-15, "gtol": 1e-9}).x  # fmt: skip
    return np.append(p[:-1] / r, p[-1] * intercept)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(300, 7), (60, 80), (9000, 20)])
def test_finds_the_optimum_of_its_objective(rows: int, width: int, intercept: bool) -> None:
    x, y = states_like_a_model(rows, width, seed=rows)
    probe = LinearProbe(l2=1e-2, fit_intercept=intercept).fit(x, y)
    expected = reference(x, y, 1e-2, intercept)
    scores = x @ expected[:-1] + expected[-1]
    np.testing.assert_allclose(probe.decision_function(x), scores, rtol=1e-3, atol=1e-3 * scores.std())
    assert probe.n_iter_ < 60


def test_agrees_with_scikit_learn() -> None:
    x, y = states_like_a_model(400, 12, seed=1)
    l2 = 1e-3
    probe = LinearProbe(l2=l2).fit(x, y)
    other = LogisticRegression(C=1 / (l2 * len(x)), solver="newton-cholesky", tol=1e-10, max_iter=1000)
    other.fit(x / probe.rms_, y)
    np.testing.assert_allclose(probe.coef_ * probe.rms_, other.coef_, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(probe.predict_proba(x), other.predict_proba(x / probe.rms_), atol=1e-6)


def test_float32_is_close_to_float64() -> None:
    x, y = states_like_a_model(2000, 64, seed=2)
    double, single = LinearProbe().fit(x, y), LinearProbe().fit(x.astype(np.float32), y)
    assert single.decision_function(x.astype(np.float32)).dtype == np.float32
    np.testing.assert_allclose(single.predict_proba(x)[:, 1], double.predict_proba(x)[:, 1], atol=5e-3)


def test_columns_that_repeat_and_a_tiny_penalty() -> None:
    x, y = states_like_a_model(200, 6, seed=5)
    probe = LinearProbe(l2=1e-13).fit(np.hstack([x, x]), y)
    single = LinearProbe(l2=1e-13).fit(x, y)
    np.testing.assert_allclose(probe.decision_function(np.hstack([x, x])), single.decision_function(x), atol=1e-3)


def test_the_unit_of_the_states_does_not_matter() -> None:
    x, y = states_like_a_model(300, 8, seed=3)
    small, large = LinearProbe().fit(x, y), LinearProbe().fit(x * 1024, y)
    np.testing.assert_allclose(small.coef_, large.coef_ * 1024, rtol=1e-6)
    assert large.rms_ == pytest.approx(1024 * small.rms_)


def test_same_weights_every_time() -> None:
    x, y = states_like_a_model(500, 16, seed=4)
    assert (LinearProbe().fit(x, y).coef_ == LinearProbe().fit(x, y).coef_).all()


@pytest.mark.parametrize("l2", [0.0, -1.0, float("nan")])
def test_refuses_a_fit_without_penalty(l2: float) -> None:
    with pytest.raises(ValueError, match="l2 must be above 0"):
        LinearProbe(l2=l2).fit([[0.0], [1.0]], [0, 1])


def test_refuses_one_class() -> None:
    with pytest.raises(ValueError, match="two classes"):
        LinearProbe().fit([[0.0], [1.0]], [1, 1])


# -- from a store -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fit_store_finds_what_fit_finds(
    stored: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, intercept: bool
) -> None:
    x, y = states_like_a_model(3000, 12, seed=6)
    states = {"embed": torch.from_numpy(x[:, :6]).to(dtype), "resid_post.0": torch.from_numpy(x[:, 6:]).to(dtype)}
    rows = np.random.default_rng(0).random(3000) < 0.8
    weights = np.random.default_rng(1).integers(0, 3, 3000).astype(float)
    store = stored(states, shard=700)
    monkeypatch.setattr(probes.logistic, "SPACED_ROWS", 200)
    monkeypatch.setattr(probes.rows, "BLOCK_BYTES", 5000)  # about 100 rows
    streamed = LinearProbe(fit_intercept=intercept).fit_store(store, ["embed", "resid_post.0"], y, rows, weights)
    monkeypatch.setattr(probes.rows, "BLOCK_BYTES", 1 << 21)
    kind = np.float64 if dtype == torch.float64 else np.float32
    whole = torch.cat([states["embed"], states["resid_post.0"]], dim=1).double().numpy().astype(kind)
    held = LinearProbe(fit_intercept=intercept).fit(whole[rows], y[rows], weights[rows])
    tight = 1e-8 if dtype == torch.float64 else 1e-3
    scores = held.decision_function(whole)
    np.testing.assert_allclose(streamed.decision_function(whole), scores, atol=tight * scores.std())
    assert streamed.coef_.dtype == kind and streamed.n_features_in_ == 12
    assert streamed.rms_ == pytest.approx(held.rms_, rel=1e-6)
    found = streamed.decision_store(store, ["embed", "resid_post.0"], rows)
    np.testing.assert_allclose(found, streamed.decision_function(whole[rows]), rtol=1e-4, atol=1e-4)


def test_few_passes_over_the_rows(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the way is gone on evenly spaced rows."""
    x, y = states_like_a_model(20000, 12, seed=7)
    passes = []
    blocks = StoredStates.blocks
    monkeypatch.setattr(StoredStates, "blocks", lambda self: passes.append(1) or blocks(self))
    monkeypatch.setattr(probes.logistic, "SPACED_ROWS", 1000)
    store = stored({"embed": torch.from_numpy(x).float()}, shard=5000)
    probe = LinearProbe().fit_store(store, "embed", y)
    assert len(passes) < 15
    optimum = LinearProbe().fit(x, y)  # in float64
    scores = optimum.decision_function(x)
    np.testing.assert_allclose(probe.decision_function(x), scores, atol=1e-2 * scores.std())


def test_rows_that_mislead_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every evenly spaced row is of one class; the optimum is found all the same."""
    states, labels = states_like_a_model(4000, 5, seed=8)
    monkeypatch.setattr(probes.logistic, "SPACED_ROWS", 40)
    spaced = np.arange(4000) % 100 == 0
    places = np.concatenate([np.flatnonzero(spaced), np.flatnonzero(~spaced)])
    order = np.argsort(~labels, kind="stable")  # positive ones first
    x, y = np.empty_like(states), np.empty_like(labels)
    x[places], y[places] = states[order], labels[order]
    assert y[spaced].all() and not y.all()
    probe = LinearProbe(l2=1e-2).fit(x, y)
    expected = reference(x, y, 1e-2, True)
    scores = x @ expected[:-1] + expected[-1]
    np.testing.assert_allclose(probe.decision_function(x), scores, atol=1e-3 * scores.std())


def test_nan_states_are_named() -> None:
    x = np.zeros((30, 2))
    x[[4, 9], 1] = np.nan
    with pytest.raises(ValueError, match=r"2 rows of X have NaN or infinite .*\(rows 4, 9\)"):
        LinearProbe().fit(x, np.arange(30) % 2)


def test_bad_calls_of_fit_store(stored: Any) -> None:
    store = stored({"embed": torch.randn(60, 3), "resid_post.0": torch.randn(60, 3)})
    y = np.arange(60) % 2
    with pytest.raises(ValueError, match=r"two classes; these rows have 1 class: \[1\]"):
        LinearProbe().fit_store(store, "embed", y, y == 1)
    with pytest.raises(ValueError, match=r"y has shape \[59\]; it must be \[60\]: a value for each row"):
        LinearProbe().fit_store(store, "embed", y[:-1])
    with pytest.raises(ValueError, match="sample_weight must be finite and 0 or more"):
        LinearProbe().fit_store(store, "embed", y, sample_weight=np.full(60, -1.0))
    probe = LinearProbe().fit_store(store, "embed", y)
    with pytest.raises(ValueError, match="width 6, and the probe was fitted to 3"):
        probe.decision_store(store, ["embed", "resid_post.0"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device is 'cuda', and torch sees no GPU"):
        LinearProbe(device="cuda").fit([[0.0], [1.0]], [0, 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same_optimum() -> None:
    x, y = states_like_a_model(3000, 24, seed=9)
    here, there = (LinearProbe(device=device).fit(x, y) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(there.decision_function(x), here.decision_function(x), atol=1e-6)
