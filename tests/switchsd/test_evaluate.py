"""`switchsd train probe` and `switchsd evaluate`, from a capture to the tables."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from switchsd.cli import FAILURE, OK, USAGE, main

Run = Callable[..., tuple[int, str, str]]
FEW = ["--resamples", "20", "--folds", "2"]


@pytest.fixture(scope="module")
def stores(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Captures of the tiny target: greedy (with a train and a validation part), sampled, and of other weights."""
    import torch
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("stores")
    other = root / "other"
    shutil.copytree(tiny_folder, other)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(tiny_folder).config).save_pretrained(other)
    texts = [f"{i * 7} repeat {chr(97 + i)}{i} {chr(97 + i)}{i}" for i in range(26)]
    lines = [
        {"messages": [{"role": "user", "content": text}], "split": "validation" if i % 3 == 0 else "train"}
        for i, text in enumerate(texts)
    ]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = ["--sites", "embed,resid_mid.4,resid_post.4", "--max-new-tokens", "40"]
    common += ["--dtype", "float32", "--kappa", "1", "--span-n", "2"]
    for name, target, more in (
        ("greedy", tiny_folder, []),
        ("sampled", tiny_folder, ["--temperature", "0.7"]),
        ("random", other, []),
    ):
        arguments = ["--prompts", str(root / "prompts.jsonl"), "--target", str(target), *common, *more]
        assert main(["capture", str(root / name), *arguments]) == OK
    return {name: root / name for name in ("greedy", "sampled", "random")}


@pytest.fixture(scope="module")
def trained(stores: dict[str, Path]) -> Path:
    folder = stores["greedy"].parent / "run"
    options = [
        "--label",
        "span_1",
        "--match",
        "1",
        "--l2",
        "0.01",
        "--sites",
        "resid_*",
        "--no-transfer",
        "--out",
        str(folder),
        *FEW,
    ]
    assert main(["train", "probe", str(stores["greedy"]), *options]) == OK
    return folder


def test_training_writes_probes_and_tables(trained: Path) -> None:
    assert sorted(p.name for p in trained.iterdir()) == ["best", "evaluation.json", "evaluation.md", "serving"]
    report = json.loads((trained / "evaluation.json").read_text())
    assert report["config"]["folds"] == 2 and report["config"]["transfer"] is False
    assert report["gains"] and report["controls"] and not report["transfer"]


def test_evaluating_the_run_on_its_own_store_repeats_its_numbers(
    run: Run, trained: Path, stores: dict[str, Path], tmp_path: Path
) -> None:
    code, out, err = run(
        "evaluate", trained, stores["greedy"], "--out", tmp_path, "--sampled", stores["sampled"],
        "--random-init", stores["random"], "--json", *FEW,
    )  # fmt: skip
    assert code == OK, err
    report, first = json.loads(out), json.loads((trained / "evaluation.json").read_text())
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {k: v for k, v in report.items() if k != "folder"}
    for scope, found in first["evaluations"]["best"].items():
        same = report["evaluations"]["best"][scope]["roc_auc"]["estimate"]
        assert same == pytest.approx(found["roc_auc"]["estimate"], abs=1e-3)
    assert report["split"] == first["split"]
    assert [c["test"] for c in report["transfer"] if c["by"] == "store"] == ["sampled"]
    [control] = [c for c in report["controls"] if c["name"] == "randomly initialised target"]
    assert control["roc_auc"] is not None
    assert "## Controls" in (tmp_path / "evaluation.md").read_text()


def test_one_probe_on_another_store_for_people(
    run: Run, trained: Path, stores: dict[str, Path], tmp_path: Path
) -> None:
    options = ["--out", tmp_path, "--no-transfer", *FEW]
    code, out, err = run("evaluate", trained / "serving", stores["sampled"], "--fitted", stores["greedy"], *options)
    assert code == OK, err
    assert "best (resid_post.4)" in out and "what a probe adds to" in out and "evaluation.md" in out
    assert "controls of the best probe, rows with a suffix match" in " ".join(out.split())
    assert "not measured: lookback ratio" in err and "[bold]" not in err
    split = json.loads((tmp_path / "evaluation.json").read_text())["split"]
    assert split["rule"].startswith("by store")


