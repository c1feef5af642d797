from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from activations.target import Fingerprint
from probes.artifact import Probe, ProbeConfig
from probes.linear import LinearProbe
from probes.means import DifferenceOfMeans
from probes.mlp import MLPProbe

QUICK: dict[str, Any] = {"hidden": (16,), "batch_size": 64, "max_epochs": 30, "learning_rate": 1e-2}


@parametrize_with_checks([MLPProbe(), MLPProbe(hidden=(32, 16))])
def test_scikit_learn_contract(estimator: Any, check: Any) -> None:
    check(estimator)


def ring(rows: int, seed: int, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """States whose class is not linear: inside or outside a ring; one entry is huge, as in a residual stream."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, width))
    y = (x[:, 0] ** 2 + x[:, 1] ** 2) < 1.4
    x[:, 2] = 400 + 20 * x[:, 2]
    return x, y


@pytest.mark.parametrize("hidden", [(16,), (16, 8)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_learns_what_a_linear_probe_cannot(hidden: tuple[int, ...], dtype: Any) -> None:
    (x, y), (other, truth) = ring(2000, 0), ring(1000, 1)
    linear = LinearProbe().fit(x, y)
    probe = MLPProbe(**{**QUICK, "hidden": hidden}).fit(x.astype(dtype), y)
    assert roc_auc_score(truth, linear.decision_function(other)) < 0.6
    assert roc_auc_score(truth, probe.decision_function(other.astype(dtype))) > 0.98
    assert [w.shape for w, _ in probe.layers()] == [*zip(hidden, (6, *hidden), strict=False), (1, hidden[-1])]
    assert probe.decision_function(other.astype(dtype)).dtype == dtype


def test_the_same_seed_gives_the_same_weights() -> None:
    x, y = ring(300, 2)
    one, same, other = (MLPProbe(**{**QUICK, "seed": s}).fit(x, y).decision_function(x) for s in (1, 1, 2))
    assert (one == same).all() and not (one == other).any()
    state = torch.random.get_rng_state()
    MLPProbe(**QUICK).fit(x, y)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random numbers are left alone


def test_weight_decay_makes_smaller_weights() -> None:
    x, y = ring(300, 3)
    small, large = (MLPProbe(**QUICK, weight_decay=d).fit(x, y).layers()[0][0] for d in (3.0, 0.0))
    assert np.linalg.norm(small) < 0.8 * np.linalg.norm(large)


def noise(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 20)), rng.random(rows) < 0.5, np.arange(rows) // 10


def test_stops_where_held_out_groups_no_longer_gain() -> None:
    x, y, groups = noise(400, 4)
    long = MLPProbe(**QUICK).fit(x, y)
    assert long.n_iter_ == 30 and long.best_loss_ is None
    probe = MLPProbe(**QUICK, patience=3).fit(x, y, groups=groups)
    assert probe.n_iter_ < 30
    assert np.abs(probe.decision_function(x)).mean() < 0.6 * np.abs(long.decision_function(x)).mean()


def test_the_best_epoch_is_kept_and_its_loss_told() -> None:
    """Against a fit that ends at that epoch, on the rows that were not held out."""
    x, y, groups = noise(400, 5)
    probe = MLPProbe(**QUICK, patience=3).fit(x, y, groups=groups)
    best = probe.n_iter_ - 3
    again = MLPProbe(**{**QUICK, "max_epochs": best}).fit(x, y, groups=groups)
    assert (again.decision_function(x) == probe.decision_function(x)).all()
    held = np.isin(groups, np.random.default_rng(0).permutation(np.unique(groups))[:4])  # 10 % of 40 groups
    p = probe.predict_proba(x[held])[np.arange(held.sum()), y[held].astype(int)]
    assert probe.best_loss_ == pytest.approx(-np.log(p).mean(), rel=1e-6)


@pytest.mark.parametrize("grouped", [True, False])
def test_fit_store_of_one_shard_is_fit(stored: Any, grouped: bool) -> None:
    x, y = ring(400, 6)
    states = torch.from_numpy(x)
    store = stored({"embed": states[:, :3].contiguous(), "resid_mid.0": states[:, 3:].contiguous()}, shard=400)
    rows = np.random.default_rng(0).random(400) < 0.9
    groups = np.arange(400) // 10
    options: dict[str, Any] = {**QUICK, "max_epochs": 5}
    streamed = MLPProbe(**options).fit_store(store, store.sites, y, rows, groups=groups if grouped else None)
    held = MLPProbe(**options).fit(x[rows], y[rows], groups=groups[rows] if grouped else None)
    np.testing.assert_allclose(streamed.decision_function(x), held.decision_function(x), rtol=1e-9, atol=1e-9)


def test_fit_store_of_many_shards_learns_as_well(stored: Any) -> None:
    (x, y), (other, truth) = ring(2000, 7), ring(1000, 8)
    store = stored({"embed": torch.from_numpy(x).to(torch.bfloat16)}, shard=300)
    probe = MLPProbe(**QUICK).fit_store(store, "embed", y, groups=np.arange(2000) // 10)
    assert roc_auc_score(truth, probe.decision_function(other.astype(np.float32))) > 0.97
    found = probe.decision_store(store, "embed", np.arange(2000) >= 1500)
    assert roc_auc_score(y[1500:], found) > 0.97


def config(width: int, kind: Any, site: str = "embed") -> ProbeConfig:
    target = Fingerprint("LlamaForCausalLM", width, 3, "00", "aa")
    return ProbeConfig(site, width, "span_2", {}, 0.5, "none", target, "small", "00", {}, {}, {}, kind=kind)


@pytest.mark.parametrize(
    ("estimator", "kind"),
    [(LinearProbe(), "linear"), (DifferenceOfMeans(), "linear"), (MLPProbe(**QUICK), "mlp"),
     (MLPProbe(**{**QUICK, "hidden": (8, 4)}), "mlp")],
)  # fmt: skip
def test_the_artifact_of_an_estimator_scores_as_it_does(estimator: Any, kind: Any, tmp_path: Any) -> None:
    x, y = ring(300, 9)
    estimator.fit(x, y)
    probe = Probe.from_estimator(config(6, kind), estimator)
    read = Probe.from_pretrained(probe.save_pretrained(tmp_path))
    expected = torch.from_numpy(estimator.predict_proba(x)[:, 1]).float()
    torch.testing.assert_close(read.score(torch.from_numpy(x)), expected, atol=2e-4, rtol=1e-3)
    two = Probe.from_estimator(replace(config(3, kind), site="embed+resid_mid.1"), estimator, (2.0, 1.0))
    logit = torch.from_numpy(2 * estimator.decision_function(x) + 1).float()
    torch.testing.assert_close(two.logit(torch.from_numpy(x)), logit, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden": ()}, r"hidden is \(\)"),
        ({"hidden": (4, 0)}, r"hidden is \(4, 0\)"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"patience": 0}, "patience is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0"),
        ({"weight_decay": -1.0}, "weight_decay -1.0"),
        ({"holdout": 1.0}, "holdout is 1.0"),
    ],
)
def test_settings_that_cannot_be_meant(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MLPProbe(**options).fit([[0.0], [1.0]], [0, 1])


def test_groups_that_cannot_be_held_out() -> None:
    x, y = ring(40, 10)
    with pytest.raises(ValueError, match="holds out whole groups, and there is 1: leave groups out"):
        MLPProbe(**QUICK).fit(x, y, groups=np.zeros(40))
    with pytest.raises(ValueError, match=r"held-out groups \(1 of 2 groups are held out\) have one class"):
        MLPProbe(**QUICK).fit(x, y, groups=y)
    with pytest.raises(ValueError, match=r"groups has shape \[39\]"):
        MLPProbe(**QUICK).fit(x, y, groups=np.zeros(39))


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="two classes"):
        MLPProbe().fit([[0.0], [1.0]], [0, 0])
