"""`switchsd captures`, and what `switchsd capture` refuses, on a small random target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from activations import store as store_module
from activations.store import CaptureStore, StoreWriter, write_json
from switchsd.cli import FAILURE, OK, USAGE, main

Run = Callable[..., tuple[int, str, str]]
PROMPTS = [{"prompt": f"{i} abc abc abc", "family": "rag" if i % 2 else "math"} for i in range(4)]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*arguments) -> exit code, standard output, standard error on one line."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        found = capsys.readouterr()
        assert "Traceback" not in found.err and "SWITCHSD_DEBUG" not in found.err
        return code, found.out, " ".join(found.err.split())

    return call


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captures")
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    (folder / "more.jsonl").write_text(json.dumps({"prompt": "xyz xyz xyz"}))
    return folder


def options(root: Path, target: Path, *more: str, prompts: str = "prompts.jsonl") -> list[str]:
    common = ["--target", str(target), "--prompts", str(root / prompts), "--max-new-tokens", "12", "--batch", "2"]
    return [*common, "--dtype", "float32", *more]


@pytest.fixture(scope="module")
def store(root: Path, tiny_folder: Path) -> Path:
    """Four documents with labels in two shards."""
    assert main(["capture", str(root / "labels"), *options(root, tiny_folder, "--sites", "embed")]) == OK
    return root / "labels"


@pytest.fixture(scope="module")
def whole(root: Path, tiny_folder: Path) -> Path:
    """Four whole texts with the states for a head."""
    arguments = options(root, tiny_folder, "--sites", "eagle", "--selection", "all")
    assert main(["capture", str(root / "whole"), *arguments]) == OK
    return root / "whole"


def test_info_says_what_is_there(run: Run, store: Path) -> None:
    code, out, _ = run("captures", "info", store, "--json")
    found = json.loads(out)
    opened = CaptureStore.open(store)
    rows = opened.rows()
    assert code == OK
    assert (found["documents"], found["planned"], found["rows"], found["sites"]) == (4, 4, len(opened), ["embed"])
    assert found["target"]["width"] == 64 and found["selection"] == "anchors"
    assert found["bytes"] == sum(f.stat().st_size for f in store.rglob("0*"))
    for name in ("span_0", "span_2", "follow"):
        known = rows[name] >= 0
        share = float((rows[name][known] == 1).mean()) if known.any() else 0.0
        assert found["labels"][name] == {"share": pytest.approx(share), "known": int(known.sum())}
    assert found["labels"]["match"]["share"] == pytest.approx(float((rows["match_length"] > 0).mean()))
    counts = {f: int((rows["family"] == f).sum()) for f in ("math", "rag")}
    assert found["families"] == {f: {"documents": 2, "rows": n} for f, n in counts.items()}
    assert found["nonfinite"] == {"values": 0, "documents": {}}
    out = run("captures", "info", store)[1]
    for text in ("4 of 4 documents", f"{len(opened)} rows", "LlamaForCausalLM, width 64", "span_0", "math"):
        assert text in out


def test_info_counts_only_shards_that_count(run: Run, store: Path, tmp_path: Path) -> None:
    """A capture that goes on after a file was lost marks its shard, and may be stopped before it is there again."""
    copied = Path(shutil.copytree(store, tmp_path / "store"))
    (copied / "states" / "00000.safetensors").unlink()
    manifest = json.loads((copied / "manifest.json").read_text())
    with StoreWriter(copied, manifest, manifest["sites"]) as writer:
        write_json(copied / "manifest.json", writer.manifest)
    found = json.loads(run("captures", "info", copied, "--json")[1])
    rows = manifest["shards"][1]["rows"]
    assert (found["documents"], found["rows"]) == (2, rows)
    assert found["labels"]["match"]["known"] == rows == sum(f["rows"] for f in found["families"].values())


def test_info_shows_causal_shares(run: Run, root: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """By the loss of which the store's own manifest says that it counts."""
    asked = options(root, tiny_folder, "--sites", "embed", "--kappa", "1", "--causal")
    assert run("capture", tmp_path / "s", *asked)[0] == OK
    made = CaptureStore.open(tmp_path / "s")
    rows = made.rows()
    delta = made.manifest["config"]["removal"]["causal_delta"] = float(np.nanmedian(rows["causal_mask"]))
    write_json(tmp_path / "s" / "manifest.json", made.manifest)
    labels = json.loads(run("captures", "info", tmp_path / "s", "--json")[1])["labels"]
    for name in ("causal_mask", "causal_replace", "causal_control"):
        drops = rows[name][~np.isnan(rows[name])]
        assert labels[name] == {"share": pytest.approx(float((drops > delta).mean())), "known": len(drops)}
    assert 0 < labels["causal_mask"]["share"] < 1


