from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from probes.artifact import ChoiceError, Probe, ProbeError
from probes.baselines import LEAK, PLAIN, WITH_PROBE
from probes.finished import EvaluateConfig, Run, evaluate_probes, load_run
from probes.joined import Joined, joined_task
from probes.markdown import markdown
from probes.result import Report, TrainResult, read_report
from probes.rows import group_keys
from probes.study import StudyConfig
from probes.task import LabelOf, task_of
from probes.train import TrainConfig, train

QUICK = TrainConfig(
    label="follow", follow_m=3, sites=("resid_mid.1", "resid_post.1"), l2=(1e-2,), resamples=30,
    labels=("span_0",),
)  # fmt: skip
FEW = EvaluateConfig(StudyConfig(folds=3), resamples=30)
KEYS = {
    "version", "label", "target", "store", "split", "config", "probes", "sites", "chosen", "evaluations",
    "differences", "gains", "gain_over", "thresholds", "curves", "reliability", "calibration", "loops", "strata",
    "controls", "transfer", "skipped", "warnings", "provenance", "seconds",
}  # fmt: skip


def with_families(store: Any) -> Any:
    store._rows["family"] = np.array(["code", "chat"])[store._rows["document"] // 3 % 2]
    return store


@pytest.fixture(scope="module")
def trained(fake_store: Any) -> TrainResult:
    return train(with_families(fake_store()), QUICK, measured=StudyConfig(folds=3))


@pytest.fixture(scope="module")
def folder(trained: TrainResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained.save(tmp_path_factory.mktemp("run"))


def test_the_report_holds_all_that_is_plotted(trained: TrainResult, folder: Path) -> None:
    report = json.loads((folder / "evaluation.json").read_text())
    assert set(report) == KEYS and report["version"] == 1
    assert report["label"] == {
        "name": "follow_3", "label": "follow", "follow_m": 3, "match": 5, "only_matches": False,
    }  # fmt: skip
    best = report["evaluations"]["best"]["match"]
    assert set(best) >= {"rows", "documents", "base_rate", "roc_auc", "average_precision", "tpr_at_1", "tpr_at_5", "f1",
                         "precision", "recall", "threshold", "brier", "ece"}  # fmt: skip
    assert best["ece"]["estimate"] == pytest.approx(report["reliability"]["best"]["error"])
    assert set(report["evaluations"]) >= {"serving", "base rate", "match length", LEAK, *PLAIN, *WITH_PROBE}
    assert set(report["gains"]) == set(WITH_PROBE) and report["gain_over"] in PLAIN
    for name in ("best", "match length", LEAK, report["gain_over"], *WITH_PROBE):
        curve = report["curves"][name]["match"]
        assert len(curve["roc"]["fpr"]) == len(curve["roc"]["tpr"]) > 2
    assert {c["method"] for c in report["calibration"]} == {"as saved", "none", "sigmoid", "isotonic", "temperature"}
    saved = {c["method"]: c["brier"] for c in report["calibration"] if c["probe"] == "best"}
    assert saved["sigmoid"]["estimate"] == pytest.approx(saved["as saved"]["estimate"], abs=1e-5)
    ways = {"match_length", "family", "source", "loop", "context", "asked"}
    assert {s["by"] for s in report["strata"]["match"]} == ways
    assert {(c["by"], c["train"]) for c in report["transfer"]} >= {("family", "code"), ("family", "all others")}
    assert {s["label"] for s in report["sites"]} == {"follow_3", "span_0"}
    assert len(report["controls"]) == 9
    assert [line.split(":")[0] for line in report["skipped"]] == [
        "lookback ratio", "hidden-state cosine (PLD+)", "strata by token class",
    ]  # fmt: skip
    assert [t["rule"] for t in report["thresholds"]] == [
        "best F1", "precision of at least 0.9", "most expected tokens per millisecond",
    ]  # fmt: skip
    assert report["thresholds"][0]["threshold"] == pytest.approx(report["probes"]["best"]["threshold"], abs=1e-6)
    assert report["thresholds"][0]["f1"]["estimate"] == pytest.approx(best["f1"]["estimate"], abs=1e-3)
    assert report["thresholds"][2]["gain"] > 1
    assert "loop" in {s["by"] for s in report["strata"]["match"]} and 0 < report["loops"]["match"]["rows"] < 1


def test_gains_are_differences_of_what_is_told(trained: TrainResult) -> None:
    found = trained.report.findings
    for name, scopes in found.gains.items():
        mine, other = found.evaluations[name]["match"], found.evaluations[found.gain_over]["match"]
        assert scopes["match"]["roc_auc"].estimate == pytest.approx(mine.roc_auc.estimate - other.roc_auc.estimate)
        assert (mine.rows, mine.documents) == (other.rows, other.documents)
    assert found.gains[WITH_PROBE[0]]["match"]["roc_auc"].lower > 0  # the states know more than the surface


def test_markdown_has_every_table_and_the_card_the_same_numbers(trained: TrainResult, folder: Path) -> None:
    text = (folder / "evaluation.md").read_text()
    for title in (
        "Test part",
        "What a probe adds",
        "Calibration",
        "Thresholds",
        "Loops",
        "Strata",
        "Controls",
        "Transfer",
        "Sweep",
    ):
        assert f"## {title}" in text
    assert "falls as expected; on rows with a suffix match." in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)
    card = (folder / "best" / "README.md").read_text()
    gain = trained.report.findings.gains[WITH_PROBE[0]]["match"]["roc_auc"]
    shown = f"{gain.estimate:.4f} [{gain.lower:.4f}, {gain.upper:.4f}]"
    assert shown in card and shown in text
    flagged = {**json.loads((folder / "evaluation.json").read_text()), "warnings": ["the label leaks"]}
    assert "**The label leaks.**" in markdown(flagged)


def test_on_its_own_store_a_run_gives_the_numbers_of_its_training(
    trained: TrainResult, folder: Path, fake_store: Any
) -> None:
    store = with_families(fake_store())
    report = evaluate_probes(load_run(str(folder)), store, FEW)
    assert report.split == trained.report.split
    for name in ("best", "serving", *PLAIN, *WITH_PROBE, LEAK):
        mine, same = (r.findings.evaluations[name]["match"].roc_auc for r in (report, trained.report))
        assert mine.estimate == pytest.approx(same.estimate, abs=2e-3), name
    assert report.probes == trained.report.probes
    alone = evaluate_probes(load_run(str(folder / "serving")), store, FEW)
    assert alone.probes["best"]["site"] == "resid_post.1"


def test_a_probe_whose_run_is_lost_is_refused_on_its_own_store(folder: Path, fake_store: Any, tmp_path: Path) -> None:
    probe = Probe.from_pretrained(folder / "best")
    probe.config = replace(probe.config, split={**probe.config.split, "rule": "another"})
    lost = load_run(str(probe.save_pretrained(tmp_path / "lost")))
    with pytest.raises(ProbeError, match=r"which rows fitted it cannot be told: name the folder of the run"):
        evaluate_probes(lost, with_families(fake_store()), FEW)


def other_store(fake_store: Any, split: bool = True, shift: int = 1000) -> Any:
    """Another store of the same target, with its own documents and groups."""
    store = with_families(fake_store(seed=7, split=split))
    store._rows["group"] = np.char.add(f"{shift}-", store._rows["group"].astype(str))
    store.manifest = {**store.manifest, "prompts": "others"}
    store._states = fake_store(seed=0)._states | store._states
    return store


def warm(store: Any) -> Any:
    store.manifest = {**store.manifest, "config": {**store.manifest["config"], "temperature": 0.8}}
    return store


def random_store(fake_store: Any, **target: Any) -> Any:
    store = with_families(fake_store(seed=9))
    store.manifest = {**store.manifest, "target": {**store.manifest["target"], "revision": "random", **target}}
    return store


def scored(folder: Path, store: Any) -> np.ndarray:
    probe = Probe.from_pretrained(folder / "best")
    found: np.ndarray = probe.score(store.states(probe.config.site)).numpy()
    return found


def test_on_another_store_without_parts_all_rows_count(folder: Path, fake_store: Any) -> None:
    store = other_store(fake_store, split=False)
    report = evaluate_probes(load_run(str(folder)), store, FEW)
    rows = store.rows()
    kept = (rows["match_length"] >= 5) & ~rows["censored"]
    found = report.findings.evaluations["best"]["match"]
    assert found.rows == kept.sum() and "another store" in report.split["rule"]
    expected = roc_auc_score((rows["accepted"] >= 3)[kept], scored(folder, store)[kept])
    assert found.roc_auc.estimate == pytest.approx(expected)
    assert {c.method for c in report.findings.calibration} == {"as saved"}  # nothing to calibrate on
    assert report.findings.gains and report.findings.controls and report.findings.transfer


def test_on_another_store_with_parts_the_validation_part_counts(folder: Path, fake_store: Any) -> None:
    report = evaluate_probes(
        load_run(str(folder)), other_store(fake_store), replace(FEW, study=StudyConfig(3, False, False))
    )
    assert report.split["rule"].endswith("the probe was fitted on another store")
    assert report.findings.evaluations["best"]["match"].documents <= 20
    assert not report.findings.controls and not report.findings.transfer


def test_baselines_may_be_fitted_on_the_store_that_fitted_the_probe(folder: Path, fake_store: Any) -> None:
    own, store = with_families(fake_store()), other_store(fake_store, split=False)
    quick = replace(FEW, study=StudyConfig(3, controls=False, transfer=False))
    report = evaluate_probes(load_run(str(folder)), store, quick, fitted=own)
    told = load_run(str(folder)).probes["best"].config.split
    assert {p: report.split[p]["rows"] for p in ("fit", "selection")} == {
        p: told[p]["rows"] for p in ("fit", "selection")
    }
    alone = evaluate_probes(load_run(str(folder)), store, quick)
    name = "best"
    mine, same = (r.findings.evaluations[name]["match"] for r in (report, alone))
    assert (mine.rows, mine.roc_auc.estimate) == (same.rows, pytest.approx(same.roc_auc.estimate))
    assert report.store == alone.store
    with pytest.raises(ChoiceError, match="is another one: its manifest differs"):
        evaluate_probes(load_run(str(folder)), own_copy(store), quick, fitted=store)


def own_copy(store: Any) -> Any:
    store.manifest = {**store.manifest, "prompts": "third"}
    return store


def test_joined_stores_share_no_document_and_no_group(fake_store: Any) -> None:
    first, second = fake_store(), fake_store(seed=1)
    joined = Joined(first, second)
    rows = joined.rows()
    assert joined.sites == first.sites and len(joined.states("embed")) == len(rows["document"]) == 4800
    assert not set(rows["document"][:2400]) & set(rows["document"][2400:])
    task = joined_task(joined, LabelOf("span_1"), 0.2, 20, 0)
    assert not task.tests["all"][:2400].any() and not (task.fit | task.selection)[2400:].any()
    seen = set(rows["group"][task.fit | task.selection])
    assert not seen & set(rows["group"][task.tests["all"]])
    assert set(rows["split"][task.tests["all"]]) == {"validation"}
    second._rows["split"] = np.full(2400, None)
    again = joined_task(Joined(first, second), LabelOf("span_1"), 0.2, 20, 0)
    assert "groups that have the name of one that fitted or selected" in again.split.rule
    assert not seen & set(rows["group"][again.tests["all"]])


def test_sampled_text_and_a_random_target(folder: Path, fake_store: Any) -> None:
    sampled, initial = warm(other_store(fake_store, split=False)), random_store(fake_store)
    config = replace(FEW, study=StudyConfig(3, transfer=False))
    report = evaluate_probes(
        load_run(str(folder)), with_families(fake_store()), config, sampled=sampled, random_init=initial
    )
    [cell] = [c for c in report.findings.transfer if c.by == "store"]
    rows = sampled.rows()
    kept = (rows["match_length"] >= 5) & ~rows["censored"]
    expected = roc_auc_score((rows["accepted"] >= 3)[kept], scored(folder, sampled)[kept])
    assert (cell.test, cell.rows) == ("sampled", kept.sum()) and cell.roc_auc.estimate == pytest.approx(expected)
    control = next(c for c in report.findings.controls if c.name == "randomly initialised target")
    assert control.roc_auc is not None


def test_stores_that_do_not_fit_the_probe(folder: Path, fake_store: Any) -> None:
    run: Run = load_run(str(folder))
    store = other_store(fake_store)
    store.manifest = {**store.manifest, "target": {**store.manifest["target"], "width": 13}}
    with pytest.raises(ChoiceError, match=r"another target than the probe's, small \(width"):
        evaluate_probes(run, store, FEW)
    store = other_store(fake_store)
    store.manifest = {**store.manifest, "config": {"labels": {"kappa": 6}}}
    with pytest.raises(ChoiceError, match="knows suffix matches of 6 tokens and more only"):
        evaluate_probes(run, store, FEW)
    store = other_store(fake_store)
    del store._states["resid_mid.1"]
    with pytest.raises(ChoiceError, match=r"no captured site is 'resid_mid\.1'"):
        evaluate_probes(run, store, FEW)
    store = other_store(fake_store)
    store._states.pop("resid_post.1")
    report: Report = evaluate_probes(run, store, replace(FEW, study=StudyConfig(3, False, False)))
    assert "the probe serving: the store has no states at resid_post.1" in report.findings.skipped
    store._states["resid_mid.1"][5] = np.nan
    with pytest.raises(ProbeError, match=r"1 rows have states at resid_mid\.1 that are NaN or infinite \(row 5\)"):
        evaluate_probes(run, store, FEW)


def test_too_few_groups_for_what_is_stacked_is_said(fake_store: Any) -> None:
    result = train(fake_store(documents=30), replace(QUICK, labels=()), measured=StudyConfig(19, False, False))
    [line] = [line for line in result.report.findings.skipped if line.startswith("what a probe adds")]
    assert "are too few for 19 folds" in line and not result.report.findings.gains


def test_labels_that_a_match_decides_are_told_of_all_rows(fake_store: Any) -> None:
    store = with_families(fake_store())
    store._rows["span_1"] = np.where(store._rows["match_length"] >= 5, 1, store._rows["span_1"]).astype(np.int8)
    config = replace(QUICK, label="span_1", labels=(), sites=("resid_mid.1",))
    findings = train(store, config, measured=StudyConfig(folds=2, transfer=False)).report.findings
    assert any("ranking on rows with a suffix match: the label span_1 is 1 on all" in s for s in findings.skipped)
    assert all(np.isfinite(c.roc_auc.estimate) for c in findings.controls if c.roc_auc is not None)
    assert findings.gain_over and np.isfinite(findings.gains[WITH_PROBE[0]]["all"]["roc_auc"].estimate)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="folds is 1"):
        StudyConfig(folds=1)
    with pytest.raises(ValueError, match="resamples is 0"):
        EvaluateConfig(resamples=0)