def test_what_cannot_be_measured(run: Run, trained: Path, stores: dict[str, Path], tmp_path: Path) -> None:
    cases: list[tuple[list[object], int, str]] = [
        (["nope", stores["greedy"]], USAGE, "no probe 'nope'"),
        ([trained, tmp_path], FAILURE, "is no capture store"),
        ([trained, stores["random"]], USAGE, "another target than the probe's"),
        (
            [trained, stores["greedy"], "--sampled", stores["random"]],
            USAGE,
            "the sampled store holds states of another",
        ),
        ([trained, stores["sampled"], "--fitted", stores["sampled"]], USAGE, "is another one: its manifest differs"),
        ([trained, stores["greedy"], "--sampled", stores["greedy"]], USAGE, "which is greedy"),
        ([trained, stores["greedy"], "--random-init", stores["greedy"]], USAGE, "the probe's own target"),
        ([trained, stores["greedy"], "--folds", "1"], USAGE, "folds is 1"),
        ([trained, stores["greedy"], "--out", trained], USAGE, "holds a training run"),
        ([trained, stores["greedy"], "--out", trained / "evaluation.md"], USAGE, "is there and is no folder"),
    ]
    for arguments, expected, says in cases:
        code, _, err = run("evaluate", "--out", tmp_path / "out", "--resamples", "5", *arguments)
        assert (code, says in err) == (expected, True), err
    assert not (tmp_path / "out").exists()
    code, _, err = run("train", "probe", stores["greedy"], "--labels", "span_7", "--out", tmp_path / "out")
    assert (code, "unknown label 'span_7'" in err) == (USAGE, True), err
    code, _, err = run("train", "probe", stores["greedy"], "--copy-ms", "0", "--out", tmp_path / "out")
    assert (code, "copy_ms is 0" in err) == (USAGE, True), err


def test_a_report_of_a_folder_and_of_a_file(run: Run, trained: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, out, err = run("report", trained, "--out", page)
    assert code == OK, err
    assert "open it in a browser" in out and page.read_text().count("<article") == 1
    code, out, err = run("report", trained, trained / "evaluation.json", "--out", page, "--json")
    assert code == OK, err
    assert json.loads(out) == {"file": str(page), "reports": [str(trained), str(trained / "evaluation.json")]}
    assert page.read_text().count("<article") == 2 and "Comparison" in page.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_what_cannot_be_shown(run: Run, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    cases: list[tuple[list[object], int, str]] = [
        ([tmp_path / "nope"], USAGE, "nope is not there"),
        ([tmp_path], USAGE, "evaluation.json is not there"),
        ([trained, trained], USAGE, "is named twice"),
        ([tmp_path / "bad.json"], FAILURE, "cannot read"),
        ([trained / "best" / "config.json"], FAILURE, "is no evaluation of format version 1"),
        ([trained, "--out", tmp_path / "no" / "page.html"], USAGE, "no such folder"),
        ([trained, "--out", trained / "evaluation.json"], USAGE, "which is read: choose another name"),
        ([], USAGE, "Missing argument"),
    ]
    for arguments, expected, says in cases:
        code, _, err = run("report", *arguments)
        assert (code, says in err) == (expected, True), err


@pytest.mark.parametrize("ships", [False, True])
def test_the_way_back_is_told_where_there_is_one(
    run: Run, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ships: bool
) -> None:
    shipped = tmp_path / "shipped"
    monkeypatch.setattr("switchsd.artifacts.cached", lambda *of: tmp_path / "cached")
    monkeypatch.setattr("switchsd.artifacts.shipped", lambda *of: shipped)
    if ships:
        (shipped / "best").mkdir(parents=True)
        (shipped / "best" / "config.json").write_text("{}")
    few = ["--label", "span_1", "--match", "1", "--l2", "0.01", "--sites", "resid_post.4", "--no-transfer"]
    code, _, err = run("train", "probe", stores["greedy"], *few, "--no-controls", *FEW)
    assert code == OK, err
    assert "from now on" in err and ("to go back to the shipped probe" in err) is ships
    assert "[bold]" not in err
