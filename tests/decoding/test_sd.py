"""Mode sd, and the draft model as the neural side of the switch: the target's own text, in fewer steps."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES as ALL
from families import family_target
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import RELAXED, Coin, greedy, prompts_of
from test_draft_drafter import Counted, draft_of
from test_eagle_head import random_head
from test_modes_law import PROMPT, TARGET, p_value
from test_windows_modes import long_prompts

from activations.sampling import Sampling
from activations.target import Target
from decoding.chat import Chat
from decoding.costs import CostTable
from decoding.decoder import Decoder, Generation
from decoding.draft.drafter import DraftModelDrafter
from decoding.eagle.drafter import EagleDrafter
from decoding.engine import Engine
from decoding.lazy import Lazy
from decoding.modes import DecodingError, ModeSettings, Parts, get_mode
from decoding.request import Request
from decoding.scheduler import SequentialScheduler

SMALL = ["llama", "qwen3", "gemma3"]
SAMPLINGS = [Sampling(), Sampling(0.9, seed=3), Sampling(1.1, 9, 0.9, seed=4), Sampling(0.7, seed=5)]
COSTS = CostTable({}, [1, 9], [64], [[10.0, 11.0]], {"draft": [2.0, 4.0], "eagle": [1.0, 2.0]}, 0.0, 0.0)


def decoder_for(target: Target, noise: float = 0.03, **options: Any) -> Decoder:
    chosen = {"kappa": 2, "candidates": 3, "depth": 6, "copy_nodes": 8, "draft_tokens": 5, **options}
    drafter = DraftModelDrafter(target, draft_of(target, noise))
    return Decoder(target, Coin(), drafter, ModeSettings(**chosen), costs=COSTS)  # type: ignore[arg-type]


def tokens_of(generations: Sequence[Generation]) -> list[list[int]]:
    return [g.tokens for g in generations]


def held(decoder: Decoder) -> int:
    drafter = decoder.neural["draft"]
    assert isinstance(drafter, DraftModelDrafter)
    return len(drafter._held)


# -- the same text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SMALL)
@settings(max_examples=8, **RELAXED)
@given(data=st.data())
def test_it_writes_what_transformers_writes(family, small_target, reference_model, data) -> None:  # type: ignore[no-untyped-def]
    target, model = small_target(family), reference_model(family)
    prompts = long_prompts(data) if data.draw(st.booleans()) else prompts_of(data, data.draw(st.integers(1, 5)))
    n = data.draw(st.integers(1, 30))
    truth = [greedy(model, p, n) for p in prompts]
    tree = data.draw(st.sampled_from(["fixed", "priced"]))
    decoder = decoder_for(target, draft_tokens=data.draw(st.integers(1, 6)), neural_tree=tree)
    for batch in (data.draw(st.integers(1, 4)), 5):
        made = decoder.generate(prompts, mode="sd", max_new_tokens=n, batch=batch)
        assert tokens_of(made) == truth
        assert not held(decoder)


@pytest.mark.parametrize("family", SMALL)
@settings(max_examples=6, **RELAXED)
@given(data=st.data())
def test_it_samples_what_the_target_samples(family, small_target, data) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_for(small_target(family))
    prompts = prompts_of(data, 5)
    sampling = data.draw(st.sampled_from(SAMPLINGS[1:]))
    options: dict[str, Any] = {
        "max_new_tokens": 20, "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "seed": data.draw(st.integers(0, 99)),
    }  # fmt: skip
    alone = tokens_of(decoder.generate(prompts, mode="ar", **options))
    for batch in (data.draw(st.integers(1, 4)), 5):
        assert tokens_of(decoder.generate(prompts, mode="sd", batch=batch, **options)) == alone


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_many_requests_at_once(small_target, family) -> None:  # type: ignore[no-untyped-def]
    """Wide caches show whole rows; requests of other lengths come and go."""
    decoder = decoder_for(small_target(family), draft_tokens=3)
    draw = random.Random(1)
    prompts = [[draw.randrange(62) for _ in range(draw.randrange(1, 30))] for _ in range(40)]
    alone = decoder.generate(prompts, mode="ar", max_new_tokens=12, batch=1)
    for batch in (16, 21):
        assert tokens_of(decoder.generate(prompts, mode="sd", max_new_tokens=12, batch=batch)) == tokens_of(alone)
    switch = {"mode": "switchsd", "gate": "match", "neural": "draft", "batch": 21}  # some of them are asked about
    assert tokens_of(decoder.generate(prompts, max_new_tokens=12, **switch)) == tokens_of(alone)


def run(target: Target, settings: ModeSettings, mode: str, requests: Sequence[Request], rows: int) -> Engine:
    """All requests to their ends, without a decoder."""
    parts = Parts(target, settings, neural={"draft": DraftModelDrafter(target, draft_of(target, 0.02))})
    engine = Engine(target, get_mode(mode).build(parts), rows)
    list(SequentialScheduler(engine).run(requests, lambda c: len(c.request.sources) >= c.request.max_new_tokens))
    engine.close()
    return engine


@pytest.mark.parametrize("family", [name for name in ALL if name not in ("falcon old sequential", "stablelm parallel")])
def test_in_every_family_requests_of_different_samplings_share_steps(family: str) -> None:
    target = family_target(family)
    draw = random.Random(2)
    prompts = [[draw.randrange(90) for _ in range(n)] for n in (3, 30, 11, 7, 19)]

    def requests() -> list[Request]:
        return [Request(i, p, 14 + i, SAMPLINGS[i % 4]) for i, p in enumerate(prompts)]

    alone, drafted = requests(), requests()
    run(target, ModeSettings(), "ar", alone, 1)
    engine = run(target, ModeSettings(draft_tokens=4), "sd", drafted, 4)
    for one, other in zip(alone, drafted, strict=True):
        wanted = len(one.prompt) + one.max_new_tokens
        assert other.tokens[:wanted] == one.tokens[:wanted]
    assert any(record.accepted for record in engine.trace)
    assert {record.rows for record in engine.trace} > {4}


def test_stops_cut_where_they_should(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    decoder = decoder_for(target)
    prompts = [[i, 5, 9, 12, 3] for i in range(5)]
    whole = decoder.generate(prompts, mode="ar", max_new_tokens=30)
    stops = [target.decode(g.tokens[4:6]) for g in whole if len(g.tokens) > 6]
    for options in ({"stop": stops}, {"stop": stops, "temperature": 0.8}, {"max_new_tokens": 7}):
        alone = decoder.generate(prompts, mode="ar", **{"max_new_tokens": 30, **options})  # type: ignore[arg-type]
        made = decoder.generate(prompts, mode="sd", batch=3, **{"max_new_tokens": 30, **options})  # type: ignore[arg-type]
        assert [(g.text, g.tokens, g.stopped) for g in made] == [(g.text, g.tokens, g.stopped) for g in alone]


# -- what it is worth -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("acceptance", ["keyed", "rejection"])
def test_the_target_as_its_own_draft_is_always_right(small_target, temperature, acceptance) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    model: Any = Counted(target)
    settings = ModeSettings(draft_tokens=4, neural_tree="fixed", acceptance=acceptance)
    decoder = Decoder(target, neural=DraftModelDrafter(target, model), settings=settings)
    made = decoder.generate([3, 9, 12, 5], mode="sd", max_new_tokens=31, temperature=temperature)
    assert len(made.tokens) == 31 and made.steps == 6
    assert made.sources == ["target", *["draft"] * 4 * 1, "target"] + (["draft"] * 4 + ["target"]) * 5
    # the prompt and the pending token, then two tokens a step: the last draft and the target's own
    assert [n for _, n in model.calls if n > 1] == [5, *[2] * 5]
    assert len(model.calls) == 6 * 4


def test_a_good_draft_saves_steps_and_a_bad_one_costs_none(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("qwen3")
    prompts = [[i, 7, 7, 30, 2] for i in range(4)]
    steps = {}
    for noise in (0.01, 0.05, 0.5):
        decoder = decoder_for(target, noise, neural_tree="fixed")
        made = decoder.generate(prompts, mode="sd", max_new_tokens=30, temperature=0.5)
        steps[noise] = sum(g.steps for g in made)
        assert all(r.drafters == ("draft",) for r in decoder.trace if r.reason != "no room")
    assert steps[0.01] < 0.5 * steps[0.5] and steps[0.01] < steps[0.05] < steps[0.5]
    assert steps[0.5] <= sum(len(g.tokens) - 1 for g in made)


def test_keyed_draws_agree_more_often_than_independent_ones(small_target) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_for(small_target("llama"), 0.02, neural_tree="fixed")
    prompts = [[i, 7, 7, 30, 2] for i in range(20)]
    keyed = decoder.generate(prompts, mode="sd", max_new_tokens=30, temperature=1.5)
    own = decoder.neural["draft"].drawing("own")  # type: ignore[attr-defined]
    blind = Decoder(decoder.target, neural=own, settings=decoder.settings)
    other = blind.generate(prompts, mode="sd", max_new_tokens=30, temperature=1.5)
    assert tokens_of(other) == tokens_of(keyed)
    assert sum(g.steps for g in keyed) < 0.8 * sum(g.steps for g in other)


# -- rejection --------------------------------------------------------------------------------------


def test_rejection_is_the_targets_text_where_it_is_greedy_and_another_one_where_not(small_target) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_for(small_target("llama"), acceptance="rejection")
    prompts = [[i, 7, 7, 30, 2] for i in range(5)]
    greedily: dict[str, Any] = {"mode": "sd", "max_new_tokens": 20, "batch": 3}
    alone = decoder.generate(prompts, mode="ar", max_new_tokens=20)
    assert tokens_of(decoder.generate(prompts, **greedily)) == tokens_of(alone)
    sampled = {**greedily, "temperature": 1.0, "top_p": 0.9, "seed": 4}
    made = decoder.generate(prompts, **sampled)
    for batch in (1, 2, 5):
        assert tokens_of(decoder.generate(prompts, **{**sampled, "batch": batch})) == tokens_of(made)
    alone = decoder.generate(prompts, **{**sampled, "mode": "ar"})
    assert tokens_of(alone) != tokens_of(made)
    assert any("draft" in g.sources for g in made)
    assert decoder.describe("sd")["acceptance"] == "rejection" and decoder.describe("sd")["lossless"]
    assert decoder.describe("sd")["drafters"][0]["draw"] == "own"
    assert "acceptance" not in decoder.describe("ar")


@pytest.mark.slow
def test_three_tokens_have_the_targets_joint_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole step loop, with chains whose length depends on the draft model's laws."""
    import test_modes_law

    n = 2500
    monkeypatch.setattr(test_modes_law, "N", n)
    settings = ModeSettings(draft_tokens=3, acceptance="rejection", neural_tree="priced")
    drafter = DraftModelDrafter(TARGET, draft_of(TARGET, 0.2))
    dear = CostTable({}, [1, 4], [64], [[10.0, 19.0]], {"draft": [1.0, 2.0]}, 0.0, 0.0)  # a node costs 0.3 tokens
    decoder = Decoder(TARGET, neural=drafter, settings=settings, costs=dear)
    made = decoder.generate([PROMPT] * n, mode="sd", max_new_tokens=4, temperature=1.0, seed=7, batch=256)
    assert len({len(r.tokens) for r in decoder.trace} - {0}) > 1
    kept = [len(r.accepted) / len(r.tokens) for r in decoder.trace if r.tokens]
    assert 0.2 < sum(kept) / len(kept) < 0.95
    found = torch.tensor([g.tokens[:3] for g in made])
    counts = torch.bincount(found[:, 0] * 64 + found[:, 1] * 8 + found[:, 2], minlength=512)
    assert p_value(counts) > 1e-3


