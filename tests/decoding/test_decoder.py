"""Every mode writes the target's own text: against transformers' greedy generate, and against `ar` when sampling."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activations.sampling import Sampling
from activations.target import Target, TargetError
from decoding.budgets import Budget
from decoding.decoder import Decoder, Event, Generation
from decoding.modes import MODES, DecodingError, ModeSettings
from decoding.request import Request
from decoding.tree import DraftTree
from probes.artifact import Probe, ProbeConfig

FAMILIES = ["llama", "qwen3", "gemma3"]
MODE_NAMES = ["ar", "copy", "eagle", "switchsd"]


class HalfRight:
    """Proposes random trees around a text that it is told, right about half the time. Checks the protocol, too."""

    name = "eagle"
    sites = ("resid_pre.1", "resid_post.3")

    def __init__(self, truth: dict[tuple[int, ...], list[int]], width: int, seed: int = 0) -> None:
        self.truth, self.width, self.random = truth, width, random.Random(seed)
        self.seen: dict[Request, int] = {}
        self.states: dict[Request, list[torch.Tensor]] = {}

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        assert request not in self.seen and len(request.tokens) == len(request.prompt) + 1
        self.seen[request], self.states[request] = 0, []
        self.observe(request, features)

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        assert features is not None
        assert features.shape == (len(request.tokens) - 1 - self.seen[request], 2 * self.width)
        self.seen[request] = len(request.tokens) - 1
        self.states[request].append(features)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._tree(r, b.nodes) for r, b in zip(requests, budgets, strict=True)]

    def _tree(self, request: Request, most: int) -> DraftTree | None:
        draw = self.random
        right = self.truth[tuple(request.prompt)][len(request.tokens) - len(request.prompt) :]
        n = draw.randint(0, most)
        if n == 0 and draw.random() < 0.5:
            return None
        parents, tokens = [], []
        good = [-1]  # the true path so far
        for i in range(n):
            extend = draw.random() < 0.6 and len(good) - 1 < len(right)
            if extend:
                parents.append(good[-1])
                tokens.append(right[len(good) - 1])
                good.append(i)
            else:
                parents.append(draw.randint(-1, i - 1))
                tokens.append(draw.randrange(64))
        return DraftTree(tokens, parents, [self.name] * n, [0.0] * n)

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        raise AssertionError("no mode of this test resamples rows")

    def close(self, request: Request) -> None:
        self.seen.pop(request, None)


class Coin:
    """A probe whose output is an arbitrary function of the state, on both sides of the threshold."""

    config = SimpleNamespace(sites=("resid_mid.2",), threshold=0.5, kappa=5, to_dict=lambda: {"site": "resid_mid.2"})

    def __init__(self) -> None:
        self.scored: list[torch.Tensor] = []

    def score(self, state: torch.Tensor) -> torch.Tensor:
        self.scored.append(state)
        return torch.sigmoid(state.sum(-1) * 3)


def greedy(model: Any, prompt: list[int], n: int) -> list[int]:
    """transformers' own greedy text, the stop token included."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=n, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def hooks(target: Target) -> int:
    """How many hooks there are; transformers leaves some of its own on a model that was asked for hidden states."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.model.modules())


def prompts_of(data: st.DataObject, count: int) -> list[list[int]]:
    """Prompts that repeat themselves, so that there is something to copy; all different."""
    out = []
    for i in range(count):
        phrase = data.draw(st.lists(st.integers(0, 62), min_size=3, max_size=9))
        out.append([i, *phrase * data.draw(st.integers(1, 3))])
    return out


def decoder_for(target: Target, truth: dict[tuple[int, ...], list[int]], seed: int = 0, **options: Any) -> Decoder:
    settings = ModeSettings(
        **{
            "kappa": 2,
            "candidates": 3,
            "depth": 6,
            "copy_nodes": 8,
            "neural_nodes": 7,
            "neural_tree": "fixed",
            **options,
        }
    )
    return Decoder(target, probe=Coin(), neural=HalfRight(truth, target.width, seed), settings=settings)


RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, **RELAXED)
@given(data=st.data())
def test_every_mode_writes_what_transformers_writes(family, small_target, reference_model, data) -> None:  # type: ignore[no-untyped-def]
    target, model = small_target(family), reference_model(family)
    prompts = prompts_of(data, data.draw(st.integers(1, 4)))
    n = data.draw(st.integers(1, 24))
    truth = {tuple(p): greedy(model, p, n) for p in prompts}
    decoder = decoder_for(target, truth, data.draw(st.integers(0, 99)))
    batch = data.draw(st.integers(1, 3))
    for mode in MODE_NAMES:
        for prompt, generation in zip(
            prompts, decoder.generate(prompts, mode=mode, max_new_tokens=n, batch=batch), strict=True
        ):
            assert generation.tokens == truth[tuple(prompt)], mode
            assert len(generation.sources) == len(generation.tokens)
            assert generation.stopped == (generation.tokens[-1] == 63)
            wanted = generation.tokens[:-1] if generation.stopped else generation.tokens
            assert generation.text == target.decode(wanted)
        assert not decoder.neural["eagle"].seen, "a drafter still holds a request"  # type: ignore[union-attr]


@pytest.mark.parametrize("gate", ["probe", "match", "bandit"])
def test_drafts_are_accepted_and_recorded(gate, small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    """What makes the tests of exactness worth anything: all drafters take part, and are followed."""
    from decoding.costs import CostTable

    target, model = small_target("qwen3"), reference_model("qwen3")
    generator = random.Random(0)
    prompts = [[i, *[generator.randrange(63) for _ in range(6)] * 3] for i in range(8)]
    truth = {tuple(p): greedy(model, p, 40) for p in prompts}
    decoder = decoder_for(target, truth, gate=gate)
    decoder._costs = CostTable({}, [1, 8], [64, 128], [[10.0, 10.1], [10.0, 10.1]], {"eagle": [0.1, 0.2]}, 0.0, 0.0)
    generations = decoder.generate(prompts, mode="switchsd", max_new_tokens=40)
    assert {s for g in generations for s in g.sources} == {"target", "copy", "eagle"}
    assert sum(g.steps for g in generations) == len(decoder.trace)
    assert any(0 < g.copy_share < 1 for g in generations)
    assert all(g.tokens_per_step == pytest.approx((len(g.tokens) - 1) / g.steps) for g in generations if g.steps)
    for number, generation in enumerate(generations):
        records = [r for r in decoder.trace if r.request == number]
        assert [r.step for r in records] == list(range(len(records)))
        tokens, sources = generation.tokens[:1], ["target"]
        for record in records:
            assert record.position == len(prompts[number]) + len(tokens) - 1
            tokens += [record.tokens[i] for i in record.accepted] + [record.pending]
            sources += [record.source[i] for i in record.accepted] + ["target"]
        assert tokens[: len(generation.tokens)] == generation.tokens
        assert sources[: len(generation.sources)] == generation.sources


def test_features_are_the_states_of_the_verified_positions(small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    """A drafter gets, once each and in order, the states that a plain forward of the text has."""
    from activations.cache import KVCache

    target, model = small_target("llama"), reference_model("llama")
    prompts = [[1, 5, 9, 5, 9, 5], [2, 7, 7, 8]]
    truth = {tuple(p): greedy(model, p, 20) for p in prompts}
    decoder = decoder_for(target, truth)
    generations = decoder.generate(prompts, mode="switchsd", max_new_tokens=20)
    drafter = decoder.neural["eagle"]
    assert isinstance(drafter, HalfRight)
    for request, parts in drafter.states.items():
        text = [*request.prompt, *generations[request.number].tokens]
        features = torch.cat(parts)[: len(text)]
        with target.read(drafter.sites) as reader:
            target.forward(torch.tensor([text[: len(features)]]), KVCache(1))
            whole = torch.cat([reader.states[s][0] for s in target.sites(drafter.sites)], -1)
        assert torch.allclose(features, whole, atol=1e-4)


def test_intent_is_read_at_the_anchor(small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    """The recorded intent of a step is the probe's output at the position before the pending token."""
    from activations.cache import KVCache

    target, model = small_target("llama"), reference_model("llama")
    prompts = [[1, 5, 9, 5, 9, 5], [2, 7, 7, 8, 3, 7, 7, 8, 3]]
    truth = {tuple(p): greedy(model, p, 20) for p in prompts}
    decoder = decoder_for(target, truth)
    generations = decoder.generate(prompts, mode="switchsd", max_new_tokens=20)
    for number, generation in enumerate(generations):
        with target.read(Coin.config.sites) as reader:
            target.forward(torch.tensor([[*prompts[number], *generation.tokens]]), KVCache(1))
            [states] = reader.states.values()
        for record in (r for r in decoder.trace if r.request == number):
            assert record.intent == pytest.approx(float(Coin().score(states[0, record.position - 1])), abs=1e-4)


