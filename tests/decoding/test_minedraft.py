"""Mode minedraft: the target's own text, drafted for in another process."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import family_target
from remote_drafters import eagle
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from decoding.chat import Chat
from decoding.decoder import Decoder
from decoding.minedraft.remote import RemoteDrafter, own_device
from decoding.minedraft.worker import DrafterSpec
from decoding.modes import DecodingError

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "neural_tree": "fixed", "neural_nodes": 6}


@pytest.fixture(scope="module")
def there() -> Iterator[RemoteDrafter]:
    made = RemoteDrafter(DrafterSpec("remote_drafters:eagle"))
    yield made
    made.shut_down()


def decoder_for(drafter: Any) -> Decoder:
    target = family_target("llama")
    raw = Tokenizer(models.BPE(vocab={chr(i + 200): i for i in range(97)}, merges=[]))
    raw.decoder = decoders.Fuse()
    target.tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    return Decoder(target, neural=eagle(), elsewhere={} if drafter is None else {"eagle": drafter})


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[i, *[draw.randrange(97) for _ in range(4)] * 3] for i in range(7)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 4, 5])
def test_it_writes_the_target_s_own_text(there: RemoteDrafter, temperature: float, batch: int) -> None:
    decoder = decoder_for(there)
    how = {**OPTIONS, "temperature": temperature, "seed": 3}
    wanted = [g.tokens for g in decoder.generate(prompts(), mode="ar", **how)]
    found = decoder.generate(prompts(), mode="minedraft", batch=batch, **how)
    assert [g.tokens for g in found] == wanted
    assert any(record.tokens for record in decoder.trace) and not there._requests
    assert {record.rows for record in decoder.trace} <= set(range(1, (batch + 1) // 2 + 1))


def test_copies_need_no_process() -> None:
    decoder = decoder_for(None)
    wanted = [g.tokens for g in decoder.generate(prompts(), mode="ar", **OPTIONS)]
    found = decoder.generate(prompts(), mode="minedraft", neural="none", kappa=2, batch=4, **OPTIONS)
    assert [g.tokens for g in found] == wanted
    assert any("copy" in g.sources for g in found)


def test_its_process_is_killed_in_the_middle(caplog: pytest.LogCaptureFixture) -> None:
    there = RemoteDrafter(DrafterSpec("remote_drafters:eagle"))
    try:
        decoder = decoder_for(there)
        wanted = [g.tokens for g in decoder.generate(prompts(), mode="ar", **OPTIONS)]
        texts: dict[int, list[int]] = {}
        with caplog.at_level(logging.WARNING, "switchsd"):
            for i, event in enumerate(decoder.stream(prompts(), mode="minedraft", batch=4, **OPTIONS)):
                texts.setdefault(event.request, []).extend(event.tokens)
                if i == 20 and there._process is not None:
                    os.kill(there._process.pid, signal.SIGKILL)
        assert [texts[i] for i in range(7)] == wanted
        assert len(caplog.records) == 1 and there.running
    finally:
        there.shut_down()


def test_a_chat_goes_on_from_what_was_computed(there: RemoteDrafter) -> None:
    decoder = decoder_for(there)
    decoder.target.encode = lambda messages: [len(m["content"]) % 97 for m in messages for _ in range(3)]  # type: ignore[method-assign]
    answers = []
    for mode in ("ar", "minedraft"):
        with Chat(decoder, mode=mode, **OPTIONS) as chat:
            answers.append([chat.send("a" * n).tokens for n in (3, 5, 7)])
    assert answers[0] == answers[1]


def test_what_cannot_be_done(there: RemoteDrafter) -> None:
    decoder = decoder_for(there)
    with pytest.raises(DecodingError, match=r"neural=draft in a process of its own, and .* has no such drafter"):
        decoder.generate([1, 2], mode="minedraft", neural="draft")
    with pytest.raises(DecodingError, match="acceptance=rejection is not for mode 'minedraft'"):
        decoder.generate([1, 2], mode="minedraft", acceptance="rejection")
    with pytest.raises(DecodingError, match="has no such drafter there"):
        decoder_for(None).generate([1, 2], mode="minedraft")


def test_the_drafter_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})
    assert own_device(torch.device("cpu")) == {"cores": (5,)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2})
    assert own_device(torch.device("cpu")) == {"cores": ()}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device(torch.device("cuda", 1)) == {"device": "cuda:0"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_device(torch.device("cuda", 0)) == {"device": "cuda:0"}