# -- the switch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["match", "probe", "bandit", "always", "never", "auto"])
def test_the_switch_drafts_with_the_model(small_target, gate) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_for(small_target("qwen3"), gate=gate, neural="draft")
    draw = random.Random(0)
    prompts = [[i, *[draw.randrange(63) for _ in range(6)] * 3] for i in range(6)]
    for options in ({}, {"temperature": 0.8, "seed": 2}):
        alone = decoder.generate(prompts, mode="ar", max_new_tokens=40, **options)
        made = decoder.generate(prompts, mode="switchsd", max_new_tokens=40, batch=3, **options)
        assert tokens_of(made) == tokens_of(alone)
        wanted = {"never": {"target"}, "always": {"target", "draft"}}.get(gate, {"target", "draft", "copy"})
        assert {s for g in made for s in g.sources} == wanted or options
        assert not held(decoder)
    assert decoder.describe("switchsd")["gate"] == {
        "match": "MatchLengthGate", "bandit": "BanditGate", "always": "Always", "never": "Never",
    }.get(gate, "ProbeGate")  # fmt: skip


class Heads:
    """A length head that knows some drafters."""

    def __init__(self, *names: str) -> None:
        self.names, self.config, self.digest = names, SimpleNamespace(kappa=2, sites=()), "x"

    def knows(self, name: str) -> bool:
        return name in self.names

    def joint(self, name: str) -> list[Any]:
        return []


