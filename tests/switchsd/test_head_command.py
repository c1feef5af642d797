"""`switchsd head`: a head is checked and exported, and a foreign one is checked before it is used."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from switchsd.cli import FAILURE, OK, USAGE

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def head(tiny_folder: Path, tmp_path: Path) -> Path:
    """A random head that nobody has vouched for."""
    from decoding.eagle.head import EagleHead, HeadConfig

    torch.manual_seed(0)
    made = EagleHead(HeadConfig(64, 128, 4, 2, vocab_size=258, draft_vocab_size=32))
    made.set_vocabulary(torch.arange(226, 258))
    made.save(tmp_path / "head")
    return tmp_path / "head"


def test_a_head_that_does_not_fit_fails_the_check(run: Run, head: Path, tiny_folder: Path) -> None:
    options = ("--target", tiny_folder, "--limit", 2, "--max-new-tokens", 8, "--steps", 2)
    code, out, err = run("head", "check", head, *options, "--json")
    found = json.loads(out)
    assert found["format"] == "safeailab" and found["sites"] == ["resid_pre.2", "resid_pre.4", "resid_pre.5"]
    assert len(found["agreement"]) == len(found["accepted"]) == 2 and found["rows"] == 16
    assert (code, found["fits"]) == (FAILURE, False) and "the head's first choice is the target's at" in err
    code, out, err = run("head", "check", head, *options)
    assert code == FAILURE and "draft step" in out and "position" in out


def test_a_foreign_head_is_checked_when_it_is_used_and_only_once(
    run: Run, head: Path, tiny_folder: Path, own_cache: Path
) -> None:
    from decoding.eagle.head import HeadWarning

    command = ("generate", "x", "--target", tiny_folder, "--drafter", head, "--mode", "eagle", "--max-new-tokens", 2)
    with pytest.warns(HeadWarning, match="the head's first choice is the target's at"):
        assert run(*command)[0] == OK
    [kept] = (own_cache / "checks").glob("head-*.json")
    kept.write_text(json.dumps({"told": "what was found before"}))
    with pytest.warns(HeadWarning, match="what was found before"):
        assert run(*command)[0] == OK


def test_export_and_back(run: Run, head: Path, tiny_folder: Path, tmp_path: Path) -> None:
    before = load_file(head / "model.safetensors")
    for form in ("speculators", "safeailab"):
        given = ("--format", form, "--target", tiny_folder, "--json")
        code, out, err = run("head", "export", head, tmp_path / form, *given)
        assert code == OK, err
        assert json.loads(out)["format"] == form
        after = load_file(tmp_path / form / "model.safetensors")
        assert len(before) == len(after)
        for name, tensor in after.items():
            assert torch.equal(before[name.replace("layers.0.", "midlayer.")], tensor)
    code, _, err = run("head", "export", head, tmp_path / "speculators", "--target", tiny_folder)
    assert code == FAILURE and "is not empty" in err
    code, _, err = run("head", "export", tmp_path / "none", tmp_path / "x", "--target", tiny_folder)
    assert code == USAGE and "config.json is missing" in err


def test_a_warning_about_a_head_is_one_line() -> None:
    from decoding.eagle.head import HeadWarning
    from switchsd import cli

    cli.main(["--version"])
    cli.main([])
    assert warnings.formatwarning("the head is odd", HeadWarning, "file.py", 3) == "warning: the head is odd\n"
    assert "file.py:3" in warnings.formatwarning("something", UserWarning, "file.py", 3)
