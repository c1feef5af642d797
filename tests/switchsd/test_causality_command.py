"""`switchsd causality`, from a capture to its file, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from switchsd.cli import FAILURE, OK, USAGE, main

Run = Callable[..., tuple[int, str, str]]
SITE = "resid_mid.4"
FEW = ["--documents", "4", "--anchors", "2", "--directions", "2", "--heads", "1,4", "--resamples", "20"]


def save_probe(folder: Path, target: Path, **more: Any) -> Path:
    import torch

    from activations.target import load_target
    from probes.artifact import Probe, ProbeConfig

    loaded = load_target(target, dtype="float32")
    values: dict[str, Any] = {
        "site": SITE, "width": 64, "label": "follow", "label_settings": {"match": 1}, "threshold": 0.5,
        "threshold_rule": "none", "target": loaded.fingerprint, "target_name": str(target), "store": "0" * 64,
        "split": {}, "metrics": {}, "provenance": {}, **more,
    }  # fmt: skip
    config = ProbeConfig(**values)
    weight = torch.randn(64 * len(config.sites), generator=torch.Generator().manual_seed(0))
    return Probe(config, weight).save_pretrained(folder)


@pytest.fixture(scope="module")
def made(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """prompts.jsonl, a store of every anchor, one of matches only, and probes."""
    root = tmp_path_factory.mktemp("made")
    texts = [f"{i * 7} repeat {chr(97 + i)}{i} {chr(97 + i)}{i}" for i in range(8)]
    lines = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = ["--prompts", str(root / "prompts.jsonl"), "--target", str(tiny_folder), "--sites", SITE]
    common += ["--max-new-tokens", "40", "--dtype", "float32", "--kappa", "1"]
    assert main(["capture", str(root / "anchors"), *common]) == OK
    assert main(["capture", str(root / "matches"), *common, "--selection", "matches", "--limit", "3"]) == OK
    save_probe(root / "probe", tiny_folder)
    save_probe(root / "joined", tiny_folder, site=f"{SITE}+resid_post.4")
    return root


def test_tables_and_a_file(run: Run, made: Path, tmp_path: Path) -> None:
    arguments = ["causality", made / "probe", made / "anchors", "--prompts", made / "prompts.jsonl"]
    code, text, notes = run(*arguments, *FEW, "--out", tmp_path / "out")
    assert code == OK, notes
    assert "interchange" in text and "copy intent" in text and "tokens to be computed: about" in notes
    saved = json.loads((tmp_path / "out" / "causality.json").read_text())
    code, printed, _ = run(*arguments, *FEW, "--out", tmp_path / "again", "--json")
    values = json.loads(printed)
    assert code == OK and values.pop("file") == str(tmp_path / "again" / "causality.json")
    assert values["direction"] == saved["direction"] and values["induction"] == saved["induction"]
    assert values["part"] == "all" and values["probe"]["dtype"] == "float32"
    effects = {(e["intervention"], e["where"], e["kind"]) for e in values["direction"]}
    assert len(effects) == 8 and all(e["anchors"] <= 8 for e in values["direction"])
    assert [len(a["heads"]) for a in values["induction"]["ablations"]] == [0, 1, 1, 4, 4]


def test_what_cannot_be_carried_out(run: Run, made: Path, tmp_path: Path) -> None:
    where = ["--prompts", made / "prompts.jsonl", "--out", tmp_path / "out"]
    code, _, text = run("causality", made / "probe", made / "matches", *where)
    assert code == USAGE and "capture with selection anchors" in text
    code, _, text = run("causality", made / "probe", made / "anchors", "--out", tmp_path / "out")
    assert code == FAILURE and "name their source with --prompts" in text
    code, _, text = run("causality", made / "joined", made / "anchors", *where)
    assert code == USAGE and "a direction belongs to a linear probe of one site" in text
    code, _, text = run("causality", made / "nowhere", made / "anchors", *where)
    assert code == USAGE and "no probe" in text
    code, _, text = run("causality", made / "probe", made / "anchors", *where, "--documents", "0")
    assert code == USAGE and "documents is 0" in text
    code, _, text = run("causality", made / "probe", made / "anchors", *where, "--heads", "1,x")
    assert code == USAGE and "--heads" in text
    assert not (tmp_path / "out").exists()