def test_an_mlp_reads_several_sites_side_by_side(small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    """The recorded intent is the artifact's score of the sites' states at the anchor, in the order of its config."""
    from activations.cache import KVCache

    target, model = small_target("llama"), reference_model("llama")
    draw = torch.Generator().manual_seed(0)
    sites = ("resid_post.3", "embed", "resid_mid.1")  # not in the order of the forward
    config = ProbeConfig(
        "+".join(sites), target.width, "follow", {"match": 2}, 0.5, "none", target.fingerprint, "small", "00", {}, {},
        {}, kind="mlp",
    )  # fmt: skip
    matrix = torch.randn(5, 3 * target.width, generator=draw)
    probe = Probe(config, torch.randn(5, generator=draw), hidden=[(matrix, torch.randn(5, generator=draw))])
    prompts = [[1, 5, 9, 5, 9, 5], [2, 7, 7, 8, 3, 7, 7, 8, 3]]
    decoder = Decoder(target, probe=probe, settings=ModeSettings(kappa=2, copy_nodes=4))
    generations = decoder.generate(prompts, mode="switchsd", max_new_tokens=20)
    intents = []
    for number, generation in enumerate(generations):
        assert generation.tokens == greedy(model, prompts[number], 20)
        with target.read(sites) as reader:
            target.forward(torch.tensor([[*prompts[number], *generation.tokens]]), KVCache(1))
            whole = torch.cat([reader.states[s][0] for s in target.sites(sites)], dim=-1)
        for record in (r for r in decoder.trace if r.request == number):
            assert record.intent == pytest.approx(float(probe.score(whole[record.position - 1])), abs=1e-4)
            intents.append(record.intent)
    assert max(intents) - min(intents) > 0.1


# -- sampling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}])
@settings(max_examples=6, **RELAXED)
@given(data=st.data())
def test_every_mode_samples_the_same_text(options, small_target, reference_model, data) -> None:  # type: ignore[no-untyped-def]
    """Against a loop over transformers' own forward of the whole text."""
    target, model = small_target("qwen3"), reference_model("qwen3")
    prompts, seed = prompts_of(data, 3), data.draw(st.integers(0, 10**6))
    sampling = Sampling(seed=seed, **options)
    truth = {}
    for number, prompt in enumerate(prompts):
        text = list(prompt)
        while len(text) < len(prompt) + 12 and 63 not in text[len(prompt) :]:
            with torch.no_grad():
                logits = model(torch.tensor([text]), use_cache=False).logits[:, -1]
            text += sampling.next_tokens(logits, torch.tensor([number]), torch.tensor([len(text)])).tolist()
        truth[tuple(prompt)] = text[len(prompt) :]
    decoder = decoder_for(target, truth)
    for mode in MODE_NAMES:
        for batch in (1, 3):
            got = decoder.generate(prompts, mode=mode, max_new_tokens=12, seed=seed, batch=batch, **options)
            assert [g.tokens for g in got] == [truth[tuple(p)] for p in prompts], (mode, batch)


# -- ends -------------------------------------------------------------------------------------------


@settings(max_examples=30, **RELAXED)
@given(data=st.data())
def test_stop_strings_cut_exactly_and_are_never_shown(small_target, reference_model, data) -> None:  # type: ignore[no-untyped-def]
    target, model = small_target("llama"), reference_model("llama")
    prompt = prompts_of(data, 1)[0]
    truth = greedy(model, prompt, 24)
    text = target.decode([t for t in truth if t != 63])
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stops = [text[start : start + data.draw(st.integers(1, 4))] or "zz", "never this"]
    ends = [text.find(s) for s in stops if s in text]
    wanted = text[: min(ends)] if ends else text
    decoder = decoder_for(target, {tuple(prompt): truth})
    for mode in MODE_NAMES:
        events = list(decoder.stream(prompt, mode=mode, max_new_tokens=24, stop=stops))
        done = events[-1].done
        assert done is not None and [e.done for e in events[:-1]] == [None] * (len(events) - 1)
        assert done.text == "".join(e.text for e in events) == wanted, mode
        assert done.tokens == [t for e in events for t in e.tokens] == truth[: len(done.tokens)]
        if ends:
            # the last token is the one that completed a stop string
            assert done.stopped
            whole = target.decode(done.tokens)
            assert any(whole.endswith(s) or s in whole for s in stops)
            assert not any(s in target.decode(done.tokens[:-1]) for s in stops)


def test_events_hold_runs_of_one_source(small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    target, model = small_target("llama"), reference_model("llama")
    prompt = [3, 9, 12, 3, 9, 12, 3]
    truth = greedy(model, prompt, 30)
    decoder = decoder_for(target, {tuple(prompt): truth})
    events: list[Event] = list(decoder.stream(prompt, mode="switchsd", max_new_tokens=30))
    done = events[-1].done
    assert done is not None
    assert [(t, e.source) for e in events for t in e.tokens] == list(zip(done.tokens, done.sources, strict=True))


def test_the_targets_length_is_a_limit(small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    prompt = list(range(60)) * 4 + list(range(8))
    limit = target.max_length
    model = reference_model("llama")
    truth = greedy(model, prompt, limit - len(prompt))
    decoder = decoder_for(target, {tuple(prompt): truth})
    for mode in MODE_NAMES:
        assert decoder.generate(prompt, mode=mode, max_new_tokens=100).tokens == truth


def test_interruption_returns_what_there_is(small_target, reference_model, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target, model = small_target("llama"), reference_model("llama")
    prompts = [[i, 5, 6, 7, 5, 6, 7] for i in range(3)]
    truth = {tuple(p): greedy(model, p, 30) for p in prompts}
    decoder = decoder_for(target, truth)
    calls = 0
    forward = target.forward
    before = hooks(target)

    def interrupted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", interrupted)
    out: list[Generation] = decoder.generate(prompts, mode="ar", max_new_tokens=30, batch=2)
    assert [g.interrupted for g in out] == [True] * 3
    assert [len(g.tokens) for g in out] == [6, 6, 0]  # two prefills, five steps
    assert [g.tokens == truth[tuple(p)][: len(g.tokens)] for g, p in zip(out, prompts, strict=True)] == [True] * 3
    assert out[0].text == target.decode(out[0].tokens)
    assert hooks(target) == before, "hooks were left behind"


def test_no_hooks_stay_behind_when_a_stream_is_dropped(small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    target, model = small_target("llama"), reference_model("llama")
    prompt = [4, 5, 6, 4, 5, 6]
    decoder = decoder_for(target, {tuple(prompt): greedy(model, prompt, 30)})
    before = hooks(target)
    stream = decoder.stream(prompt, mode="switchsd", max_new_tokens=30)
    next(iter(stream))
    assert hooks(target) > before
    stream.close()  # type: ignore[attr-defined]
    assert hooks(target) == before


# -- usage ------------------------------------------------------------------------------------------


def test_forms_of_prompts(small_target) -> None:  # type: ignore[no-untyped-def]
    decoder = Decoder(small_target("llama"))
    text, ids = "ABCABC", [17, 18, 19, 17, 18, 19]
    single = decoder.generate(text, mode="ar", max_new_tokens=4)
    assert isinstance(single, Generation) and single.prompt_tokens == 6
    assert decoder.generate(ids, mode="ar", max_new_tokens=4).tokens == single.tokens
    several = decoder.generate([text, ids, text], mode="ar", max_new_tokens=4)
    assert [g.tokens for g in several] == [single.tokens] * 3
    with pytest.raises(TargetError, match="no chat template"):
        decoder.generate([{"role": "user", "content": "A"}], mode="ar")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, "unknown mode 'fast': use ar, copy, eagle, ltd, sd, minedraft, cospec, smcsd, switchsd"),
        ({"mode": "eagle"}, "needs an EAGLE head for small-llama"),
        ({"mode": "switchsd"}, "needs a probe for small-llama"),
        ({"mode": "switchsd", "neural": "draft"}, "'draft' needs a draft model for small-llama"),
        ({"mode": "sd"}, "mode 'sd' needs a draft model for small-llama"),
        ({"mode": "switchsd", "gate": "always"}, "has none in use"),
        ({"mode": "sd", "draft_tokens": 0}, "draft_tokens is 0"),
        ({"mode": "sd", "acceptance": "luck"}, "unknown acceptance 'luck': use keyed or rejection"),
        ({"mode": "copy", "acceptance": "rejection"}, "is not for mode 'copy': copied drafts are certain"),
        ({"mode": "eagle", "acceptance": "rejection"}, "is not for mode 'eagle'"),
        ({"mode": "switchsd", "acceptance": "rejection"}, "is not for mode 'switchsd'"),
        ({"mode": "ar", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"mode": "ar", "batch": 0}, "batch is 0"),
        ({"mode": "ar", "stop": ["a", ""]}, "stop string is empty"),
        ({"mode": "ar", "temperature": -1}, "temperature is -1"),
        ({"mode": "copy", "kappa": 0}, "kappa is 0"),
        ({"mode": "copy", "gate": "maybe"}, "unknown gate 'maybe'"),
        ({"mode": "copy", "kapa": 3}, "kapa"),
    ],
)
def test_bad_usage_is_told_at_the_call(small_target, options, words) -> None:  # type: ignore[no-untyped-def]
    decoder = Decoder(small_target("llama"))
    with pytest.raises(DecodingError, match=words):
        decoder.stream("ABC", **options)


def test_without_a_neural_side_the_switch_still_copies(small_target) -> None:  # type: ignore[no-untyped-def]
    decoder = Decoder(small_target("llama"), probe=Coin(), settings=ModeSettings(kappa=2, tau=0.0))
    prompt = [3, 9, 12, 3, 9, 12, 3]
    plain = decoder.generate(prompt, mode="ar", max_new_tokens=40)
    switched = decoder.generate(prompt, mode="switchsd", max_new_tokens=40)
    assert switched.tokens == plain.tokens
    assert set(switched.sources) == {"target", "copy"}


def test_describe_is_json_and_names_the_parts(small_target) -> None:  # type: ignore[no-untyped-def]
    import json

    decoder = decoder_for(small_target("llama"), {})
    found = json.loads(json.dumps(decoder.describe("switchsd")))
    assert [d["name"] for d in found["drafters"]] == ["copy", "eagle"]
    assert found["gate"] == "ProbeGate" and found["lossless"] is True
    assert {mode.name for mode in MODES.values() if not mode.lossless} == {"smcsd", "cospec"}


@pytest.mark.parametrize("mode", MODE_NAMES)
def test_threads_share_a_decoder(mode: str, small_target, reference_model) -> None:  # type: ignore[no-untyped-def]
    target, model = small_target("llama"), reference_model("llama")
    prompts = [[i, *[3, 1, 4, 1, 5] * 2] for i in range(6)]
    truth = {tuple(p): greedy(model, p, 20) for p in prompts}
    decoder = decoder_for(target, truth)

    def write(part: list[list[int]]) -> list[list[int]]:
        return [g.tokens for g in decoder.generate(part, mode=mode, max_new_tokens=20, batch=2)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(write, [prompts[0:2], prompts[2:4], prompts[4:6]]))
    assert [tokens for part in found for tokens in part] == [truth[tuple(p)] for p in prompts]
