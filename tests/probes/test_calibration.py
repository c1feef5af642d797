from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sklearn.isotonic import IsotonicRegression

from probes.calibration import METHODS, calibrate, reliability, sigmoid_parts
from probes.evaluation import evaluate


def overconfident(count: int = 4000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits three times too large and one too high, and labels."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=count)
    return 3 * true + 1, (rng.random(count) < 1 / (1 + np.exp(-true))).astype(int)


def test_reliability_bins_hold_equally_many_rows() -> None:
    rng = np.random.default_rng(0)
    p = rng.random(5000)
    y = rng.random(5000) < p
    good, bad = reliability(y, p), reliability(y, p**3)
    assert good.rows == [500] * 10
    assert good.error < 0.03 < 0.2 < bad.error
    assert good.predicted == sorted(good.predicted)
    assert reliability([0, 1, 1], [0.5, 0.5, 0.5], bins=1).error == pytest.approx(1 / 6)


def test_the_error_is_that_of_the_evaluation() -> None:
    rng = np.random.default_rng(1)
    p = rng.integers(0, 20, 997) / 20  # many ties
    y = (rng.random(997) < p).astype(int)
    found = evaluate(y, p, np.arange(997), probability=True, resamples=2).ece
    assert found is not None and reliability(y, p).error == pytest.approx(found.estimate)


def test_every_method_mends_what_is_wrong() -> None:
    logits, y = overconfident()
    fresh, truth = overconfident(seed=1)
    before = reliability(truth, 1 / (1 + np.exp(-fresh))).error
    for method in METHODS:
        p = calibrate(method, logits, y)(fresh)
        assert ((p >= 0) & (p <= 1)).all()
        after = reliability(truth, p).error
        assert after < (0.04 if method != "temperature" else before - 0.01)  # a temperature cannot move the middle


def test_methods_against_their_definitions() -> None:
    logits, y = overconfident(800)
    p = calibrate("temperature", logits, y)(logits)
    nll = [
        (-np.log(np.where(y == 1, q, 1 - q)).mean()) for q in (1 / (1 + np.exp(-logits * b)) for b in (0.1, 0.3, 0.6))
    ]
    assert -np.log(np.where(y == 1, p, 1 - p)).mean() <= min(nll) + 1e-9
    isotonic = IsotonicRegression(out_of_bounds="clip").fit(logits, y).predict(logits)
    np.testing.assert_allclose(calibrate("isotonic", logits, y)(logits), isotonic)
    priors = (y == 1).sum(), (y == 0).sum()
    target = np.where(y == 1, (priors[0] + 1) / (priors[0] + 2), 1 / (priors[1] + 2))  # Platt's

    def loss(parts: np.ndarray) -> float:
        z = parts[0] * logits + parts[1]
        return float(np.logaddexp(0, z).sum() - (target * z).sum())

    best = minimize(loss, [1.0, 0.0]).x
    np.testing.assert_allclose(sigmoid_parts("sigmoid", logits, y), best, atol=2e-3)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_two_numbers_say_the_same_as_the_calibrator(seed: int) -> None:
    logits, y = overconfident(200, seed)
    for method in ("sigmoid", "temperature"):
        a, b = sigmoid_parts(method, logits, y)  # type: ignore[arg-type]
        expected = calibrate(method, logits, y)(logits)  # type: ignore[arg-type]
        np.testing.assert_allclose(1 / (1 + np.exp(-(a * logits + b))), expected, atol=1e-6)


def test_calibration_needs_both_classes() -> None:
    with pytest.raises(ValueError, match="both classes"):
        calibrate("sigmoid", [0.1, 0.2], [1, 1])


def test_few_rows_are_calibrated_without_a_warning() -> None:
    for count in (1, 2, 4):
        logits, y = [0.5] * count + [-1.0] * 9, [1] * count + [0] * 9
        for method in METHODS:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                high, low = calibrate(method, logits, y)([0.5, -1.0])
            assert 0 <= low < high <= 1