def test_a_damaged_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(ProbeError, match="has no probe named best"):
        load_run(str(tmp_path))
    Probe.from_pretrained(folder / "best").save_pretrained(tmp_path / "best")
    with pytest.raises(ProbeError, match=r"cannot read .*evaluation\.json"):
        load_run(str(tmp_path))


QUIET = replace(FEW, study=StudyConfig(3, False, False))


@pytest.mark.parametrize("split", [False, True])
def test_documents_that_fitted_the_probe_are_left_out(folder: Path, fake_store: Any, split: bool) -> None:
    run = load_run(str(folder))
    fitted = task_of(with_families(fake_store()), LabelOf("follow", 3), 0.2, 20, 0)
    groups = np.unique(fitted.rows["group"][fitted.split.part != "test"].astype(str))
    assert run.groups_seen == set(group_keys(groups))
    store = other_store(fake_store, split=split)
    fresh = store._rows["group"].astype(str)
    where = store._rows["document"] % 6 == 0  # of the validation part, where there is one
    store._rows["group"] = np.where(where, groups[0], fresh)
    report = evaluate_probes(run, store, QUIET)
    rows = store.rows()
    kept = (rows["match_length"] >= 5) & ~rows["censored"] & ~where
    if split:
        kept &= rows["split"] == "validation"
    assert report.findings.evaluations["best"]["match"].rows == kept.sum()
    told = f"{where.sum()} rows of 1 groups of documents: these fitted the probe or chose it"
    assert told in report.findings.skipped
    assert not any("which documents fitted" in line for line in report.findings.warnings)
    store._rows["group"] = np.full(len(fresh), groups[0])
    if split:
        train_part = store._rows["split"] == "train"
        store._rows["group"] = np.where(train_part, fresh, groups[0])
    with pytest.raises(ProbeError, match="every row that would be measured is of a group that fitted the probe"):
        evaluate_probes(run, store, QUIET)
    with pytest.raises(ProbeError, match="every row that would be measured is of a group that fitted the probe"):
        evaluate_probes(run, store, QUIET, fitted=with_families(fake_store()))