def test_names_are_shown_as_they_are(run: Run, store: Path, root: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Brackets would be markup, and colons emoji."""
    odd = tmp_path / "[red]a[" / "b:cat:"
    shutil.copytree(store, odd)
    for command in ("info", "verify"):
        assert f"{odd}: " in run("captures", command, odd)[1]
    target = Path(shutil.copytree(tiny_folder, tmp_path / "[t]:cat:"))
    code, out, err = run("capture", odd, *options(root, target, "--sites", "embed"))
    assert (code, f"{odd}: 4 documents" in out, f"train probe {odd}" in out) == (OK, True, True), err
    code, out, err = run("sites", target)
    assert (code, f"{target}: Llama" in out) == (OK, True), err


def test_other_settings_are_named_with_both_values(run: Run, store: Path, root: Path, tiny_folder: Path) -> None:
    code, _, err = run("capture", store, *options(root, tiny_folder, "--sites", "embed", "--seed", "3", "--kappa", "2"))
    assert (code, "config.labels.kappa (5 and 2), config.seed (0 and 3) differ" in err) == (FAILURE, True), err


def test_info_names_documents_with_broken_states(run: Run, store: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(store, tmp_path / "store"))
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["shards"][1].update(nonfinite=5, nonfinite_rows={"3": 2})
    (copied / "manifest.json").write_text(json.dumps(manifest))
    assert "5 values are not finite, in document 3 (2 rows)" in run("captures", "info", copied)[1]


def test_verify_names_every_damaged_file(run: Run, store: Path, tmp_path: Path) -> None:
    assert "2 shards" in run("captures", "verify", store)[1]
    assert json.loads(run("captures", "verify", store, "--json")[1])["damages"] == []
    copied = Path(shutil.copytree(store, tmp_path / "store"))
    damaged = [copied / "rows" / "00000.parquet", copied / "states" / "00001.safetensors"]
    damaged[0].unlink()
    damaged[1].write_bytes(b"x")
    code, out, err = run("captures", "verify", copied)
    assert (code, out) == (FAILURE, "")
    assert all(f"{file} is missing, or not as it was written" in err for file in damaged)
    assert "(damaged: 2 of 2 shards)" in err
    code, out, _ = run("captures", "verify", copied, "--json")
    assert (code, len(json.loads(out)["damages"])) == (FAILURE, 2)


def test_merge(run: Run, store: Path, root: Path, tiny_folder: Path, tmp_path: Path) -> None:
    more = options(root, tiny_folder, "--sites", "embed", prompts="more.jsonl")
    assert run("capture", tmp_path / "more", *more)[0] == OK
    code, out, err = run("captures", "merge", store, tmp_path / "more", "--out", tmp_path / "both", "--json")
    assert code == OK, err
    assert json.loads(out)["documents"] == 5
    assert run("captures", "verify", tmp_path / "both")[0] == OK
    code, _, err = run("captures", "merge", store, store, "--out", tmp_path / "twice")
    assert (code, "hold the same prompts" in err) == (FAILURE, True)
    code, _, err = run("captures", "merge", store, "--out", tmp_path / "one")
    assert (code, "at least two stores" in err) == (USAGE, True)


def test_export(run: Run, whole: Path, store: Path, tmp_path: Path) -> None:
    for name, pattern in (("speculators", "hs_*.safetensors"), ("specforge", "data_*.ckpt")):
        code, out, err = run("captures", "export", whole, tmp_path / name, "--format", name, "--json")
        assert code == OK, err
        assert json.loads(out)["documents"] == 4
        assert len(list((tmp_path / name).rglob(pattern))) == 4
        assert "examples" not in err, "a progress bar of another library"
    code, _, err = run("captures", "export", store, tmp_path / "x", "--format", "speculators")
    assert (code, "does not hold whole texts" in err) == (FAILURE, True)
    assert run("captures", "export", whole, tmp_path / "x", "--format", "zip")[0] == USAGE


def test_export_for_specforge_needs_the_store_s_own_target(
    run: Run, whole: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    code, out, err = run("captures", "export", whole, tmp_path / "x", "--format", "specforge", "--target", tiny_folder)
    assert (code, "4 documents" in out) == (OK, True), err
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["target"]["revision"] = "another"
    (other / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = run("captures", "export", other, tmp_path / "y", "--format", "specforge", "--target", tiny_folder)
    assert (code, "was captured from another target" in err, "revision" in err) == (USAGE, True, True)


def test_a_head_trains_from_a_capture_of_whole_texts(run: Run, whole: Path, tiny_folder: Path, tmp_path: Path) -> None:
    code, _, err = run(
        "train", "eagle", whole, "--target", tiny_folder, "--out", tmp_path / "head", "--tokens", "60",
        "--draft-vocabulary", "16", "--validation-documents", "1", "--steps", "2", "--batch-tokens", "64",
    )  # fmt: skip
    assert code == OK, err
    assert (tmp_path / "head" / "model.safetensors").is_file()


def test_a_capture_that_does_not_fit_the_disk(
    run: Run, root: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "free_bytes", lambda folder: store_module.MARGIN)
    code, _, err = run("capture", tmp_path / "s", *options(root, tiny_folder, "--sites", "embed"))
    assert (code, "the store takes at most" in err, "free some space" in err) == (FAILURE, True, True), err
    assert not (tmp_path / "s").exists()


def test_a_store_that_another_run_writes(run: Run, store: Path, root: Path, tiny_folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(store, tmp_path / "store"))
    manifest = json.loads((copied / "manifest.json").read_text())
    with StoreWriter(copied, manifest, manifest["sites"]):
        code, _, err = run("capture", copied, *options(root, tiny_folder, "--sites", "embed"))
    assert (code, "is being written by another run" in err) == (FAILURE, True), err


def test_prompts_that_cannot_be_read_are_left_out_if_asked(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc abc"}\nno json\n{"prompt": "xyz"}\n')
    arguments = ["--target", tiny_folder, "--prompts", tmp_path / "p.jsonl", "--sites", "embed"]
    arguments += ["--max-new-tokens", "4"]
    code, _, err = run("capture", tmp_path / "s", *arguments)
    assert (code, "p.jsonl:2: not JSON" in err) == (USAGE, True)
    code, out, err = run("capture", tmp_path / "s", *arguments, "--skip-bad", "--json")
    assert (code, json.loads(out)["documents"]) == (OK, 2)
    assert "left out: 1 prompt:" in err and "p.jsonl:2: not JSON" in err
    (tmp_path / "p.jsonl").write_text(
        "\n".join(json.dumps({"prompt": text}) for text in ("abc", "x" * 5000, "y" * 5000))
    )
    code, out, err = run("capture", tmp_path / "long", *arguments, "--skip-bad", "--json")
    assert (code, json.loads(out)["documents"]) == (OK, 1), err
    assert "left out: 2 prompts: prompt p-2: the prompt has 50" in err and "prompt p-3" in err
    assert "1 prompt; the store takes" in err
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x" * 5000}))
    code, _, err = run("capture", tmp_path / "none", *arguments, "--skip-bad")
    assert (code, "no prompt is left" in err, "prompt p-1: the prompt" in err) == (USAGE, True, True), err
    code, _, err = run("capture", tmp_path / "t", "--skip-bad")
    assert (code, "are about --prompts" in err) == (USAGE, True)
