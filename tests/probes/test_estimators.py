from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.metrics import roc_auc_score

from probes.artifact import ChoiceError
from probes.estimators import ESTIMATORS, make_estimator


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_one_learns_a_direction(name: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 5))
    y = x[:, 0] + 0.3 * rng.normal(size=600) > 0
    score = clone(make_estimator(name)).fit(x[:400], y[:400]).predict_proba(x[400:])[:, 1]
    assert roc_auc_score(y[400:], score) > 0.9


def test_options_reach_the_constructor() -> None:
    assert make_estimator("linear", l2=0.5).l2 == 0.5
    assert make_estimator("mlp2").hidden == (64, 32) and make_estimator("mlp2", hidden=(3,)).hidden == (3,)
    assert make_estimator("logistic", C=0.5)[-1].C == 0.5
    assert not make_estimator("trees").early_stopping


def test_which_fit_from_a_store() -> None:
    found = [name for name in ESTIMATORS if hasattr(make_estimator(name), "fit_store")]
    assert found == ["linear", "mlp", "mlp2", "means"]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ChoiceError, match="no estimator 'svm': choose one of linear, mlp, mlp2, means, lda"):
        make_estimator("svm")


def test_the_names_need_no_scikit_learn() -> None:
    code = "import sys, probes.estimators; print('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
