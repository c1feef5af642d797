"""Pictures show the numbers of the report, and text as it stands."""

from __future__ import annotations

from io import StringIO
from typing import Any

import numpy as np
import pytest

from probes import plots
from probes.study import StudyConfig
from probes.train import TrainConfig, train


@pytest.fixture(scope="module")
def report(fake_store: Any) -> dict[str, Any]:
    store = fake_store(documents=48)
    store._rows["family"] = np.array(["code", "chat"])[store._rows["document"] // 3 % 2]
    config = TrainConfig(label="span_0", l2=(1e-2,), resamples=20, sites=("resid_*", "attn_out.1", "embed"))
    return train(store, config, measured=StudyConfig(folds=2)).report.to_dict()


def labels(figure: Any) -> list[str]:
    return [t.get_text() for t in figure.axes[0].get_yticklabels()]


def svg(figure: Any) -> str:
    file = StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()


def test_the_sweep_as_a_heat_map(report: dict[str, Any]) -> None:
    figure: Any = plots.sweep_map(report, "span_0", "linear")
    assert labels(figure) == ["attn_out", "resid_mid", "resid_post"]
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["1", "2"]
    [mesh, *_] = figure.axes[0].collections
    auc = {s["site"]: s["roc_auc"]["estimate"] for s in report["sites"]}
    expected = [auc.get(f"{kind}.{k}", np.nan) for kind in labels(figure) for k in (1, 2)]
    np.testing.assert_allclose(np.ma.filled(mesh.get_array().ravel(), np.nan), expected)
    cells = [t.get_text() for t in figure.axes[0].texts]
    assert cells == [f"{v:.3f}" for v in expected if np.isfinite(v)]
    assert plots.sweep_map(report, "span_0", "means") is None


def test_curves_are_those_of_every_score(report: dict[str, Any]) -> None:
    for kind, x, y in (("roc", "fpr", "tpr"), ("pr", "recall", "precision")):
        axes: Any = plots.curve(report, kind, "match").axes[0]  # type: ignore[arg-type]
        *drawn, _ = axes.lines
        assert len(drawn) == len(report["curves"])
        for line, scopes in zip(drawn, report["curves"].values(), strict=True):
            np.testing.assert_array_equal(line.get_xdata(), scopes["match"][kind][x])
            np.testing.assert_array_equal(line.get_ydata(), scopes["match"][kind][y])
        assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == len(drawn)
        assert axes.get_ylim()[0] < min(min(line.get_ydata()) for line in drawn)
        assert axes.get_xlabel() and axes.get_ylabel()


def test_reliability_has_a_line_for_each_probe(report: dict[str, Any]) -> None:
    drawn: list[Any] = list(plots.reliability(report).axes[0].lines)[1:]
    for line, bins in zip(drawn, report["reliability"].values(), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), bins["predicted"])
        np.testing.assert_array_equal(line.get_ydata(), bins["observed"])


def test_intervals_are_drawn_as_they_are(report: dict[str, Any]) -> None:
    drawn: list[Any] = list(plots.behind(report, "all").axes[0].lines)[1:]  # after the line at zero
    for (bounds, point), scopes in zip(zip(drawn[::2], drawn[1::2], strict=True), report["differences"].values(),
                                       strict=True):  # fmt: skip
        interval = scopes["all"]["roc_auc"]
        assert list(bounds.get_xdata()) == [interval["lower"], interval["upper"]]
        assert list(point.get_xdata()) == [interval["estimate"]]
    assert len(labels(plots.gains(report, "all"))) == len(report["gains"])
    strata: Any = plots.strata(report, "all")
    assert len(labels(strata)) == len(report["strata"]["all"])
    assert strata.axes[0].lines[0].get_xdata()[0] == report["evaluations"]["best"]["all"]["roc_auc"]["estimate"]


def test_transfer_is_a_matrix(report: dict[str, Any]) -> None:
    figure = plots.transfer(report, "family")
    assert labels(figure) == ["chat", "code", "all others"]
    cells = {(c["train"], c["test"]): c["roc_auc"]["estimate"] for c in report["transfer"] if c["by"] == "family"}
    expected = [f"{cells[a, b]:.3f}" for a in labels(figure) for b in ("chat", "code")]
    assert [t.get_text() for t in figure.axes[0].texts] == expected


def test_text_is_no_formula_and_what_is_undefined_is_left_out(report: dict[str, Any]) -> None:
    odd = {**report, "strata": {"all": [{**s, "value": "$\\frac$ & <b>"} for s in report["strata"]["all"]]}}
    nothing = {"estimate": None, "lower": None, "upper": None}
    odd["strata"]["all"][0]["roc_auc"] = nothing
    figure: Any = plots.strata(odd, "all")
    assert "&lt;b&gt;" in svg(figure) and "<b>" not in svg(figure)
    assert len(figure.axes[0].lines) == 1 + 2 * (len(odd["strata"]["all"]) - 1)
    blank = [{**s, "roc_auc": nothing} for s in report["sites"]]
    figure = plots.sweep_map({**report, "sites": blank}, "span_0", "linear")
    assert figure is not None and not figure.axes[0].texts and "<svg" in svg(figure)
