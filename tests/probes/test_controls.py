from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from probes.controls import Control, controls, leaks
from probes.evaluation import Evaluation
from probes.reading import states_at
from probes.sweep import Recipe
from probes.task import LabelOf, Task, task_of

SPAN = LabelOf("span_1")
RECIPE = Recipe("resid_mid.1", l2=1e-2)


def run(store: Any, random_init: Any = None, site: str = RECIPE.site) -> tuple[dict[str, Control], Evaluation, Task]:
    task = task_of(store, SPAN, 0.2, 30, 0)
    recipe = Recipe(site, l2=1e-2)
    states = states_at(store, site, len(task.y)).float().numpy()
    probe = task.on(task.test, recipe.cross_fit(task, states))
    initial = None if random_init is None else (random_init, task_of(random_init, SPAN, 0.2, 30, 0))
    found = controls(task, store, states, recipe, probe, None, initial, lambda what: None)
    return {c.name: c for c in found}, probe, task


def auc(control: Control) -> float:
    assert control.roc_auc is not None
    return control.roc_auc.estimate


SHUFFLED, ROWS = "labels shuffled within documents", "rows split at random instead of documents"
PENDING = "control task: a random label for each pending token"


def test_an_honest_probe_passes(fake_store: Any) -> None:
    found, probe, _ = run(fake_store(), random_init=fake_store(seed=3))
    assert auc(found["fitted here"]) == pytest.approx(probe.roc_auc.estimate) and probe.roc_auc.estimate > 0.85
    for name in (SHUFFLED, PENDING, "control task: a random label for each anchor's own token", "random direction"):
        assert abs(auc(found[name]) - 0.5) < 0.12, name
    gap = found[PENDING].difference
    assert gap is not None and gap.estimate == pytest.approx(probe.roc_auc.estimate - auc(found[PENDING]))
    assert abs(auc(found[ROWS]) - probe.roc_auc.estimate) < 0.06
    assert abs(auc(found["embedding-only probe"]) - 0.5) < 0.1
    assert auc(found["randomly initialised target"]) > 0.85  # this one knows, too: its number is its own store's
    assert found["leak check"].skipped is not None


def test_a_probe_that_knows_the_document_only_is_found_out(fake_store: Any) -> None:
    """Labels and states of a document are alike: new documents tell nothing, other rows of the same one all."""
    store = fake_store()
    rng = np.random.default_rng(0)
    document = store._rows["document"]
    store._rows["span_1"] = np.where(rng.random(60)[document] < 0.5, 1, 0).astype(np.int8)
    flips = rng.random(2400) < 0.1
    store._rows["span_1"] = np.where(flips, 1 - store._rows["span_1"], store._rows["span_1"]).astype(np.int8)
    store._states["resid_mid.1"] = torch.from_numpy(rng.normal(size=(60, 12))[document] + 0.01).float()
    store._states["resid_mid.1"] = torch.cat([store._states["resid_mid.1"], torch.eye(60)[document]], dim=1)
    store.manifest = {}  # which names no width, as these states have their own
    found, probe, _ = run(store)
    assert auc(found[ROWS]) > 0.85 > probe.roc_auc.estimate + 0.2
    gap = found[ROWS].difference
    assert gap is not None and gap.estimate == pytest.approx(probe.roc_auc.estimate - auc(found[ROWS]))


def test_shuffling_keeps_what_the_document_gives_away(fake_store: Any) -> None:
    store = fake_store()
    rng = np.random.default_rng(0)
    share = rng.choice([0.1, 0.9], 60)[store._rows["document"]]
    store._rows["span_1"] = (rng.random(2400) < share).astype(np.int8)
    store._states["resid_mid.1"] = torch.from_numpy(share[:, None] + 0.1 * rng.normal(size=(2400, 12))).float()
    found, probe, task = run(store)
    assert auc(found[SHUFFLED]) > 0.8 and probe.roc_auc.estimate > 0.8
    assert abs(auc(found[PENDING]) - 0.5) < 0.12
    assert task.split.rule.startswith("by group")


def test_a_probe_that_reads_the_token_learns_the_control_task(fake_store: Any) -> None:
    store = fake_store()
    store._states["resid_mid.1"] = torch.eye(40)[torch.from_numpy(store._rows["pending"]).long()]
    store.manifest = {}
    found, probe, _ = run(store)
    assert auc(found[PENDING]) > 0.99 and probe.roc_auc.estimate < 0.6
    selectivity = found[PENDING].difference
    assert selectivity is not None and selectivity.estimate < -0.4


def test_what_is_not_there_is_said(fake_store: Any) -> None:
    store = fake_store()
    del store._states["embed"]
    found, _, _ = run(store)
    assert "the site embed was not captured" in str(found["embedding-only probe"].skipped)
    assert "--random-init" in str(found["randomly initialised target"].skipped)
    assert found["embedding-only probe"].to_dict()["roc_auc"] is None


def test_perfect_separation_is_flagged(fake_store: Any) -> None:
    store = fake_store()
    task = task_of(store, SPAN, 0.2, 30, 0)
    knows = task.on(task.test, task.y.astype(float))
    assert leaks(task, {}) == []
    [told] = leaks(task, {"best": knows, "leak check": knows})
    assert "best separates the test rows perfectly (AUC 1.0000): the label probably leaks" in told
    store._rows["entropy"] = -np.maximum(task.y, 0).astype(np.float32)
    [told] = leaks(task_of(store, SPAN, 0.2, 30, 0), {})
    assert "the column entropy alone separates the test rows perfectly" in told
