"""Pictures show the numbers of the report, and text as it stands."""

from __future__ import annotations

from io import StringIO
from typing import Any

import numpy as np
import pytest

from probes import plots
from probes.evaluation import Interval
from probes.study import StudyConfig
from probes.thresholds import Chosen, f1_threshold
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


def test_controls_stand_beside_the_probe(report: dict[str, Any]) -> None:
    figure: Any = plots.controls(report)
    told = [c for c in report["controls"] if c["roc_auc"] and c["name"] != "fitted here"]
    assert any(c["roc_auc"] is None for c in report["controls"])  # skipped, and not drawn
    drawn = list(figure.axes[0].lines)
    best = report["evaluations"]["best"]["match"]["roc_auc"]
    assert drawn[0].get_xdata()[0] == best["estimate"]
    points = [line.get_xdata()[0] for line in drawn if line.get_marker() == "o"]
    assert points == [best["estimate"], *(c["roc_auc"]["estimate"] for c in told)]


def test_areas_leave_out_what_is_undefined() -> None:
    nothing = Interval(float("nan"), float("nan"), float("nan"))
    figure: Any = plots.areas({"$a$": Interval(0.8, 0.7, 0.9), "b": nothing}, "t")
    assert labels(figure) == [r"\$a\$", "b"]
    assert [list(line.get_xdata()) for line in figure.axes[0].lines[1:]] == [[0.7, 0.9], [0.8]]


def test_intent_lies_below_the_matches(report: dict[str, Any]) -> None:
    intents = np.array([[0.1, 0.9, np.nan], [0.2, 0.8, 0.3]])
    figure: Any = plots.intent_map(
        intents, ["resid_post.1", "resid_post.2"], ["a", "$b$", "c"], [2, 0, 4], ["genuine", "", "accidental"], "t"
    )
    above, below, *_ = figure.axes
    np.testing.assert_array_equal(np.ma.filled(below.collections[0].get_array(), np.nan), intents)
    assert [b.get_height() for c in above.containers for b in c] == [2, 4]
    assert above.get_xlim() == below.get_xlim() == (0, 3)
    assert [t.get_text() for t in below.get_xticklabels()] == ["a", r"\$b\$", "c"]
    assert below.get_ylabel() and above.get_ylabel() and "<svg" in svg(figure)
    one: Any = plots.intent_map([[0.5]], ["embed"], ["x"], [0], [""], "one")
    assert "<svg" in svg(one) and not one.legends


def test_classes_are_told_apart_by_block() -> None:
    intents = np.array([[0.1, 0.2, 0.6, 0.8, 0.9], [0.3, 0.4, 0.7, 0.7, np.nan]])
    genuine = np.array([False, False, True, True, True])
    figure: Any = plots.by_block(intents, genuine, [3, 9], "t")
    good, bad = figure.axes[0].lines
    np.testing.assert_allclose(good.get_ydata(), [0.8, 0.7])
    np.testing.assert_allclose(bad.get_ydata(), [0.15, 0.35])
    assert list(good.get_xdata()) == [3, 9] and good.get_linestyle() != bad.get_linestyle()
    assert len(plots.by_block(intents, np.ones(5), [3, 9], "one class").axes[0].lines) == 1


def test_distributions_are_shares_of_each_class() -> None:
    score, genuine = [0.02, 0.03, 0.52, 0.97, 1.0], [0, 0, 1, 1, 1]
    figure: Any = plots.distributions(score, genuine, 0.5, "t")
    drawn = {patch.get_label(): patch.get_data().values for patch in figure.axes[0].patches}
    assert list(drawn) == ["genuine (3 rows)", "accidental (2 rows)"]
    np.testing.assert_allclose([v.sum() for v in drawn.values()], 1.0)
    assert drawn["genuine (3 rows)"][-1] == pytest.approx(2 / 3) and drawn["accidental (2 rows)"][0] == 1.0
    assert figure.axes[0].lines[0].get_xdata()[0] == 0.5
    assert len(plots.distributions([0.5], [1], None, "one").axes[0].patches) == 1


def test_a_threshold_is_drawn_where_it_was_chosen() -> None:
    y, score = np.array([1, 0, 1, 1, 0]), np.array([0.9, 0.8, 0.7, 0.6, 0.1])
    chosen = [f1_threshold(y, score), Chosen(float("inf"), "never", 0.0)]
    axes: Any = plots.threshold_choice(y, score, chosen, "t").axes[0]
    precision, recall, f1, line = axes.lines
    np.testing.assert_allclose(precision.get_ydata(), [1, 1 / 2, 2 / 3, 3 / 4, 3 / 5])
    np.testing.assert_allclose(recall.get_ydata(), [1 / 3, 1 / 3, 2 / 3, 1, 1])
    at = line.get_xdata()[0]
    assert at == 0.6 and f1.get_ydata()[list(f1.get_xdata()).index(at)] == max(f1.get_ydata())


def interval(estimate: float | None) -> dict[str, float | None]:
    lower, upper = (None, None) if estimate is None else (estimate - 0.1, estimate + 0.1)
    return {"estimate": estimate, "lower": lower, "upper": upper}


def test_a_changed_direction_stands_beside_random_ones() -> None:
    effects = [
        {
            "intervention": name, "where": where, "kind": kind, "anchors": 5,
            "next": {"probe": interval(-0.4), "random": interval(0.01 if kind == "genuine" else None)},
            "own": {"probe": interval(0.7), "random": interval(0.0)},
        }
        for name in ("ablate", "interchange") for where in ("anchor", "suffix") for kind in ("genuine", "accidental")
    ]  # fmt: skip
    figure: Any = plots.direction(effects, "next", "suffix")
    assert len(labels(figure)) == 8 and "suffix" in figure.get_suptitle()
    points = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert points == [-0.4, 0.01, -0.4, -0.4, 0.01, -0.4]
    own: Any = plots.direction(effects, "own")
    assert own.axes[0].lines[2].get_xdata()[0] == 0.7 and "pending" in own.get_supxlabel()


def test_ablations_start_from_the_whole_target() -> None:
    def one(heads: int, which: str, margin: float | None) -> dict[str, Any]:
        return {"heads": ["1.0"] * heads, "which": which, "margin": interval(margin)}

    found = {"anchors": 9, "documents": 3, "ablations": [
        one(0, "top", 2.0), one(1, "top", 1.0), one(1, "random", 1.9), one(4, "top", None), one(4, "random", 1.8),
    ]}  # fmt: skip
    drawn: list[Any] = [line for line in plots.ablations(found).axes[0].lines if line.get_marker() == "o"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in drawn] == [
        ([0, 1], [2.0, 1.0]), ([0, 1, 4], [2.0, 1.9, 1.8]),
    ]  # fmt: skip
    assert drawn[0].get_label() == "induction heads"
