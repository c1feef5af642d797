"""Turns that start from the latest one: the same texts, drafts included, as from nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_draft_drafter import draft_of
from test_eagle_head import random_head

from activations.target import Target, TargetError
from decoding.chat import Chat
from decoding.decoder import Decoder
from decoding.draft.drafter import DraftModelDrafter
from decoding.drafters import Drafter
from decoding.eagle.drafter import EagleDrafter
from decoding.engine import Engine
from decoding.modes import ModeSettings, Parts, get_mode
from decoding.request import Request
from decoding.trace import Trace

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}:{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<a:{% endif %}"
)
tokens = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def drafts(trace: Trace) -> list[Any]:
    return [(r.tokens, r.parents, r.accepted, r.pending) for r in trace]


@settings(max_examples=20, deadline=None)
@given(turns=st.lists(st.tuples(st.integers(0, 40), tokens, st.integers(1, 12)), min_size=2, max_size=4))
@pytest.mark.parametrize("mode", ["ar", "copy", "eagle", "sd", "switchsd"])
def test_as_if_from_nothing(small_target, mode, turns) -> None:  # type: ignore[no-untyped-def]
    """Each turn keeps a part of the text so far and goes on differently."""
    target = small_target("llama")
    neural: dict[str, Drafter] = {
        "eagle": EagleDrafter(target, random_head()),
        "draft": DraftModelDrafter(target, draft_of(target)),
    }
    parts = Parts(target, ModeSettings(kappa=2, gate="match"), neural=neural)
    plan, trace = get_mode(mode).build(parts), Trace()
    kept = Engine(target, plan, trace=trace, keeps=True)
    text: list[int] = []
    for keep, new, steps in turns:
        prompt = [*text[:keep], *new]
        fresh, alone = Request(0, prompt, max_new_tokens=30), Trace()
        single = Engine(target, get_mode(mode).build(parts), trace=alone)
        single.admit(fresh)
        request, seen = Request(0, prompt, max_new_tokens=30), len(trace)
        kept.admit(request)
        shared = next(
            (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), min(len(text), len(prompt))
        )
        assert kept.reused <= shared and kept.reused < len(prompt)
        assert kept.reused >= shared - 2  # the last token's logits, and the pending token
        for _ in range(steps):
            single.verify(single.draft())
            kept.verify(kept.draft())
        assert request.tokens == fresh.tokens
        mine = Trace(trace.records[seen:])
        assert drafts(mine) == drafts(alone)
        for one, other in zip(mine, alone, strict=True):
            assert one.logq == pytest.approx(other.logq, abs=1e-3)
        text = request.tokens
        kept.leave([request])
        single.close()
    kept.close()
    kept.close()
    assert not kept._intents and not kept._steps


@pytest.fixture
def talking(small_target) -> Target:  # type: ignore[no-untyped-def]
    target = copy.copy(small_target("llama"))
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.chat_template = TEMPLATE.replace("<", ";").replace(">", "=")
    target.__dict__.pop("chat_template", None)
    return target


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_chat_writes_what_the_decoder_writes(talking: Target, temperature: float) -> None:
    decoder = Decoder(talking)
    options: dict[str, Any] = {"mode": "copy", "kappa": 2, "max_new_tokens": 12, "temperature": temperature, "seed": 3}
    with Chat(decoder, "ABC", **options) as chat:
        for turn in ("HELLO", "AGAIN", "AGAIN"):
            messages = [*chat.messages, {"role": "user", "content": turn}]
            said = chat.send(turn)
            assert said.tokens == decoder.generate(messages, **options).tokens
            assert chat.messages == [*messages, {"role": "assistant", "content": said.text}]
        assert chat.reused > 0.5 * chat.prompt_tokens
        assert len(decoder.trace) > 0
        chat.reset()
        assert chat.messages == [{"role": "system", "content": "ABC"}]
        chat.send("HELLO")
        assert chat.reused == 0


def test_an_answer_that_is_stopped_stands_as_far_as_it_went(talking: Target) -> None:
    with Chat(Decoder(talking), mode="ar", max_new_tokens=12) as chat:
        answer = chat.stream("HELLO")
        shown = "".join(next(answer).text for _ in range(3))
        answer.close()
        assert chat.messages[-1] == {"role": "assistant", "content": shown}
        again = chat.send("MORE")
        assert again.tokens == Decoder(talking).generate(chat.messages[:-1], mode="ar", max_new_tokens=12).tokens
        with pytest.raises(TargetError):
            chat.send("\ud800")
        assert len(chat.messages) == 4


def test_an_engine_that_keeps_has_one_row(small_target) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="one row"):
        Engine(small_target("llama"), get_mode("ar").build(Parts(small_target("llama"), ModeSettings())), 2, keeps=True)


def test_features_of_the_shared_part_are_not_lost(small_target) -> None:  # type: ignore[no-untyped-def]
    """A head that has never drafted still holds all its features: none may be counted twice or dropped."""
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head())
    first, second = Request(0, [1, 2, 3, 4, 5], 8, tokens=[1, 2, 3, 4, 5, 6]), Request(0, [1, 2, 3, 9], 8)
    second.tokens = [1, 2, 3, 9, 7]
    features = torch.randn(5, 3 * target.width)
    drafter.start(first, features)
    drafter.resume(second, features[2:4], first, 2)
    state = drafter._states[second]
    assert torch.equal(torch.cat(state.waiting), torch.cat([features[:2], features[2:4]])) and state.fed == 0
    assert first not in drafter._states
