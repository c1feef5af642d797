"""Where the plug-in takes hold of vLLM's model runners, over stand-ins for both."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from decoding.serving.vllm import plugin, symbols

V1, V2, CONFIG = "vllm.v1.spec_decode.eagle", "vllm.v1.worker.gpu.spec_decode", "vllm.config"
ASKED = SimpleNamespace(additional_config={"switchsd": {"probe": "toy"}})
PLAIN = SimpleNamespace(additional_config={})


class Config:
    """A stand-in for vLLM's `VllmConfig`."""

    def __init__(self, method: str | None, additional: Any) -> None:
        self.speculative_config = None if method is None else SimpleNamespace(method=method)
        self.additional_config = additional
        self.__post_init__()

    def __post_init__(self) -> None:
        self.checked = True


class Theirs:
    def __init__(self, vllm_config: Any, device: Any, runner: Any = None) -> None:
        self.told = (device, runner)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runners' modules, and ours."""
    made = {name: ModuleType(name) for name in (V1, V2, plugin.V2_RUNNER, CONFIG)}
    for name, module in made.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            outer = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, outer, sys.modules.get(outer) or ModuleType(outer))
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(sys.modules[".".join(parts[:-1])], parts[-1], module, raising=False)
    vars(made[CONFIG])["VllmConfig"] = type("VllmConfig", (Config,), {})
    proposer = type("EagleProposer", (Theirs,), {})
    vars(made[V1])["EagleProposer"] = proposer
    for name in (V2, plugin.V2_RUNNER):
        vars(made[name])["init_speculator"] = lambda vllm_config, device, req_states: Theirs(vllm_config, device)
    for name, values in {
        "v1": {"SwitchProposer": type("SwitchProposer", (proposer,), {})},
        "v2": {"SwitchSpeculator": type("SwitchSpeculator", (Theirs,), {})},
    }.items():
        ours = ModuleType(f"decoding.serving.vllm.{name}")
        vars(ours).update(values)
        monkeypatch.setitem(sys.modules, ours.__name__, ours)


def built(vllm_config: Any) -> list[str]:
    """Whose drafters the two runners get."""
    first = sys.modules[V1].EagleProposer(vllm_config, "device", runner="runner")
    assert first.told == ("device", "runner")
    builders = [sys.modules[name].init_speculator for name in (V2, plugin.V2_RUNNER)]
    assert builders[0] is builders[1]
    second = builders[1](vllm_config, "device", "states")
    assert second.told == ("device", None if type(second) is Theirs else "states")
    return [type(first).__name__, type(second).__name__]


def test_an_engine_gets_the_switch_where_it_asks_for_it(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "obstacle", lambda runner: "")
    plugin.register()
    hooked = sys.modules[V2].init_speculator
    plugin.register()
    assert sys.modules[V2].init_speculator is hooked
    assert built(PLAIN) == ["EagleProposer", "Theirs"]
    assert built(ASKED) == ["SwitchProposer", "SwitchSpeculator"]
    assert built(PLAIN) == ["EagleProposer", "Theirs"]


def test_another_vllm_stays_as_it_was_and_one_line_says_so(
    vllm: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(symbols, "obstacle", lambda runner: f"no such thing in {runner}")
    plugin.register()
    assert built(PLAIN) == ["EagleProposer", "Theirs"] and not caplog.records
    assert built(ASKED) == ["EagleProposer", "Theirs"]
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"switchsd is off, vLLM is as it was: no such thing in {runner}" for runner in ("v1", "v2")]


def test_without_the_runners_vllm_starts(vllm: None, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.delattr(sys.modules[V1], "EagleProposer")
    plugin.register()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["switchsd is off, vLLM is as it was"]
    assert sys.modules[V2].init_speculator.switchsd


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model", None])
def test_a_switch_without_an_eagle_head_is_refused_before_anything_is_built(vllm: None, method: str | None) -> None:
    plugin.register()
    plugin.register()
    config: Any = sys.modules[CONFIG].VllmConfig
    assert config(method, {}).checked
    with pytest.raises(ValueError, match=rf"asks for the switch, and the engine drafts by {method}: name an EAGLE-3"):
        config(method, ASKED.additional_config)


def test_what_is_asked_is_read_before_anything_is_built(vllm: None) -> None:
    plugin.register()
    config: Any = sys.modules[CONFIG].VllmConfig
    assert config("eagle3", ASKED.additional_config).checked
    assert config("custom_class", {"switchsd": {"kappa": 5}}).checked
    with pytest.raises(ValueError, match="tau is 2"):
        config("eagle3", {"switchsd": {"probe": "toy", "tau": 2}})
