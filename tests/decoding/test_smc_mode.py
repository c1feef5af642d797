"""Mode smcsd through the engine: caches behind resampling, batches, ends, faults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_draft_drafter import draft_of

from activations.cache import KVCache
from activations.sampling import Sampling
from activations.target import Target
from decoding.chat import Chat
from decoding.decoder import Decoder
from decoding.draft.drafter import DraftModelDrafter
from decoding.engine import Engine
from decoding.modes import MODES, DecodingError, ModeSettings
from decoding.request import Request
from decoding.smc.verifier import ParticleVerifier
from decoding.tree import DraftTree
from decoding.verifier import Intent, Verdict

Made = Callable[..., Target]
PROMPTS = [[3, 7, 9, 3, 7], [5, 2], [8, 8, 1, 4, 4, 2, 6, 9], [2, 9, 2]]
OPTIONS: dict[str, Any] = {"mode": "smcsd", "temperature": 0.9, "max_new_tokens": 20, "seed": 3}


def decoder(target: Target, draft: Target | None = None, **settings: Any) -> Decoder:
    drafter = DraftModelDrafter(target, draft if draft is not None else draft_of(target, 0.1))
    return Decoder(target, neural=drafter, settings=ModeSettings(**{"particles": 3, "draft_tokens": 3, **settings}))


class Checked(ParticleVerifier):
    """Compares what it is given with whole forwards of every row's text."""

    target: Target
    draft: Target
    rounds = 0
    moved = 0

    def accept(
        self,
        trees: Sequence[DraftTree],
        logits: torch.Tensor,
        requests: Sequence[Request],
        intent: Intent | None = None,
    ) -> list[Verdict]:
        for row, (tree, request) in enumerate(zip(trees, requests, strict=True)):
            if request.ended or not len(tree):
                continue
            text = torch.tensor([[*request.tokens, *tree.tokens]])
            n = len(tree) + 1
            fresh = self.target.forward(text, KVCache(1), logits_to_keep=n)[0]
            assert logits[row, :n] == pytest.approx(fresh, abs=2e-4)
            law = request.sampling.process(self.draft.forward(text, KVCache(1), logits_to_keep=n)[0, :-1])
            assert tree.q_logits == pytest.approx(law, abs=2e-3)
            self.rounds += 1
        found = super().accept(trees, logits, requests, intent)
        self.moved += sum(v.ancestor is not None for v in found)
        return found


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_hold_their_own_texts_behind_every_resampling(family: str, small_target: Made) -> None:
    target = small_target(family)
    draft = draft_of(target, 0.1)
    made = decoder(target, draft, ess_threshold=0.95)
    call = made.call(**OPTIONS)
    assert isinstance(call.plan.verifier, ParticleVerifier)
    checked = Checked(3, target.stop_ids, threshold=0.95)
    checked.target, checked.draft = target, draft
    object.__setattr__(call.plan, "verifier", checked)
    engine = Engine(target, call.plan, 3)
    requests = [call.request(i, ids, target.max_length) for i, ids in enumerate(PROMPTS)]
    done = [event.done for event in made.run(requests, engine) if event.done is not None]
    engine.close()
    assert len(done) == len(PROMPTS) and all(d.tokens for d in done)
    assert checked.rounds > 20 and checked.moved > 5
    assert not checked.clouds


def test_a_text_does_not_depend_on_the_batch(small_target: Made) -> None:
    made = decoder(small_target(), ess_threshold=0.9)
    alone = made.generate(PROMPTS, **OPTIONS, batch=1)
    together = made.generate(PROMPTS, **OPTIONS, batch=3)
    assert [g.tokens for g in alone] == [g.tokens for g in together]
    assert [g.tokens for g in made.generate(PROMPTS, **OPTIONS, batch=4)] == [g.tokens for g in alone]
    other = made.generate(PROMPTS, **{**OPTIONS, "seed": 4}, batch=4)
    assert [g.tokens for g in other] != [g.tokens for g in alone]


def test_the_target_as_its_own_draft_model_is_never_resampled(small_target: Made) -> None:
    target = small_target()
    made = decoder(target, target, particles=4, ess_threshold=1.0 - 1e-3)
    made.generate(PROMPTS, **OPTIONS)
    assert len(made.trace) > 20
    assert all(record.ess == pytest.approx(4, abs=1e-3) for record in made.trace)
    assert all(len(r.accepted) == len(r.tokens) or r.pending in target.stop_ids for r in made.trace)