def test_the_cost_gate_needs_a_length_head_that_knows_the_model(small_target) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_for(small_target("llama"), neural="draft")

    def gate(lengths: Any, **options: Any) -> str:
        one = Decoder(decoder.target, decoder.probe, decoder.neural, decoder.settings, COSTS, lengths)
        return type(one.call(mode="switchsd", **options).plan.gate).__name__

    assert gate(Heads("copy", "eagle")) == "ProbeGate"
    assert gate(Heads("copy", "draft")) == gate(Heads("copy", "draft"), gate="cost") == "LengthGate"
    assert gate(Heads("copy", "eagle"), neural="none") == "LengthGate"
    with pytest.raises(DecodingError, match="knows no draft model: use gate=probe"):
        gate(Heads("copy", "eagle"), gate="cost")


def test_the_cost_gate_drafts_with_the_model(small_target) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    from test_length_gate import head

    made = head(0.5, 0.6)
    drafts = {{"eagle": "draft"}.get(k, k): v for k, v in made.config.drafts.items()}
    tensors = {k.replace("eagle", "draft"): v for k, v in made.tensors.items()}
    decoder = decoder_for(small_target("qwen3"), neural="draft", gate="cost")
    for name in drafts:
        tensors[f"{name}.state"] = torch.zeros(1, 32)
    config = replace(made.config, drafts=drafts, kappa=2, sites=("resid_post.1",), width=32)
    lengths = type(made)(config, tensors)
    switch = Decoder(decoder.target, None, decoder.neural, decoder.settings, COSTS, lengths)
    prompts = [[i, *[5, 8, 1, 44] * 4] for i in range(4)]
    alone = switch.generate(prompts, mode="ar", max_new_tokens=40)
    found = switch.generate(prompts, mode="switchsd", max_new_tokens=40)
    assert tokens_of(found) == tokens_of(alone)
    assert {"copy", "draft"} <= {s for g in found for s in g.sources}


