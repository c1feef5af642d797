from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from probes.linear import LinearProbe


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
