from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from activations.target import Fingerprint
from probes.artifact import ChoiceError, Probe, ProbeError
from probes.baselines import LEAK
from probes.result import TrainResult
from probes.rows import split_rows
from probes.thresholds import StepCosts, ThresholdConfig
from probes.train import TrainConfig, train

QUICK = TrainConfig(label="span_1", l2=(1e-4, 1e-2), resamples=100)


@pytest.fixture(scope="module")
def result(fake_store: Any) -> TrainResult:
    return train(fake_store(), QUICK)


def test_the_site_that_knows_the_label_is_chosen(result: TrainResult, fake_store: Any) -> None:
    assert result.probes["best"].config.site == "resid_mid.1"
    assert result.probes["serving"].config.site == "resid_post.1"
    assert [s.site for s in result.sites] == fake_store().sites
    auc = {s.site: s.roc_auc.estimate for s in result.sites}
    assert abs(auc["embed"] - 0.5) < 0.1 and auc["resid_mid.1"] > 0.9


def test_reported_numbers_are_those_of_the_artifact_on_the_test_part(
    result: TrainResult, tmp_path: Path, fake_store: Any
) -> None:
    store = fake_store()
    probe = Probe.from_pretrained(result.save(tmp_path) / "best")
    rows = store.rows()
    score = probe.score(store.states("resid_mid.1")).numpy()
    for scope in ("all", "match"):
        kept = (rows["split"] == "validation") & (rows["span_1"] >= 0)
        if scope == "match":
            kept &= rows["match_length"] >= 5
        found = result.evaluations["best"][scope]
        y = rows["span_1"][kept]
        assert found.rows == kept.sum()
        assert found.roc_auc.estimate == pytest.approx(roc_auc_score(y, score[kept]))
        called = score[kept] >= probe.config.threshold
        assert found.precision is not None
        assert found.precision.estimate == pytest.approx(y[called].mean())
    assert result.reliability["best"].error < 0.1


def test_weights_calibration_and_threshold_do_not_see_the_test_part(result: TrainResult, fake_store: Any) -> None:
    store = fake_store()
    test = store._rows["split"] == "validation"
    for name in ("span_1", "match_length"):
        column = store._rows[name]
        column[test] = np.random.default_rng(1).permutation(column[test])
    other = train(store, QUICK)
    for name, probe in result.probes.items():
        assert other.probes[name].config.threshold == probe.config.threshold
        for key, tensor in probe.tensors.items():
            assert torch.equal(other.probes[name].tensors[key], tensor)
    assert other.evaluations["best"]["all"].roc_auc.estimate < 0.6 < result.evaluations["best"]["all"].roc_auc.estimate


def test_selection_rows_do_not_move_the_weights(result: TrainResult, fake_store: Any) -> None:
    store = fake_store()
    selection = split_rows(store.rows(), QUICK.selection_share, QUICK.seed).part == "selection"
    store._states["resid_mid.1"][torch.from_numpy(selection)] += 0.5
    other = train(store, replace(QUICK, sites=("resid_mid.1",), l2=(result.sites[2].l2 or 0.0,)))
    weight, same = result.probes["best"].tensors, other.probes["best"].tensors
    assert torch.equal(weight["weight"], same["weight"]) and torch.equal(weight["bias"], same["bias"])
    assert not torch.equal(weight["calibration"], same["calibration"])


def test_baselines_stand_beside_with_paired_differences(result: TrainResult) -> None:
    behind = result.report.findings.differences
    for name, found in behind.items():
        for scope, gaps in found.items():
            best, this = result.evaluations["best"][scope], result.evaluations[name][scope]
            for metric, gap in gaps.items():
                expected = getattr(best, metric).estimate - getattr(this, metric).estimate
                assert gap.estimate == pytest.approx(expected, nan_ok=True)
            assert gaps["roc_auc"].lower <= gaps["roc_auc"].estimate <= gaps["roc_auc"].upper
    assert {"serving", "base rate", "match length", "surface + logits, boosted trees", LEAK} <= set(behind)
    assert "best" not in behind


