"""The command line, run in this process, with a cache of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands must neither find nor leave anything in the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SWITCHSD_CACHE", str(folder))
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run(*arguments) -> the command line's exit code, what it printed, and what it told on the side."""
    from switchsd.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call
