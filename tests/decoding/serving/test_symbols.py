"""What is looked at in vLLM's sources, on sources made up for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from decoding.serving.vllm import symbols
from decoding.serving.vllm.symbols import Need, known, missing

SOURCE = """
from somewhere import Borrowed

class Base: ...

class Engine(Base):
    size: int = 3

    def __init__(self, config, device, runner=None):
        self.config, (self.device) = config, device

    @property
    def names(self): ...

    def propose(self, batch, hidden, *, dummy_run=False):
        if self.size == 0:
            return None
"""
FINE = (
    Need("part.engine", "Borrowed"),
    Need("part.engine", "Engine", holds="size config device names propose", base="Base"),
    Need("part.engine", "Engine.__init__", first="config device"),
    Need("part.engine", "Engine.propose", first="batch hidden", also="dummy_run", says="self.size == 0"),
    Need("part", "build", first="config"),
)
LACKING = {
    Need("part.engine", "Lent"): "no vllm.part.engine.Lent",
    Need("part.motor", "Engine"): "no vllm.part.motor.Engine",
    Need("part.engine", "Engine.verify"): "no vllm.part.engine.Engine.verify",
    Need("part.engine", "Engine", holds="size weight"): "vllm.part.engine.Engine has no weight",
    Need("part.engine", "Engine", base="Root"): "vllm.part.engine.Engine is no Root",
    Need(
        "part.engine", "Engine.propose", first="hidden"
    ): "vllm.part.engine.Engine.propose begins with (batch, hidden), not (hidden)",
    Need("part.engine", "Engine.propose", also="seeds"): "vllm.part.engine.Engine.propose takes no seeds",
    Need("part.engine", "Engine.propose", says="self.size == 1"): "vllm.part.engine.Engine.propose does not say "
    "`self.size == 1`",
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "vllm"
    (folder / "part").mkdir(parents=True)
    (folder / "part" / "engine.py").write_text(SOURCE)
    (folder / "part" / "__init__.py").write_text("def build(config): ...")
    (folder / "__init__.py").write_text("")
    return folder


def test_what_is_there_is_found(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "NEEDS", {"v1": FINE})
    assert missing("v1", sources) == []


@pytest.mark.parametrize("need", LACKING, ids=LACKING.get)
def test_what_is_not_there_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch, need: Need) -> None:
    monkeypatch.setattr(symbols, "NEEDS", {"v1": (*FINE, need)})
    assert missing("v1", sources) == [LACKING[need]]


def test_sources_that_cannot_be_read_are_an_obstacle_too(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "part" / "motor.py").write_text("class (")
    monkeypatch.setattr(symbols, "NEEDS", {"v1": (Need("part.motor", "Engine"),)})
    assert "its sources cannot be read (SyntaxError: " in missing("v1", sources)[0]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0rc1"])
def test_known_versions(version: str) -> None:
    assert known(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev", ""])
def test_other_versions_are_an_obstacle(version: str, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not known(version)
    monkeypatch.syspath_prepend(sources.parent)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    (sources / "__init__.py").write_text(f"__version__ = {version!r}")
    assert symbols.obstacle("v2").endswith("; this plug-in knows 0.32 to 0.33")
    sys.modules.pop("vllm", None)