def test_same_seed_same_result(result: TrainResult, fake_store: Any) -> None:
    again, first = train(fake_store(), QUICK).report.to_dict(), result.report.to_dict()
    for changing in ("provenance", "seconds"):
        again.pop(changing), first.pop(changing)
    assert again == first


def test_saved_files(result: TrainResult, tmp_path: Path, fake_store: Any) -> None:
    result.save(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["best", "evaluation.json", "evaluation.md", "serving"]
    values = json.loads((tmp_path / "evaluation.json").read_text())
    assert values["probes"]["best"]["site"] == "resid_mid.1"
    assert values["config"]["l2"] == [1e-4, 1e-2]
    assert values["evaluations"]["best"]["match"]["roc_auc"].keys() == {"estimate", "lower", "upper"}
    table = (tmp_path / "evaluation.md").read_text()
    for text in ("best probe (resid_mid.1)", "leak check", "rows with a suffix match", "| attn_out.1 |"):
        assert text in table
    config = Probe.from_pretrained(tmp_path / "serving").config
    assert config.target == Fingerprint(**fake_store().manifest["target"]) and config.store == values["store"]
    assert config.label_settings == {"span_n": 5, "kappa": 5, "follow_m": 1, "match": 5, "rows": "all"}
    assert config.split["test"]["documents"] == 20
    assert (tmp_path / "serving" / "README.md").read_text().count("rows with a suffix match / roc_auc") == 1


def test_follow_is_fitted_and_measured_on_rows_with_a_match(fake_store: Any) -> None:
    store = fake_store()
    result = train(store, replace(QUICK, label="follow", follow_m=3))
    assert set(result.evaluations["best"]) == {"match"}
    rows = store.rows()
    known = (rows["match_length"] >= 5) & ~rows["censored"]
    assert sum(result.report.split[p]["rows"] for p in ("fit", "selection", "test")) == known.sum()
    found = result.evaluations["best"]["match"]
    expected = (rows["accepted"] >= 3)[known & (rows["split"] == "validation")].mean()
    assert found.base_rate.estimate == pytest.approx(expected)


def test_conditional_fit_is_measured_on_all_rows_too(fake_store: Any) -> None:
    result = train(fake_store(), replace(QUICK, conditional=True, sites=("resid_mid.1",)))
    assert set(result.evaluations["best"]) == {"all", "match"}
    assert result.report.split["test"]["rows"] == result.evaluations["best"]["match"].rows
    assert set(result.probes) == {"best"}  # no block boundary among the sites


def test_kept_sites_get_an_artifact(fake_store: Any) -> None:
    config = replace(QUICK, sites=("resid_*",), keep=("attn_out.1", "resid_post.2"))
    result = train(fake_store(), config)
    assert set(result.probes) == {"best", "serving", "attn_out.1", "resid_post.2"}
    assert {s.site for s in result.sites} == {"resid_mid.1", "resid_post.1", "resid_post.2"}


def test_metric_that_selects(fake_store: Any) -> None:
    for metric in ("average_precision", "f1"):
        assert train(fake_store(), replace(QUICK, select_by=metric)).probes["best"].config.site == "resid_mid.1"


def test_progress_ends_at_its_total(fake_store: Any) -> None:
    told: list[tuple[int, int, str]] = []
    train(fake_store(documents=30), QUICK, lambda done, total, what: told.append((done, total, what)))
    assert [t[0] for t in told] == sorted(t[0] for t in told)
    assert told[-1][0] == told[-1][1] and told[0][2] == "fitting embed"
    assert max(t[0] for t in told[:-1]) < told[-1][1]


def test_other_labels_and_estimators_are_swept_and_measured_once(fake_store: Any) -> None:
    config = replace(
        QUICK, labels=("span_0", "follow_3", "span_1"), estimators=("linear", "means"), sites=("resid_*.1", "embed")
    )
    result = train(fake_store(), config)
    cells = [(s.label, s.site, s.estimator) for s in result.report.sites]
    names = ("span_1", "span_0", "follow_3")
    sites = ("embed", "resid_mid.1", "resid_post.1")
    assert sorted(cells) == sorted((n, s, e) for n in names for s in sites for e in ("linear", "means"))
    chosen = {c.label: c for c in result.report.chosen}
    assert set(chosen) == set(names) and all(c.tries == 6 and c.site == "resid_mid.1" for c in chosen.values())
    mine, same = chosen["span_1"].test["all"].roc_auc, result.evaluations["best"]["all"].roc_auc
    if chosen["span_1"].estimator == "linear":
        assert mine.estimate == pytest.approx(same.estimate, abs=1e-6)
    assert set(chosen["follow_3"].test) == {"match"}
    cell = next(s for s in result.report.to_dict()["sites"] if s["site"] == "resid_mid.1")
    assert (cell["kind"], cell["block"]) == ("resid_mid", 1)
    assert next(s for s in result.report.to_dict()["sites"] if s["site"] == "embed")["block"] is None


def test_sites_side_by_side(fake_store: Any, tmp_path: Path) -> None:
    joined = "resid_mid.1+resid_post.1"
    result = train(fake_store(), replace(QUICK, sites=("embed", joined)))
    probe = Probe.from_pretrained(result.save(tmp_path) / "best")
    assert probe.config.sites == ("resid_mid.1", "resid_post.1") and probe.config.width == 12
    assert set(result.probes) == {"best"}  # resid_mid is not handed out by serving engines
    assert result.evaluations["best"]["all"].roc_auc.estimate > 0.9
    with pytest.raises(ProbeError, match=r"no captured site is 'resid_mid\.9'"):
        train(fake_store(), replace(QUICK, sites=("resid_mid.1+resid_mid.9",)))


def test_thresholds_follow_their_rule(fake_store: Any) -> None:
    sites = ("resid_mid.1",)
    rule = ThresholdConfig(threshold_rule="precision", precision_floor=0.97)
    strict = train(fake_store(), replace(QUICK, sites=sites, threshold=rule)).probes["best"].config
    plain = train(fake_store(), replace(QUICK, sites=sites)).probes["best"].config
    assert strict.threshold > plain.threshold
    assert strict.threshold_rule == ("precision of at least 0.97 on rows with a suffix match of the selection part")
    never = ThresholdConfig(threshold_rule="rate", costs=StepCosts(copy_ms=1000.0))
    assert train(fake_store(), replace(QUICK, sites=sites, threshold=never)).probes["best"].config.threshold == 1.0
    with pytest.raises(ProbeError, match=r"no threshold has a precision of 1\.0"):
        train(fake_store(), replace(QUICK, sites=("embed",), threshold=replace(rule, precision_floor=1.0)))


def test_a_store_of_a_folder_keeps_the_folders_place_out(fake_store: Any) -> None:
    store = fake_store(documents=30)
    store.manifest["target_name"] = "/home/someone/models/mine"
    result = train(store, replace(QUICK, sites=("resid_post.1",)))
    assert result.target_name == result.probes["best"].config.target_name == "mine"


def test_broken_states(fake_store: Any) -> None:
    store = fake_store()
    store._states["attn_out.1"][7, 3] = float("nan")
    with pytest.raises(ProbeError, match=r"1 rows have states at attn_out\.1 that are NaN or infinite \(row 7\)"):
        train(store, QUICK)
    store._states["attn_out.1"] = store._states["attn_out.1"][:-1]
    with pytest.raises(ProbeError, match="the store has 2400 rows, but states of shape"):
        train(store, QUICK)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"follow_m": 0}, "follow_m is 0"),
        ({"match": 0}, "match is 0"),
        ({"l2": ()}, "at least one penalty"),
        ({"l2": (0.0,)}, "above 0"),
        ({"selection_share": 1.0}, "between 0 and 1"),
        ({"resamples": 0}, "resamples is 0"),
        ({"labels": ("span_3",)}, "unknown label 'span_3'"),
        ({"labels": ("follow_0",)}, "unknown label 'follow_0'"),
        ({"estimators": ("forest",)}, "no estimator 'forest'"),
        ({"estimators": ("lda",)}, "the first estimator is saved"),
        ({"estimators": ()}, "the first estimator is saved"),
    ],
)
def test_bad_settings(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TrainConfig(**change)  # type: ignore[arg-type]


def test_states_of_other_places_are_compared_and_never_saved(fake_store: Any) -> None:
    store = fake_store(documents=30)
    store._states["resid_mid.1@candidate"] = store.states("resid_mid.1")
    store._states["resid_mid.1"] = store.states("embed")
    joined = "resid_mid.1+resid_mid.1@candidate"
    config = replace(QUICK, sites=("resid_mid.1", "resid_post.2", joined), l2=(1e-2,), resamples=20)
    found = train(store, config)
    assert found.report.chosen[0].site == joined, "it is measured"
    assert {p.config.site for p in found.probes.values()} <= {"resid_mid.1", "resid_post.2"}
    with pytest.raises(ProbeError, match=r"no probe can be made of resid_mid\.1\+resid_mid\.1@candidate alone"):
        train(store, replace(config, sites=(joined,)))
    with pytest.raises(ProbeError, match=r"resid_mid\.1@candidate cannot be kept as a probe"):
        train(store, replace(config, keep=("*@candidate",)))


def test_what_is_given_twice_is_fitted_once(fake_store: Any) -> None:
    joined = "embed+resid_mid.1"
    twice = replace(
        QUICK,
        sites=("resid_mid.1", "resid_mid.*", joined, joined),
        estimators=("linear", "means", "linear"),
        labels=("span_0", "span_0"),
    )
    report = train(fake_store(documents=30), twice).report
    cells = [(s.label, s.site, s.estimator) for s in report.sites]
    assert len(set(cells)) == len(cells) == 2 * 2 * 2
    assert len({c.label for c in report.chosen}) == len(report.chosen)


def test_matches_that_the_store_does_not_know_are_refused(fake_store: Any) -> None:
    with pytest.raises(ChoiceError, match=r"knows suffix matches of 5 tokens and more only.*train with --match 5"):
        train(fake_store(), replace(QUICK, match=4))


def test_a_match_that_no_row_has_is_said(fake_store: Any) -> None:
    config = replace(QUICK, label="span_1", sites=("resid_mid.1",), match=1000)
    findings = train(fake_store(), config).report.findings
    assert "rows with a suffix match: no test row has a match of 1000 tokens or more" in findings.skipped


def test_states_of_another_width_than_the_targets(fake_store: Any) -> None:
    store = fake_store()
    store._states["resid_mid.1"] = store._states["resid_mid.1"][:, :7]
    with pytest.raises(ProbeError, match=r"states of width 7 at resid_mid\.1, and its target has width 12"):
        train(store, QUICK)


@pytest.mark.parametrize(("site", "warned"), [("embed", True), ("resid_mid.1", False)])
def test_chance_is_warned_of(fake_store: Any, site: str, warned: bool) -> None:
    findings = train(fake_store(), replace(QUICK, label="span_1", sites=(site,))).report.findings
    told = [line for line in findings.warnings if "not shown to be better than chance" in line]
    assert bool(told) is warned
    assert all("capture more prompts, and until then decode with --gate match" in line for line in told)


def test_an_interval_that_nobody_knows_is_no_proof(fake_store: Any) -> None:
    store = fake_store()
    documents = store._rows["document"]  # the positives of the test part are all in one document
    test = store._rows["split"] == "validation"
    some = documents == documents[test][0]
    for name in ("span_0", "span_1", "span_2"):
        store._rows[name][test & ~some] = np.minimum(store._rows[name][test & ~some], 0)
    findings = train(store, replace(QUICK, label="span_1", sites=("resid_mid.1",), resamples=1)).report.findings
    area = findings.evaluations["best"]["all"].roc_auc
    told = any("better than chance on all rows" in line for line in findings.warnings)
    assert told == (not area.lower > 0.5)
