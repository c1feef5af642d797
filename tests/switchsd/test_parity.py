"""`switchsd parity`, on small random targets in folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from switchsd.cli import FAILURE, OK, USAGE, main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["parity", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_report(capsys: pytest.CaptureFixture[str], tiny_folder: Path) -> None:
    code, text, _ = run(capsys, str(tiny_folder), "--json", "--text", "abc abc", "--text", "x")
    assert code == OK
    report = json.loads(text)
    assert report["verdict"] == "agree" and report["texts"] == 2 and report["not_in_transformer_lens"] == []
    assert len(report["sites"]) == 1 + 5 * 8
    for one in report["sites"]:
        assert one["verdict"] in ("equal", "rounding")
        assert one["float64"]["relative"] < 1e-12 and one["float32"]["absolute"] < 1e-4
    code, text, _ = run(capsys, str(tiny_folder))
    assert code == OK
    assert "the others differ by rounding alone" in text and "embed: equal" in text


def test_an_error_fails_and_is_shown(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from activations import lens

    right = lens.hook_name
    wrong = {"resid_mid.5": "blocks.4.hook_resid_mid"}
    monkeypatch.setattr(lens, "hook_name", lambda site: wrong.get(str(site)) or right(site))
    code, text, _ = run(capsys, str(tiny_folder), "--text", "abc")
    assert code == FAILURE
    assert "1 of 41 sites differ by more than rounding: resid_mid.5" in text and text.count("ERROR") == 1
    code, text, _ = run(capsys, str(tiny_folder), "--text", "abc", "--json")
    assert code == FAILURE
    assert json.loads(text)["verdict"] == "error"


def test_a_family_that_transformer_lens_does_not_know(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, tmp_path: Path
) -> None:
    from transformers import HeliumConfig, HeliumForCausalLM

    shutil.copytree(tiny_folder, tmp_path / "helium")
    config = HeliumConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    HeliumForCausalLM(config).save_pretrained(tmp_path / "helium")
    code, _, error = run(capsys, str(tmp_path / "helium"))
    assert code == USAGE
    assert "TransformerLens" in error and "cannot wrap" in error and "HeliumForCausalLM" in error


def test_nothing_differs(
    capsys: pytest.CaptureFixture[str], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from activations import lens

    same = lens.Difference(0.0, 0.0, True)
    monkeypatch.setattr(lens, "parity", lambda target, texts: [lens.Parity("resid_pre.0", 3, same, same, "equal")])
    code, text, _ = run(capsys, str(tiny_folder))
    assert (code, "all 1 sites are equal bit for bit" in text, "the others differ" in text) == (OK, True, False)