# -- drafters by name -------------------------------------------------------------------------------


def test_modes_choose_among_several_drafters_and_make_only_those(small_target) -> None:  # type: ignore[no-untyped-def]
    target, made = small_target("llama"), []

    def eagle() -> EagleDrafter:
        made.append("eagle")
        return EagleDrafter(target, random_head())

    def draft() -> DraftModelDrafter:
        made.append("draft")
        return DraftModelDrafter(target, draft_of(target))

    drafters = Lazy({"eagle": eagle, "draft": draft})
    assert list(drafters) == ["eagle", "draft"] and len(drafters) == 2 and "draft" in drafters
    decoder = Decoder(target, neural=drafters, settings=ModeSettings(gate="match", kappa=2), costs=COSTS)

    def used(**options: Any) -> list[str]:
        return [d.name for d in decoder.call(**options).plan.drafters]

    assert used(mode="ar") == [] and used(mode="copy") == ["copy"] and used(neural="none") == ["copy"] and not made
    assert used(mode="sd") == ["draft"] and made == ["draft"]
    assert used(neural="draft") == ["copy", "draft"] and made == ["draft"]
    assert used(mode="eagle", neural="draft") == ["eagle"] and used() == ["copy", "eagle"]
    assert used(mode="sd", neural="none") == ["draft"]
    assert made == ["draft", "eagle"]
    prompts = [[i, 5, 9, 5, 9] for i in range(3)]
    texts = [tokens_of(decoder.generate(prompts, mode=m, max_new_tokens=12)) for m in ("ar", "eagle", "sd")]
    assert texts[0] == texts[1] == texts[2]


def test_budgets_of_the_draft_model(small_target) -> None:  # type: ignore[no-untyped-def]
    from decoding.budgets import FixedBudget, PricedBudget

    decoder = decoder_for(small_target("llama"), draft_tokens=7)

    def budget(**options: Any) -> Any:
        [(_, found)] = decoder.call(mode="sd", **options).plan.gate.choose(SimpleNamespace()).drafts  # type: ignore[arg-type]
        return found

    assert budget(neural_tree="fixed") == FixedBudget(7, 7)
    assert budget() == PricedBudget.of(COSTS, "draft", 7, 7)
    assert budget(draft_tokens=2).depth == 2


