"""Gemma 3 270M, above its window of 512 tokens, in float32."""

from __future__ import annotations

import pytest
import torch
from test_decoder import MODE_NAMES, decoder_for, greedy
from transformers import AutoModelForCausalLM

from activations import packaged
from activations.target import Target, load_target
from activations.tasks import documentation
from decoding.selfcheck import check_tree_forward

ALIAS, WINDOW = "gemma3-270m", 512
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(packaged.gguf_file(ALIAS) is None, reason=f"the package of {ALIAS} is not installed"),
]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(ALIAS, dtype="float32", device="cpu")


def test_it_can_be_read(target: Target) -> None:
    assert (target.blocks, target.width, target.window, target.hybrid) == (18, 640, WINDOW, True)
    assert target.config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 3
    target.check_structure()
    check_tree_forward(target)
    ids = target.encode("Monday, Tuesday, Wednesday, Thursday,")
    assert ids[0] == target.tokenizer.bos_token_id
    assert target.decode(greedy(target.model, ids, 1)).strip() == "Friday"


def test_every_mode_writes_its_own_text_above_the_window(target: Target) -> None:
    passage = " ".join(documentation()[0].split()[:200])
    filler = " ".join(documentation()[1].split() * 4)[:2600]
    prompt = target.encode(f"{passage}\n\n{filler}\n\nOnce more:\n\n{' '.join(passage.split()[:12])}")
    assert len(prompt) > WINDOW + 32
    reference = AutoModelForCausalLM.from_pretrained(packaged.folder(ALIAS), dtype=torch.float32).eval()
    truth = greedy(reference, prompt, 24)
    decoder = decoder_for(target, {tuple(prompt): truth}, kappa=3)
    for mode in MODE_NAMES:
        assert decoder.generate([prompt], mode=mode, max_new_tokens=24)[0].tokens == truth, mode
