"""What is looked at in vLLM's sources, on sources made up for it; and where the V2 runner is hooked."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from decoding.serving.vllm import symbols
from decoding.serving.vllm.hook_v2 import hook_v2
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


def test_the_runner_gets_the_switch_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["vllm", "vllm.logger", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"]
    for name in [*names, "vllm.v1.worker.gpu.spec_decode", "vllm.v1.worker.gpu.model_runner"]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    parts, runner = (sys.modules[f"vllm.v1.worker.gpu.{name}"] for name in ("spec_decode", "model_runner"))
    vars(sys.modules["vllm.v1.worker.gpu"])["spec_decode"] = parts
    vars(sys.modules["vllm.logger"])["init_logger"] = logging.getLogger
    vars(parts)["init_speculator"] = vars(runner)["init_speculator"] = lambda vllm_config, device, req_states: "theirs"
    ours = ModuleType("decoding.serving.vllm.v2")
    vars(ours)["SwitchSpeculator"] = lambda vllm_config, device, req_states: ("ours", device, req_states)
    monkeypatch.setitem(sys.modules, ours.__name__, ours)
    reason = ""
    monkeypatch.setattr(symbols, "obstacle", lambda runner: reason)

    hook_v2()
    hook_v2()
    asked = SimpleNamespace(additional_config={"switchsd": {"probe": "toy"}})

    def build(config: Any) -> Any:
        assert parts.init_speculator is runner.init_speculator
        return runner.init_speculator(config, "device", req_states="states")

    assert build(SimpleNamespace(additional_config={})) == "theirs"
    assert build(asked) == ("ours", "device", "states")
    reason = "vLLM is 0.34.0; this plug-in knows 0.32 to 0.33"
    assert build(asked) == "theirs"
    assert [record.getMessage() for record in caplog.records] == [f"switchsd is off, vLLM is as it was: {reason}"]