@pytest.mark.parametrize("particles", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_limits_hold(particles: int, length: int, small_target: Made) -> None:
    made = decoder(small_target(), particles=particles, draft_tokens=5)
    options = {**OPTIONS, "max_new_tokens": length}
    for generation in made.generate(PROMPTS, **options):
        assert len(generation.tokens) <= length
        assert generation.stopped == (len(generation.tokens) < length or generation.tokens[-1] in made.target.stop_ids)
        assert len(generation.sources) == len(generation.tokens)
    assert {r.particle for r in made.trace} <= set(range(particles))
    assert length < 3 or {r.particle for r in made.trace} == set(range(particles))


def test_events_are_the_text_in_order_and_stop_strings_end_it(small_target: Made) -> None:
    made = decoder(small_target())
    whole = made.generate(PROMPTS[0], **OPTIONS)
    events = list(made.stream(PROMPTS[0], **OPTIONS))
    assert [t for e in events for t in e.tokens] == whole.tokens
    assert "".join(e.text for e in events) == whole.text
    stop = whole.text[3:5]
    cut = made.generate(PROMPTS[0], **OPTIONS, stop=stop)
    assert cut.text == whole.text[: whole.text.index(stop)] and cut.stopped


@pytest.mark.parametrize("settings", [{"resampling": "multinomial"}, {"power": 2.0}, {"lookahead": 0.3}])
def test_settings_reach_the_particles(settings: dict[str, Any], small_target: Made) -> None:
    plain = decoder(small_target(), ess_threshold=0.9, draft_tokens=6)
    told = decoder(small_target(), ess_threshold=0.9, draft_tokens=6, **settings)
    texts = [[g.tokens for g in made.generate(PROMPTS, **OPTIONS)] for made in (plain, told, told)]
    assert texts[1] == texts[2] != texts[0]
    depths = {len(r.tokens) for r in told.trace}
    assert (max(depths) < 6) == ("lookahead" in settings)


def test_the_lookahead_grows_where_both_laws_are_one(small_target: Made) -> None:
    target = small_target()
    made = decoder(target, target, lookahead=0.3, draft_tokens=8)
    made.generate(PROMPTS[:1], **{**OPTIONS, "max_new_tokens": 80, "temperature": 1.5})
    depths = [len(r.tokens) for r in made.trace if r.particle == 0]
    assert depths[0] == 4 and max(depths) > 4


def test_a_drafter_that_fails_leaves_the_target_alone(
    small_target: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = decoder(small_target())
    propose, asked = DraftModelDrafter.propose, []

    def fails(self: DraftModelDrafter, requests: Any, budgets: Any) -> Any:
        asked.append(len(requests))
        if len(asked) > 2:
            raise RuntimeError("out of order")
        return propose(self, requests, budgets)

    monkeypatch.setattr(DraftModelDrafter, "propose", fails)
    with caplog.at_level(logging.WARNING):
        generations = made.generate(PROMPTS, **OPTIONS)
    assert all(len(g.tokens) == 20 or g.stopped for g in generations)
    assert "draft drafter failed" in caplog.text
    assert len(asked) == 3


def test_turns_of_a_chat_are_those_of_whole_conversations(small_target: Made) -> None:
    """What a turn takes over from the one before is one particle's row, whichever was chosen."""
    made = decoder(small_target(), particles=4)
    plan = made.call(**OPTIONS).plan
    engine = Engine(made.target, plan, keeps=True)
    text = list(PROMPTS[0])
    reused = 0
    for turn in range(4):
        request = Request(0, list(text), 12, Sampling(0.9, seed=turn))
        [done] = [e.done for e in made.run([request], engine) if e.done is not None]
        reused += engine.reused
        fresh = made.generate(text, **{**OPTIONS, "max_new_tokens": 12, "seed": turn})
        assert done.tokens == fresh.tokens
        text = [*text, *done.tokens, 5, turn]
    engine.close()
    assert reused > 20
    assert Chat(made, **OPTIONS).decoder is made


def test_greedy_calls_are_refused_with_the_reason(small_target: Made) -> None:
    made = decoder(small_target())
    for call in (made.generate, made.stream):
        with pytest.raises(DecodingError, match=r"temperature 0\.0 nearly every weight is 0 or infinite.*or mode sd"):
            call(PROMPTS[0], mode="smcsd")
    assert not MODES["smcsd"].lossless
    assert made.describe("smcsd")["lossless"] is False


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"particles": 0}, "particles is 0"),
        ({"resampling": "stratified"}, "unknown resampling 'stratified': use systematic or multinomial"),
        ({"ess_threshold": 2}, "ess_threshold is 2"),
        ({"lookahead": 1.0}, r"lookahead is 1\.0"),
        ({"power": 0}, "power is 0"),
        ({"power": -1}, "power is -1"),
        ({"acceptance": "rejection"}, "weighed instead"),
    ],
)
def test_bad_settings_are_told(settings: dict[str, Any], told: str, small_target: Made) -> None:
    made = decoder(small_target())
    with pytest.raises(DecodingError, match=told):
        made.generate(PROMPTS[0], **OPTIONS, **settings)


def test_a_draft_model_is_needed(small_target: Made) -> None:
    with pytest.raises(DecodingError, match="mode 'smcsd' needs a draft model"):
        Decoder(small_target()).generate(PROMPTS[0], **OPTIONS)
