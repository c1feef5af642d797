"""The environments of Learning to Draft: over logs and live, seeded, with the rewards that they say."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ltd_texts import COSTS, made_text
from test_eagle_head import random_head

from activations.target import Target
from decoding.budgets import FixedBudget, Growth
from decoding.decoder import Decoder
from decoding.eagle.drafter import EagleDrafter
from decoding.engine import Engine
from decoding.gates import Always, Choice
from decoding.ltd.observations import Observer
from decoding.ltd.outcomes import Clock, Outcomes
from decoding.ltd.rewards import PATIENCE, REWARDS, Reward, Step
from decoding.modes import Plan
from decoding.policies.policy import PolicyError
from decoding.replay_log import log_text

gymnasium = pytest.importorskip("gymnasium")
from gymnasium.utils.env_checker import check_env  # noqa: E402

from decoding.ltd.environments import DepthEnv, LiveSource, RandomDepth, ReplaySource, SizeEnv  # noqa: E402

SITES = ("resid_pre.1", "resid_pre.2", "resid_pre.3")
OBSERVER = Observer("history", 2, 3)
SIZES = (1, 2, 4, 7)
TYPICAL = Step(2, 25.0)
PROMPTS = [[1, 5, 9, 5, 9, 5], [30, 31, 32], [7, 7, 8, 9]]


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes.of([made_text(i, vocabulary=3) for i in range(5)])


def replayed(outcomes: Outcomes, texts: tuple[int, ...] = (0, 1, 2), depth: int | None = None) -> ReplaySource:
    return ReplaySource(outcomes, Clock.of(COSTS, "eagle", outcomes, 0.5), texts, (2, 3), depth)


@pytest.fixture
def live(small_target: Callable[..., Target]) -> Iterator[LiveSource]:
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), top_k=2, sites=SITES)
    engine = Engine(target, Plan(Always(Choice("eagle", FixedBudget(4, 2))), (drafter,)))
    yield LiveSource(engine, drafter, PROMPTS, depth=3, max_new_tokens=30)
    engine.close()


def run(source: Any, trees: list[tuple[int, int]]) -> list[tuple[int, float]]:
    """Steps of trees (depth, size): their tokens, and the pace that was told before."""
    out = []
    for depth, size in trees:
        growth = source.begin()
        for _ in range(depth - 1):
            if source.grows:
                growth = source.deepen()
        whole = source.whole()
        assert whole.depth == growth.depth and whole.pace == growth.pace
        out.append((source.finish(size).tokens, whole.pace))
    return out


# -- sources --------------------------------------------------------------------------------------------


def test_a_replay_walks_its_texts_and_no_others(outcomes: Outcomes) -> None:
    source = replayed(outcomes, (1, 3))
    seen = set()
    source.restart(np.random.default_rng(5))
    for _ in range(200):
        source.begin()
        seen.add(outcomes.text_of(source._at))
        source.whole()
        before = source._at
        step = source.finish(3)
        accepted = int(outcomes.accepted([3])[before, 0, 0])
        assert step.tokens == min(accepted + 1, int(outcomes.ahead[before])) and source._at == before + step.tokens
        assert source.reference().tokens == outcomes.tokens([3])[before, 1, 0]
        assert step.milliseconds == pytest.approx(
            COSTS.draft("eagle", 1) + COSTS.verify(1 + 2, int(outcomes.context[before])) + 0.5
        )
    assert seen == {1, 3}


def test_a_replay_begins_anywhere_with_the_pace_of_what_was_before(outcomes: Outcomes) -> None:
    source = replayed(outcomes, (0, 1, 2, 3, 4))
    places, paces = set(), []
    for seed in range(60):
        source.restart(np.random.default_rng(seed))
        growth = source.begin()
        position = source._at - int(outcomes.starts[outcomes.text_of(source._at)])
        places.add(position)
        assert (growth.pace == 0) == (position == 0)
        paces.append(growth.pace)
    assert len(places) > 20 and max(paces) > 1.5


def test_sources_refuse_what_they_cannot_do(outcomes: Outcomes, live: LiveSource) -> None:
    with pytest.raises(PolicyError, match="no texts to replay"):
        replayed(outcomes, ())
    with pytest.raises(PolicyError, match="3 levels deep: depth 4"):
        replayed(outcomes, depth=4)
    with pytest.raises(PolicyError, match="no prompts"):
        LiveSource(live._engine, live._drafter, [], 3)


def test_live_steps_write_the_targets_own_text(small_target: Callable[..., Target], live: LiveSource) -> None:
    """Whatever the trees, and where a step was begun and left."""
    target = small_target("llama")
    answers = [Decoder(target).generate(p, mode="ar", max_new_tokens=30).tokens for p in PROMPTS]
    rng = np.random.default_rng(0)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        live._prompts, live._order, live._next = [prompt], np.arange(1), 0
        live._leave()
        live.begin()
        request = live._request
        assert request is not None
        while live._request is request:
            live.begin()
            if live.grows:
                live.deepen()
            if request.room > 3:
                live.begin()  # the other one was left: it was finished as it stood
            while live.grows and rng.random() < 0.6:
                live.deepen()
            live.whole()
            step = live.finish(int(rng.integers(1, 8)))
            assert step.tokens >= 1 and step.milliseconds > 0
        assert request.generated == answer[: len(request.generated)] and len(request.generated) >= 29
    assert not live._engine.requests


def test_live_and_replay_are_one(small_target: Callable[..., Target], live: LiveSource) -> None:
    """The same growths, paces and tokens at the same places, levels cut by the last room aside."""
    target, drafter = small_target("llama"), live._drafter
    texts = []
    for i, prompt in enumerate(PROMPTS):
        answer = Decoder(target).generate(prompt, mode="ar", max_new_tokens=30).tokens
        texts.append(
            log_text(target, drafter, [*prompt, *answer], len(prompt), key=f"{i}", source="a", stopped=True, depth=3)
        )
    source = replayed(Outcomes.of(texts), (1,))
    live._prompts, live._limit = [PROMPTS[1]], 60
    rng = np.random.default_rng(1)
    source._order, source._text = np.array([1]), 0
    source._begin_text()
    for _ in range(8):
        one, two = source.begin(), live.begin()
        for _ in range(int(rng.integers(3))):
            assert source.grows and live.grows
            one, two = source.deepen(), live.deepen()
            assert one.scores.shape == two.scores.shape == (4,)
        for a, b in ((one, two), (source.whole(), live.whole())):
            assert torch.allclose(a.scores, b.scores, atol=1e-4)
            assert a[1:4] == b[1:4] and a.pace == pytest.approx(b.pace)
        size = int(rng.integers(1, 6))
        assert source.finish(size).tokens == live.finish(size).tokens


# -- environments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paper", "ranked", "history"])
def test_gymnasium_finds_nothing_to_complain_of(outcomes: Outcomes, kind: str) -> None:
    observer = Observer(kind, 2, 3)
    size = SizeEnv(replayed(outcomes), observer, SIZES, RandomDepth(3, 3), Reward("ratio", TYPICAL))
    depth = DepthEnv(replayed(outcomes), observer, FixedBudget(3, 3), Reward("dinkelbach", TYPICAL))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*(infinity|not have a `spec`|max|min).*")
        for environment in (size, depth):
            check_env(environment, skip_render_check=True)


def test_live_environments_follow_the_protocol(live: LiveSource) -> None:
    size = SizeEnv(live, OBSERVER, SIZES, RandomDepth(3, 3), Reward("ratio", TYPICAL))
    depth = DepthEnv(live, OBSERVER, FixedBudget(3, 3), Reward("ratio", TYPICAL))
    rng = np.random.default_rng(0)
    for environment in (size, depth):
        seen, _ = environment.reset(seed=1)
        ended = 0
        for _ in range(25):
            assert environment.observation_space.contains(seen)
            seen, reward, terminated, truncated, info = environment.step(rng.integers(environment.action_space.n))
            assert not truncated and np.isfinite(reward)
            if terminated:
                ended += 1
                assert reward > 0 and info["metrics"]["tokens"] >= 1  # not centred: nobody knows what else had been
                seen, _ = environment.reset()
        assert ended >= 8


@pytest.mark.parametrize("name", ["size", "depth"])
def test_a_seed_decides_everything(outcomes: Outcomes, name: str) -> None:
    def trail(seed: int) -> list[Any]:
        source, reward = replayed(outcomes), Reward("dinkelbach", TYPICAL)
        environment: Any
        if name == "size":
            environment = SizeEnv(source, OBSERVER, SIZES, RandomDepth(3, 3), reward)
        else:
            environment = DepthEnv(source, OBSERVER, FixedBudget(3, 3), reward)
        out = []
        for _ in range(2):  # what happened before a seeded reset does not matter
            actions = np.random.default_rng(0)
            out = [environment.reset(seed=seed)[0].tolist()]
            for _ in range(30):
                seen, reward_, terminated, _, _ = environment.step(actions.integers(environment.action_space.n))
                out.append([seen.tolist(), reward_, terminated])
                if terminated:
                    out.append(environment.reset()[0].tolist())
        return out

    assert trail(3) == trail(3) != trail(4)


def test_the_text_goes_on_from_episode_to_episode(outcomes: Outcomes) -> None:
    environment = SizeEnv(replayed(outcomes), OBSERVER, SIZES, FixedBudget(3, 2), Reward("ratio", TYPICAL))
    environment.reset(seed=0)
    for _ in range(20):
        before = environment.source._at
        _, _, terminated, _, info = environment.step(np.int64(2))
        assert terminated
        environment.reset()
        after, tokens = environment.source._at, info["metrics"]["tokens"]
        ends = int(outcomes.starts[outcomes.text_of(before) + 1])
        assert after == before + tokens if before + tokens < ends else after in outcomes.starts


def test_the_depth_policy_is_asked_after_each_level_but_the_last(outcomes: Outcomes) -> None:
    reward = Reward("tokens", TYPICAL)
    for every, wanted in ((1, 3), (2, 2), (3, 1)):
        deep = Outcomes.of([made_text(i, depth=4, vocabulary=3) for i in range(3)])
        source = replayed(deep)
        environment = DepthEnv(source, Observer("history", 2, 4), FixedBudget(9, 4), reward, every=every)
        environment.reset(seed=0)
        asked = 1
        while not environment.step(np.int64(1))[2]:
            asked += 1
        assert asked == wanted - (every == 2)  # levels 1 2 3, 2, 3
        assert source._depth == 4
        environment.reset()
        assert source._depth == every
        assert environment.step(np.int64(0))[2] and source._depth == every


def test_both_halves_see_what_decoding_sees(outcomes: Outcomes) -> None:
    seen: list[Growth] = []

    class Listens(FixedBudget):
        def go_on(self, growth: Growth) -> bool:
            seen.append(growth)
            return super().go_on(growth)

        def size(self, growth: Growth) -> int:
            seen.append(growth)
            return super().size(growth)

    size = SizeEnv(replayed(outcomes), OBSERVER, SIZES, Listens(3, 2), Reward("ratio", TYPICAL))
    shown, _ = size.reset(seed=0)
    assert [len(g.scores) for g in seen] == [2, 4] and [g.depth for g in seen] == [1, 2]
    assert np.array_equal(shown, OBSERVER.to_size(size.source.whole())[0].numpy())
    seen.clear()
    depth = DepthEnv(replayed(outcomes), OBSERVER, Listens(3, 2), Reward("ratio", TYPICAL))
    shown, _ = depth.reset(seed=0)
    assert shown[8] == np.float32(size.source.outcomes.context[size.source._at] / 1000)
    depth.step(np.int64(1))
    depth.step(np.int64(0))
    assert [(len(g.scores), g.depth) for g in seen] == [(6, 2)]


def test_environments_refuse_a_source_of_another_shape(outcomes: Outcomes) -> None:
    with pytest.raises(ValueError, match="for top_k 2 and depth 4, the source has 2 and 3"):
        SizeEnv(replayed(outcomes), Observer("paper", 2, 4), SIZES, FixedBudget(), Reward("ratio", TYPICAL))


# -- rewards --------------------------------------------------------------------------------------------


def test_rewards_are_what_they_say() -> None:
    step = Step(3, 30.0)
    assert Reward("tokens", TYPICAL)(step) == pytest.approx(1.5)
    assert Reward("time", TYPICAL)(step) == pytest.approx(-1.2)
    assert Reward("ratio", TYPICAL)(step) == pytest.approx((3 / 30) / (2 / 25))
    assert Reward("dinkelbach", TYPICAL)(step) == pytest.approx((3 - 30 * 2 / 25) / 2)
    for kind in REWARDS:
        reward = Reward(kind, TYPICAL)
        first = reward(step)
        for _ in range(20 * PATIENCE):
            reward.observe(Step(4, 80.0))
        usual = {"tokens": 3 / 4, "time": -30 / 80, "ratio": 0.1 / 0.05, "dinkelbach": (3 - 30 / 20) / 4}[kind]
        assert reward(step) == pytest.approx(usual, rel=0.1)
        reward.begin()
        assert reward(step) == first
    with pytest.raises(ValueError, match="unknown reward 'speed': use dinkelbach, ratio, tokens or time"):
        Reward("speed", TYPICAL)
    with pytest.raises(ValueError, match="above 0"):
        Reward("ratio", Step(0, 1.0))


def test_a_centred_reward_is_over_the_reference(outcomes: Outcomes) -> None:
    """The reference tree itself earns nothing, and what centring takes does not depend on the action."""
    for kind in REWARDS:
        centred = SizeEnv(replayed(outcomes), OBSERVER, (1, 3), FixedBudget(3, 2), Reward(kind, TYPICAL))
        centred.reset(seed=0)
        for _ in range(10):
            assert centred.step(np.int64(1))[1] == 0
            centred.reset()
        plain = SizeEnv(replayed(outcomes), OBSERVER, (1, 3), FixedBudget(3, 2), Reward(kind, TYPICAL), centred=False)
        differences = []
        for environment in (centred, plain):
            rewards = []
            for action in (0, 1):
                environment.reset(seed=7)
                rewards.append(environment.step(np.int64(action))[1])
            differences.append(rewards[0] - rewards[1])
        assert differences[0] == pytest.approx(differences[1])
