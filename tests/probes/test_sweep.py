from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from activations.store import CaptureStore
from probes import reading
from probes.artifact import ChoiceError
from probes.evaluation import Interval
from probes.linear import LinearProbe
from probes.reading import is_held, is_serving, logits_at, sites_of, states_at
from probes.study import StudyConfig
from probes.sweep import Recipe, SiteResult, fit_cell, unseen_scores
from probes.task import LabelOf, task_of
from probes.train import TrainConfig, train

SPAN = LabelOf("span_1")


@pytest.fixture
def on_disk(fake_store: Any, stored: Callable[..., CaptureStore]) -> CaptureStore:
    """The fake store as files, whose states can be read in parts."""
    fake = fake_store(documents=45)
    columns = {k: v.astype(str) if v.dtype.kind == "U" else v for k, v in fake.rows().items()}
    sites = {site: fake.states(site) for site in ("resid_mid.1", "resid_post.1")}
    store = stored(sites, shard=700, **columns)
    store.manifest = {**store.manifest, **{k: fake.manifest[k] for k in ("target", "target_name", "config")}}
    return store


def test_sites_by_pattern_and_side_by_side(fake_store: Any) -> None:
    store = fake_store()
    assert sites_of(store, ()) == store.sites
    assert sites_of(store, ("resid_*.1", "embed+resid_mid.1")) == ["resid_mid.1", "resid_post.1", "embed+resid_mid.1"]
    assert sites_of(store, ("embed+resid_mid.1",)) == ["embed+resid_mid.1"]
    with pytest.raises(ChoiceError, match="no captured site is 'nope'"):
        sites_of(store, ("embed+nope",))
    assert is_serving("resid_post.1+resid_pre.2") and not is_serving("resid_post.1+resid_mid.1")
    both = states_at(store, "embed+resid_mid.1", 2400)
    assert torch.equal(both, torch.cat([store.states("embed"), store.states("resid_mid.1")], dim=1))


def test_the_penalty_is_chosen_on_the_selection_part(fake_store: Any) -> None:
    store, penalties = fake_store(), (1e-4, 1e-2, 1e3)
    task = task_of(store, SPAN, 0.2, 20, 0)
    states = states_at(store, "resid_post.1", len(task.y))
    [best] = fit_cell(store, [task], states, Recipe("resid_post.1"), penalties, "average_precision")
    X = states.float().numpy()
    areas = {}
    for l2 in penalties:
        score = LinearProbe(l2=l2).fit(X[task.fit], task.y[task.fit]).decision_function(X)
        areas[l2] = task.on(task.selection, score, resamples=1).average_precision.estimate
    assert best.recipe.l2 == max(areas, key=areas.__getitem__)
    assert best.result.average_precision == pytest.approx(areas[best.recipe.l2])


def test_scores_of_fit_rows_come_from_probes_that_did_not_see_them(fake_store: Any) -> None:
    """States that name their row are learned by heart: a probe that saw a row is right about it, another is not."""
    store = fake_store(documents=30)
    task = task_of(store, SPAN, 0.2, 20, 0)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1200, 600)).astype(np.float32)
    recipe = Recipe("resid_mid.1", l2=1e-4)
    seen = recipe.make().fit(X[task.fit], task.y[task.fit]).decision_function(X)
    unseen = unseen_scores(task, X, recipe, 3)
    assert np.isfinite(unseen[task.fit]).all() and np.isnan(unseen[~task.fit]).all()
    heart, honest = (task.on(task.fit, s, resamples=1).roc_auc.estimate for s in (seen, unseen))
    assert heart > 0.99 and abs(honest - 0.5) < 0.1


def test_estimators_get_what_they_need() -> None:
    assert Recipe("embed", "linear", 0.5, bias=False).make().get_params()["l2"] == 0.5
    assert Recipe("embed", "linear", 0.5, bias=False).make().fit_intercept is False
    assert Recipe("embed", "mlp", seed=3).make().seed == 3
    assert Recipe("embed", "trees", seed=3).make().random_state == 3
    for name in ("means", "lda", "logistic", "mlp2"):
        Recipe("embed", name).make()
    with pytest.raises(ChoiceError, match="no estimator 'forest'"):
        Recipe("embed", "forest").make()


def test_kind_and_block_of_a_cell() -> None:
    cell = SiteResult("span_0", "attn_out.12", "linear", 1e-3, Interval(0.9, 0.8, 1.0), 0.8, 0.7, 5)
    assert (cell.to_dict()["kind"], cell.to_dict()["block"]) == ("attn_out", 12)
    for site, kind in (("embed", "embed"), ("embed+attn_out.1", None)):
        found = replace(cell, site=site).to_dict()
        assert (found["kind"], found["block"]) == (kind, None)


def test_states_that_memory_does_not_hold_are_streamed(on_disk: CaptureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(label="span_1", l2=(1e-2,), resamples=20, sites=("resid_*", "resid_mid.1+resid_post.1"))
    held = train(on_disk, config)
    assert is_held(on_disk, "resid_mid.1+resid_post.1", 1800)
    monkeypatch.setattr(reading, "HELD_BYTES", 1000)
    monkeypatch.setattr(CaptureStore, "states", lambda *_: pytest.fail("all states were read at once"))
    assert not is_held(on_disk, "resid_mid.1", 1800)
    streamed = train(on_disk, config, measured=StudyConfig(folds=2))
    assert streamed.probes["best"].config.site == held.probes["best"].config.site
    for name in held.probes:
        mine, same = (r.evaluations[name]["all"].roc_auc.estimate for r in (streamed, held))
        assert mine == pytest.approx(same, abs=1e-3)
    findings = streamed.report.findings
    assert any("do not fit into memory" in line for line in findings.skipped)
    assert findings.strata and findings.calibration and not findings.controls and not findings.gains
    with pytest.raises(ChoiceError, match="which the estimator lda needs: leave it out"):
        train(on_disk, replace(config, estimators=("linear", "lda")))


def test_logits_are_those_of_the_whole(fake_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fake_store()
    weight = torch.arange(12).float()
    whole = store.states("embed").float() @ weight
    monkeypatch.setattr(reading, "BLOCK_BYTES", 4 * 12 * 7)
    np.testing.assert_allclose(logits_at(store, "embed", 2400, lambda states: states @ weight), whole, rtol=1e-5)
