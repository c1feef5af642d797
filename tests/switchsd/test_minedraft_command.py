"""`--mode minedraft` on the command line: a draft model in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def draft_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the tiny target's blocks, as `switchsd train draft` leaves them."""
    from activations.target import load_target
    from decoding.draft.model import cut, save_draft

    folder = tmp_path_factory.mktemp("draft")
    target = load_target(tiny_folder, dtype="float32")
    save_draft(folder, cut(target, [0, 7]), [0, 7], target)
    return folder


def test_generate(run, tiny_folder: Path, draft_folder: Path) -> None:  # type: ignore[no-untyped-def]
    """The target's own text, from the shell; and the mode says that it is lossless."""
    how = ("--target", tiny_folder, "--dtype", "float32", "--max-new-tokens", "20", "--json")
    texts = []
    for options in (("--mode", "ar"), ("--mode", "minedraft", "--neural", "draft", "--draft", draft_folder)):
        code, printed, told = run("generate", "ababab", *how, *options, "--neural-tree", "fixed")
        assert code == 0, told
        texts.append(json.loads(printed)["tokens"])
        assert json.loads(printed)["lossless"] is True
    assert texts[0] == texts[1]


def test_what_is_missing(run, tiny_folder: Path) -> None:  # type: ignore[no-untyped-def]
    code, _, told = run("generate", "ababab", "--target", tiny_folder, "--mode", "minedraft", "--neural", "draft")
    assert code == 2 and "no such drafter there" in told and "Traceback" not in told