# -- faults, chats, benchmarks ----------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("mode", ["sd", "switchsd"])
def test_a_draft_model_that_fails(small_target, mode, after, caplog) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    model: Any = Counted(draft_of(target))
    hidden, calls = model.hidden, iter(range(10**6))

    def failing(*arguments: Any) -> torch.Tensor:
        if next(calls) >= after:
            raise RuntimeError("out of luck")
        found: torch.Tensor = hidden(*arguments)
        return found

    model.hidden = failing
    settings = ModeSettings(gate="match", neural="draft", neural_tree="fixed", kappa=2)
    decoder = Decoder(target, neural=DraftModelDrafter(target, model), settings=settings)
    prompts = [[i, 5, 9, 12, 3] for i in range(4)]
    with caplog.at_level(logging.WARNING, "switchsd"):
        found = decoder.generate(prompts, mode=mode, max_new_tokens=20, batch=2)
    assert tokens_of(found) == tokens_of(decoder.generate(prompts, mode="ar", max_new_tokens=20))
    [told] = [r.message for r in caplog.records]
    assert "draft" in told and "out of luck" in told
    assert not held(decoder)


def test_a_draft_model_of_shorter_texts_stops_drafting(small_target) -> None:  # type: ignore[no-untyped-def]
    import copy

    target = small_target("llama")
    model = copy.copy(draft_of(target, 0.01))
    model.config = copy.deepcopy(model.config)
    model.config.max_position_embeddings = 20
    decoder = Decoder(target, neural=DraftModelDrafter(target, model), settings=ModeSettings(neural_tree="fixed"))
    prompt = [3, 5, 9, 12, 3]
    found = decoder.generate(prompt, mode="sd", max_new_tokens=40)
    assert found.tokens == decoder.generate(prompt, mode="ar", max_new_tokens=40).tokens
    last = max(i for i, source in enumerate(found.sources) if source == "draft")
    assert 10 < last + len(prompt) <= 20


def test_a_chat_reuses_what_the_draft_model_has_read(small_target) -> None:  # type: ignore[no-untyped-def]
    import copy

    from test_chat import TEMPLATE

    target = copy.copy(small_target("llama"))
    target.tokenizer = copy.deepcopy(target.tokenizer)
    target.tokenizer.chat_template = TEMPLATE.replace("<", ";").replace(">", "=")
    target.__dict__.pop("chat_template", None)
    model: Any = Counted(draft_of(small_target("llama")))
    decoder = Decoder(target, neural=DraftModelDrafter(target, model), settings=ModeSettings(neural_tree="fixed"))
    options: dict[str, Any] = {"mode": "sd", "max_new_tokens": 12}
    with Chat(decoder, "ABC", **options) as chat:
        for turn in ("HELLO", "AGAIN", "AND MORE"):
            model.calls.clear()
            answer = chat.send(turn.replace(" ", ""))
            assert answer.tokens == Decoder(target).generate(chat.messages[:-1], mode="ar", max_new_tokens=12).tokens
            fed = model.calls[0][1]
            assert fed <= chat.prompt_tokens + 1 - chat.reused + 12
            assert turn == "HELLO" or fed < 0.7 * chat.prompt_tokens
    assert not held(decoder)


def test_a_benchmark_compares_them(small_target, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from test_bench import suite

    from decoding.bench import Bench, BenchConfig, unequal

    target = small_target("llama")
    drafters = {"eagle": EagleDrafter(target, random_head()), "draft": DraftModelDrafter(target, draft_of(target))}
    chosen = ModeSettings(gate="match", kappa=2, neural_tree="fixed")
    decoder = Decoder(target, neural=drafters, settings=chosen)
    modes = (
        "ar", "eagle", "sd", "sd/draft_tokens=2", "switchsd/neural=draft", "switchsd/neural=eagle",
        "ar/temperature=0.9", "sd/temperature=0.9", "sd/temperature=0.9/acceptance=rejection",
    )  # fmt: skip
    run = Bench(decoder, suite(2), BenchConfig(modes=modes, baselines=(), max_new_tokens=24), tmp_path)
    rows = list(run.run())
    assert len(rows) == 2 * len(modes) and len(set(run.hashes.values())) == len(modes)
    result = run.result()
    assert unequal(result) == []
    equality = result["equality"]["modes"]
    assert (
        equality["sd/temperature=0.9"]["judged"] and not equality["sd/temperature=0.9/acceptance=rejection"]["judged"]
    )
    assert any(r.drafts.get("draft") for r in rows if r.mode == "switchsd/neural=draft")
    again = Bench(Decoder(target, neural=drafters, settings=chosen), suite(2), run.config, tmp_path)
    assert again.done == again.total
