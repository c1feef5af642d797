from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.estimator_checks import parametrize_with_checks

import probes.rows
from probes.artifact import ProbeError
from probes.length import LengthProbe
from probes.linear import LinearProbe


@parametrize_with_checks([LengthProbe()])
def test_scikit_learn_contract(estimator: Any, check: Any) -> None:
    """As a regressor of numbers of 0 or more."""
    check(estimator)


def lengths(rows: int, seed: int, m_max: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """States, true lengths, and both as a cut text shows them: lower bounds, and which they are."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    hazard = 1 / (1 + np.exp(-(1.5 * x[:, :1] + 0.5 - 0.1 * np.arange(m_max))))
    true = np.cumprod(rng.random((rows, m_max)) < hazard, axis=1).sum(axis=1)
    seen = rng.integers(0, 12, rows)  # tokens before the text was cut
    return x, true, np.minimum(true, seen), (true >= seen) & (seen < m_max)


def test_without_states_it_is_the_product_limit_estimate() -> None:
    """Kaplan and Meier's estimate of the survival function from rows of which some are cut."""
    _, _, seen, cut = lengths(500, 0)
    head = LengthProbe(m_max=8, steps=8).fit(np.zeros((500, 1)), seen, cut)
    expected, alive = [], 1.0
    for k in range(1, 9):
        risk = (seen >= k) | ((seen == k - 1) & ~cut)
        alive *= (seen >= k).sum() / risk.sum()
        expected.append(alive)
        assert head.at_risk_[k - 1] == risk.sum()
    np.testing.assert_allclose(head.survival([[0.0]])[0], expected, rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_each_step_is_a_logistic_regression_of_the_rows_that_got_there(steps: int) -> None:
    x, _, seen, cut = lengths(600, 1)
    weights = np.random.default_rng(2).integers(0, 3, 600)
    head = LengthProbe(m_max=8, steps=steps, l2=1e-3).fit(x, seen, cut, weights)

    def rows_of(k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        risk = (seen >= k) | ((seen == k - 1) & ~cut)
        return x[risk], (seen >= k)[risk], weights[risk]

    parts = [[rows_of(k)] for k in range(1, steps + 1)]
    if steps < 8:
        parts.append([rows_of(k) for k in range(steps + 1, 9)])  # stacked: one hazard for all of them
    assert head.coef_.shape == (len(parts), 3)
    for number, part in enumerate(parts):
        states, went_on, weight = (np.concatenate(columns) for columns in zip(*part, strict=True))
        other = LinearProbe(l2=1e-3).fit(states, went_on, weight)
        z, expected = x @ head.coef_[number] + head.intercept_[number], other.decision_function(x)
        # r is the RMS of the rows that got there, each once, or once a step: a slightly different penalty
        np.testing.assert_allclose(z, expected, atol=1e-7 if number < steps else 5e-2)


def test_cut_rows_do_not_bias_it() -> None:
    """Nearer the truth than leaving them out, and than taking them as ended."""
    x, true, seen, cut = lengths(20000, 3)
    head = LengthProbe(m_max=8, steps=8, l2=1e-4)
    far = x[:, 0] > 0.5  # long candidates are cut most
    truth = true[far].mean()
    assert head.fit(x, seen, cut).expected(x[far]).mean() == pytest.approx(truth, abs=0.06)
    assert head.fit(x[~cut], seen[~cut]).expected(x[far]).mean() < truth - 0.3
    assert head.fit(x, seen).expected(x[far]).mean() < truth - 0.3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 3))
def test_the_three_answers_agree(seed: int, steps: int, more: int) -> None:
    m_max = steps + more
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(40, 2)), rng.integers(0, m_max + 3, 40)
    head = LengthProbe(m_max=m_max, steps=steps).fit(x, y, rng.random(40) < 0.2)
    survival, law = head.survival(x), head.distribution(x)
    assert survival.shape == (40, m_max) and law.shape == (40, m_max + 1)
    assert (np.diff(np.hstack([np.ones((40, 1)), survival]), axis=1) <= 0).all() and (survival >= 0).all()
    np.testing.assert_allclose(law.sum(axis=1), 1)
    np.testing.assert_allclose(law @ np.arange(m_max + 1), head.expected(x))
    for nodes in range(m_max + 1):
        np.testing.assert_allclose(law @ np.minimum(np.arange(m_max + 1), nodes), head.expected(x, nodes), atol=1e-12)
    assert (head.predict(x) == head.expected(x)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fit_store_is_fit(stored: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    x, _, seen, cut = lengths(1000, 4)
    x = np.hstack([x, x[:, :1] ** 2])
    states = torch.from_numpy(x).to(dtype)
    rows = np.random.default_rng(5).random(1000) < 0.8
    store = stored({"embed": states[:, :2], "resid_mid.0": states[:, 2:]}, shard=300)
    monkeypatch.setattr(probes.rows, "BLOCK_BYTES", 3000)
    streamed = LengthProbe(m_max=8, steps=3).fit_store(store, store.sites, seen, cut, rows)
    monkeypatch.undo()
    kind = np.float64 if dtype == torch.float64 else np.float32
    whole = states.double().numpy().astype(kind)
    held = LengthProbe(m_max=8, steps=3).fit(whole[rows], seen[rows], cut[rows])
    tight = 1e-8 if dtype == torch.float64 else 2e-3
    np.testing.assert_allclose(streamed.expected(whole), held.expected(whole), atol=tight)
    found = streamed.expected_store(store, store.sites, rows)
    np.testing.assert_allclose(found, streamed.expected(whole[rows]), rtol=1e-4)
    with pytest.raises(ProbeError, match="none of the store's 1000 rows is chosen"):
        LengthProbe().fit_store(store, "embed", seen, cut, np.zeros(1000, bool))
    with pytest.raises(ValueError, match=r"accepted has shape \[999\]; it must be \[1000\]"):
        LengthProbe().fit_store(store, "embed", seen[1:], cut)


def test_a_step_with_one_outcome_has_no_slope() -> None:
    """As with all rows accepted, or none: a chance near the end of its range, for every state."""
    x = np.random.default_rng(6).normal(size=(20, 2))
    never, always = (LengthProbe(m_max=3, steps=2).fit(x, np.full(20, n)) for n in (0, 3))
    np.testing.assert_allclose(never.survival(x)[:, 0], 0.5 / 21)
    np.testing.assert_allclose(always.survival(x)[:, 0], 20.5 / 21)
    assert (never.coef_ == 0).all() and (always.coef_ == 0).all()
    np.testing.assert_allclose(never.survival(x)[:, 1] / never.survival(x)[:, 0], 0.5)  # nobody got there


def test_a_length_between_two_counts_as_part_of_each() -> None:
    x = np.zeros((4, 1))
    mixed = LengthProbe(m_max=4, steps=4).fit(x, [1.5, 1.5, 2.0, 3.0])
    parts = LengthProbe(m_max=4, steps=4).fit(np.zeros((6, 1)), [1, 2, 1, 2, 2, 3], None, [0.5, 0.5, 0.5, 0.5, 1, 1])
    np.testing.assert_allclose(mixed.survival([[0.0]]), parts.survival([[0.0]]))


@pytest.mark.parametrize(
    ("options", "y", "cut", "says"),
    [
        ({}, [-1, 2], None, r"0 or more, got \[-1.0\]"),
        ({"steps": 0}, [1, 2], None, "steps is 0 and m_max 20"),
        ({"m_max": 2, "steps": 3}, [1, 2], None, "steps is 3 and m_max 2"),
        ({}, [1.5, 2], [True, False], "a censored length must be a whole number"),
        ({}, [1, 2], [True], r"censored has shape \[1\]"),
        ({"l2": 0.0}, [1, 0], None, "l2 must be above 0"),
    ],
)
def test_bad_calls(options: dict[str, Any], y: list[float], cut: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LengthProbe(**options).fit([[0.0], [1.0]], y, cut)


def test_states_that_are_not_finite_and_drafts_that_are_too_long() -> None:
    x = np.zeros((30, 2))
    x[7] = np.inf
    with pytest.raises(ValueError, match=r"1 rows of X have NaN or infinite .*\(row 7\)"):
        LengthProbe().fit(x, np.ones(30))
    head = LengthProbe(m_max=4, steps=2).fit(np.zeros((3, 1)), [0, 1, 2])
    with pytest.raises(ValueError, match="nodes is 5; this head knows drafts of 0 to 4"):
        head.expected([[0.0]], 5)
