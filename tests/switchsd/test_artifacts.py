"""Artifacts of targets that are called alike stay apart, and each target finds its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from activations.target import load_target
from switchsd.artifacts import cached, own
from switchsd.loading import first_fitting

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def namesakes(tiny_folder: Path, tmp_path: Path) -> list[Path]:
    """Two folders called my-model, with different weights."""
    folders = [tmp_path / place / "my-model" for place in ("a", "b")]
    for scale, folder in enumerate(folders, 1):
        shutil.copytree(tiny_folder, folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.lm_head.weight.data *= scale
        model.save_pretrained(folder)
    return folders


def test_a_namesake_loses_no_probe(
    namesakes: list[Path], tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    files = []
    for folder in namesakes:
        target = load_target(folder)
        assert own("probe", target.name, target.fingerprint.to_dict()) not in files
        store = tmp_path / f"store-{folder.parent.name}"
        assert run("capture", store, "--target", folder, "--limit", 12, "--max-new-tokens", 24)[0] == 0
        caplog.clear()
        asked = ("generate", "a b c a b", "--target", folder, "--gate", "match", "--neural", "none")
        assert run(*asked, "--max-new-tokens", 4)[0] == 0
        assert ("left alone" in caplog.text) == bool(files), "another probe of this name is spoken of"
        code, out, _ = run("train", "probe", store, "--l2", "1e-2", "--resamples", 10, "--no-controls", "--json")
        assert code == 0
        files.append(own("probe", target.name, target.fingerprint.to_dict()))
        assert f'"folder": "{files[-1]}"' in out
    assert files == [cached("probe", "my-model"), files[1]] and files[0] != files[1]
    for folder, where in zip(namesakes, files, strict=True):
        assert first_fitting("probe", load_target(folder)) == where / "best"
        caplog.clear()
        assert run("generate", "a b c a b", "--target", folder, "--neural", "none", "--max-new-tokens", 4)[0] == 0
        assert "left alone" not in caplog.text
