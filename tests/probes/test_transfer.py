from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from probes.linear import LinearProbe
from probes.sweep import Recipe
from probes.task import LabelOf, task_of
from probes.transfer import OTHERS, Transfer, to_store, transfer

SPAN = LabelOf("span_1")
RECIPE = Recipe("resid_mid.1", l2=1e-2)


def cells(found: list[Transfer], by: str) -> dict[tuple[str, str], float]:
    return {(c.train, c.test): c.roc_auc.estimate for c in found if c.by == by}


def test_a_direction_of_one_domain_does_not_serve_another(fake_store: Any) -> None:
    store = fake_store()
    family = np.array(["code", "chat", "rag"])[store._rows["document"] // 3 % 3]
    family[store._rows["document"] == 0] = "rare"
    store._rows["family"] = family
    y = np.maximum(store._rows["span_1"], 0)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2400, 6))
    for column, kind in enumerate(("code", "chat")):
        X[family == kind, column] += 3 * y[family == kind]
    X[family == "rag", 0] += 3 * y[family == "rag"]
    store._states["resid_mid.1"] = torch.from_numpy(X).float()
    task = task_of(store, SPAN, 0.2, 30, 0)
    states = X.astype(np.float32)
    found = transfer(task, states, RECIPE, lambda what: None)
    matrix = cells(found, "family")
    assert {test for _, test in matrix} == {"code", "chat", "rag"}  # the rare one has too few rows
    assert matrix["code", "code"] > 0.9 and matrix["code", "rag"] > 0.9 and matrix["chat", "chat"] > 0.9
    assert matrix["code", "chat"] < 0.7 and matrix["chat", "code"] < 0.7
    assert matrix[OTHERS, "code"] > 0.9 > 0.7 > matrix[OTHERS, "chat"]

    fit = task.fit & (family == "code")
    probe = LinearProbe(l2=1e-2).fit(states[fit], task.y[fit])
    test = task.test & (family == "rag")
    expected = roc_auc_score(task.y[test], probe.decision_function(states[test]))
    assert matrix["code", "rag"] == pytest.approx(expected)
    assert len(cells(found, "context")) == 4


def test_a_score_on_another_store(fake_store: Any) -> None:
    other = task_of(fake_store(seed=2), SPAN, 0.2, 30, 0)
    score = other.y + np.random.default_rng(0).normal(size=2400)
    cell = to_store("sampled", other, score)
    assert (cell.by, cell.train, cell.test, cell.rows) == ("store", "this store", "sampled", int(other.test.sum()))
    assert cell.roc_auc.estimate == pytest.approx(roc_auc_score(other.y[other.test], score[other.test]))