def test_an_artifact_that_does_not_tell_what_fitted_it_is_warned_of(folder: Path, fake_store: Any) -> None:
    run = replace(load_run(str(folder)), groups_seen=None)
    report = evaluate_probes(run, other_store(fake_store), QUIET)
    assert any("which documents fitted the probe is not written down" in line for line in report.findings.warnings)
    own = evaluate_probes(run, with_families(fake_store()), QUIET)
    assert not any("which documents fitted" in line for line in own.findings.warnings)


def test_probes_of_an_earlier_run_are_not_measured(trained: TrainResult, tmp_path: Path) -> None:
    trained.save(tmp_path)
    trained.probes["best"].save_pretrained(tmp_path / "resid_mid.0")
    assert sorted(load_run(str(tmp_path)).probes) == ["best", "serving"]
    assert (tmp_path / "resid_mid.0" / "config.json").is_file()
    assert load_run(str(tmp_path / "best")).groups_seen and load_run(str(tmp_path / "resid_mid.0")).groups_seen is None


def test_stores_that_are_no_control(folder: Path, fake_store: Any) -> None:
    run, own = load_run(str(folder)), with_families(fake_store())
    with pytest.raises(ChoiceError, match="was captured at temperature 0, which is greedy"):
        evaluate_probes(run, own, QUIET, sampled=other_store(fake_store))
    with pytest.raises(ChoiceError, match="holds states of the probe's own target"):
        evaluate_probes(run, own, QUIET, random_init=with_families(fake_store(seed=9)))
    for name, value in (("architecture", "OtherForCausalLM"), ("width", 13), ("blocks", 4)):
        with pytest.raises(ChoiceError, match=rf"another shape than the probe's target \({name}: .* and {value}\)"):
            evaluate_probes(run, own, QUIET, random_init=random_store(fake_store, **{name: value}))


@pytest.mark.parametrize("change", [{"label": []}, {"evaluations": {"best": {"all": 1}}}, {"findings": 1, "strata": 3}])
def test_a_report_of_other_kinds_of_values_is_named(folder: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    values = json.loads((folder / "evaluation.json").read_text())
    file = tmp_path / "evaluation.json"
    file.write_text(json.dumps(values | change))
    with pytest.raises(ProbeError, match=r"evaluation\.json is damaged"):
        read_report(file)
