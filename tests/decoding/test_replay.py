"""The replay: its log, its walk against the real engine, its oracles, and the length heads that are fitted from it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from test_eagle_head import random_head

from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.labels import LabelConfig
from activations.matching.match import MatchConfig
from activations.store import CaptureStore
from activations.target import Target
from decoding import lengths
from decoding.budgets import FixedBudget
from decoding.costs import CostTable
from decoding.decoder import Decoder
from decoding.eagle.drafter import EagleDrafter
from decoding.gates import Always, Choice, Gate, MatchLengthGate, Never
from decoding.joint import AGREE, ALONE, BESIDE, PASSED_OVER, odds
from decoding.lengths import DraftRows, copy_rows, fit_draft
from decoding.modes import ModeSettings
from decoding.readings import summary
from decoding.replay import LoggedDrafter, Walk, follow, options, oracle, replay, speedup, walk
from decoding.replay_log import LogError, LoggedText, log_answers, log_text, read_log
from decoding.trace import Trace
from decoding.tree import DraftTree
from probes.artifact import ProbeError
from probes.length_head import JOINT, LengthConfig, LengthHead
from probes.surface import FEATURES

SITES = ("resid_pre.1", "resid_pre.2", "resid_pre.3")
MATCH = MatchConfig(kappa=1, depth=8)
COPY, EAGLE = Choice("copy", FixedBudget(6, 8)), Choice("eagle", FixedBudget(7, 3))
COSTS = CostTable({}, [1, 64], [64], [[40.0, 100.0]], {"eagle": [2.0, 4.0, 6.0, 8.0]}, 0.0, 0.0)


def small_lengths(target: Target) -> LengthHead:
    config = LengthConfig(
        sites=("resid_mid.2",), width=target.width, drafts={"copy": 8, "eagle": 3}, features=FEATURES, kappa=1,
        target=target.fingerprint, target_name=target.name, split={}, metrics={}, provenance={},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {"eagle.joint": torch.tensor([0.5, 0.5, 0.0]).expand(JOINT).clone()}
    for name in config.drafts:
        shapes = {"state": (2, target.width), "features": (2, len(FEATURES)), "bias": (2,)}
        tensors |= {f"{name}.{k}": torch.randn(shape, generator=generator) * 0.2 for k, shape in shapes.items()}
    return LengthHead(config, tensors)


def made_text(seed: int, steps: int = 40) -> LoggedText:
    """A text over few tokens, with whole trees of two beams and three levels that are right now and then."""
    draw, k, depth = random.Random(seed), 2, 3
    ids = [draw.randrange(4) for _ in range(steps + 11)]
    parents = [-1] * k
    level = list(range(k))
    for _ in range(depth - 1):
        below = [p for p in level for _ in range(k)]
        level = sorted(draw.sample(range(len(parents), len(parents) + len(below)), k))
        parents += below
    scores, tokens = torch.zeros(steps, len(parents)), torch.zeros(steps, len(parents), dtype=torch.int32)
    for step in range(steps):
        for i, p in enumerate(parents):
            scores[step, i] = (scores[step, p] if p >= 0 else 0) - draw.random() * 2
            tokens[step, i] = 2 * draw.randrange(2) + i % k
    return LoggedText(
        f"made-{seed}", "validation", 10, True, ids, tokens, torch.tensor(parents).short().expand(steps, -1).clone(),
        scores, torch.rand(steps, 3), k, {"resid_mid.2": torch.randn(steps, 32)},
    )  # fmt: skip


# -- the log and the engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["cost", "match", "always"])
@pytest.mark.parametrize("prompt", [[1, 5, 9, 5, 9, 5], [30, 31, 32, 30, 31, 32, 30, 31]])
def test_a_walk_is_what_the_engine_does(
    small_target: Callable[..., Target], gate: str, prompt: list[int], tmp_path: Path
) -> None:
    """Step by step: decisions, trees, accepted paths. Candidates are of the matcher's usual settings."""
    target = small_target("llama")
    drafter, head = EagleDrafter(target, random_head(), sites=SITES), small_lengths(target)
    chosen = ModeSettings(gate=gate, kappa=1, depth=8, copy_nodes=6)
    decoder = Decoder(target, neural=drafter, settings=chosen, costs=COSTS, lengths=head)
    answer = decoder.generate(prompt, mode="switchsd", max_new_tokens=40).tokens
    assert len(answer) == 40
    assert answer == decoder.generate(prompt, mode="ar", max_new_tokens=40).tokens
    decoder.generate(prompt, mode="switchsd", max_new_tokens=40)  # whose trace is compared
    text = log_text(
        target, drafter, [*prompt, *answer], len(prompt), key="a", source="train", stopped=False, limit=40, depth=4,
        sites=head.config.sites,
    )  # fmt: skip
    text.save(tmp_path / "a.safetensors")
    [text] = read_log(tmp_path)
    trace = Trace()
    plan = decoder.plan("switchsd")
    walk(text, plan.gate, COSTS, MATCH, head, trace=trace)
    assert len(trace) == len(decoder.trace) > 3
    for mine, real in zip(trace, decoder.trace, strict=True):
        for name in ("position", "drafters", "reason", "tokens", "parents", "source", "accepted", "pending"):
            assert getattr(mine, name) == getattr(real, name), name
        assert mine.logq == pytest.approx(real.logq, abs=1e-4)
    asked = {d for r in trace for d in r.drafters}
    assert asked >= {"match": {"copy", "eagle"}, "always": {"eagle"}, "cost": {"copy"}}[gate]


def test_logs_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    text = made_text(0)
    text.save(tmp_path / "log" / "a.safetensors")
    again = LoggedText.load(tmp_path / "log" / "a.safetensors")
    assert (again.key, again.ids, again.prompt, again.stopped, again.top_k) == (text.key, text.ids, 10, True, 2)
    for name in ("tokens", "parents", "scores", "summary"):
        assert torch.equal(getattr(again, name), getattr(text, name))
    assert torch.equal(again.states["resid_mid.2"], text.states["resid_mid.2"])
    assert not LoggedText.load(tmp_path / "log" / "a.safetensors", states=False).states
    (tmp_path / "log" / "b.safetensors").write_bytes(b"no")
    with pytest.raises(LogError, match=r"b.safetensors is no replay log of this version"):
        read_log(tmp_path / "log")
    with pytest.raises(LogError, match="holds no logged texts"):
        read_log(tmp_path)


def test_an_answer_without_a_step_cannot_be_logged(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), sites=SITES)
    with pytest.raises(LogError, match="an answer of 1 tokens has no step to log"):
        log_text(target, drafter, [1, 2, 3], 2, key="x", source="train", stopped=True)


def test_answers_are_written_and_logged(small_target: Callable[..., Target]) -> None:
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head(), sites=SITES)
    prompts = [[1, 5, 9, 5, 9, 5], [30, 31, 32, 30, 31]]
    texts = log_answers(target, drafter, prompts, limit=20, ahead=6, depth=3, sites=["resid_mid.2"])
    assert [t.key for t in texts] == ["0000", "0001"]
    for text, prompt in zip(texts, prompts, strict=True):
        answer = Decoder(target).generate(prompt, mode="ar", max_new_tokens=26).tokens
        assert text.ids == [*prompt, *answer] and text.prompt == len(prompt)
        assert text.steps == 19 == len(text.states["resid_mid.2"])
        alone = log_text(
            target, drafter, text.ids, len(prompt), key=text.key, source="prompts", stopped=text.stopped, limit=20,
            depth=3,
        )  # fmt: skip
        assert torch.equal(text.tokens, alone.tokens)


def test_a_speedup_is_that_of_totals_with_an_interval_over_texts() -> None:
    walks = [Walk(tokens=[10, 20], milliseconds=times) for times in ([100.0, 100.0], [300.0, 200.0])]
    found = speedup(*walks)
    assert found.estimate == pytest.approx(2.5)
    assert (found.lower, found.upper) == (2.0, 3.0)  # either text alone
    same = speedup(walks[0], walks[0])
    assert (same.estimate, same.lower, same.upper) == (1.0, 1.0, 1.0)
    one = speedup(Walk(tokens=[4], milliseconds=[2.0]), Walk(tokens=[4], milliseconds=[3.0]))
    assert one.estimate == pytest.approx(1.5) and np.isnan(one.lower)
    with pytest.raises(ValueError, match="the same texts"):
        speedup(walks[0], Walk(tokens=[10, 21], milliseconds=[1.0, 1.0]))


def test_summary_of_logits() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
    p = logits.softmax(-1)
    expected = torch.stack([p.max(-1).values, -(p * p.log()).sum(-1), torch.tensor([2.0, 0.0])], -1)
    torch.testing.assert_close(summary(logits), expected)


# -- walks and oracles --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10**6), st.floats(20, 60), st.floats(0, 4), st.floats(0, 10))
def test_oracles_bound_what_gates_do(seed: int, base: float, node: float, draft: float) -> None:
    text = made_text(seed, 25)
    costs = CostTable({}, [1, 64], [64], [[base, base + 63 * node]], {"eagle": [draft * i for i in range(1, 5)]}, 0, 0)
    found = options(text, MATCH, [COPY.budget], [EAGLE.budget])
    best, shortest = oracle([text], [found], costs), oracle([text], [found], costs, path=True)
    gates: list[Callable[[], Gate]] = [
        Never, lambda: Always(EAGLE), lambda: MatchLengthGate(COPY, EAGLE, 1), lambda: MatchLengthGate(COPY, EAGLE, 3),
    ]  # fmt: skip
    for gate in gates:
        done = replay([text], gate, costs, MATCH)
        assert sum(done.tokens) == text.steps == sum(best.tokens) == sum(shortest.tokens)
        assert shortest.milliseconds[0] <= done.milliseconds[0] + 1e-6
    assert shortest.milliseconds[0] <= best.milliseconds[0] + 1e-6
    plain = replay([text], Never, costs, MATCH)
    assert plain.plain == plain.steps == text.steps
    assert plain.milliseconds[0] == pytest.approx(text.steps * base)


def test_the_step_oracle_takes_the_best_rate_of_each_step() -> None:
    text = made_text(3, 30)
    found = options(text, MATCH, [COPY.budget], [EAGLE.budget])
    at, tokens, time = 0, 0, 0.0
    while at < text.steps:
        rates = []
        for a, n, d in zip(found.accepted[at], found.nodes[at], found.levels[at], strict=True):
            cost = COSTS.verify(1 + n, text.context(at)) + (COSTS.draft("eagle", d) if d else 0)
            rates.append((min(1 + a, text.steps - at) / cost, cost))
        rate, cost = max(rates)
        at += round(rate * cost)
        tokens, time = tokens + round(rate * cost), time + cost
    done = oracle([text], [found], COSTS)
    assert (sum(done.tokens), done.milliseconds[0]) == (tokens, pytest.approx(time))


@given(st.integers(0, 1000), st.integers(1, 20), st.integers(1, 3), st.integers(1, 9))
def test_a_smaller_tree_is_a_part_of_the_whole_one(seed: int, nodes: int, depth: int, room: int) -> None:
    text = made_text(seed, 3)
    whole, _ = LoggedDrafter(text).grow(1, FixedBudget(10**6, 3), 9)
    part, levels = LoggedDrafter(text).grow(1, FixedBudget(nodes, depth), room)
    assert whole is not None and part is not None
    assert len(part) == min(nodes, sum(d <= min(depth, room) for d in whole.depths))
    assert levels == min(depth, room) and max(part.depths) <= levels

    def paths(tree: DraftTree) -> list[tuple[int, ...]]:
        return [tuple(tree.tokens[i] for i in line) for line in tree.ancestors]

    assert set(paths(part)) <= set(paths(whole))
    assert LoggedDrafter(text).grow(0, FixedBudget(3, 3), 0) == (None, 0)


def test_follow() -> None:
    tree = DraftTree([1, 2, 3, 4], [-1, 0, 0, 2], ["a"] * 4, [0.0] * 4)
    assert follow(tree, [1, 3, 4, 9]) == [0, 2, 3] and follow(tree, [2]) == [] and follow(tree, []) == []
    assert follow(DraftTree((), (), (), ()), [1]) == []


# -- fitting ------------------------------------------------------------------------------------------


def test_rows_of_a_text_by_hand() -> None:
    ids = [1, 2, 3, 4, 1, 2, 3, 9, 1, 2]
    rows = copy_rows(ids, 4, False, np.zeros((6, 3)), MatchConfig(kappa=1, depth=4))
    assert rows.accepted.tolist() == [2, 1, 0, 0, 1, 0]  # after 1, 2, 3, 9, 1 and 2
    assert (rows.features[:, 0] > 0).tolist() == [True, True, True, False, True, True]
    assert rows.censored.tolist() == [False] * 4 + [True, True]  # cut while the candidate still agreed
    assert not copy_rows(ids, 4, True, np.zeros((6, 3)), MATCH).censored.any()


def test_rows_count_where_a_decoder_asks() -> None:
    weights = lengths.asked(np.full(30, 9), np.full(30, 4))  # every walk copies five tokens at a time
    assert (weights[::5] > 1).all() and (np.delete(weights, np.arange(0, 30, 5)) < 0.2).all()


def test_a_fit_is_one_logistic_regression_a_step() -> None:
    """Against scikit-learn, on the rows at risk at each step, with the same penalty on the same scale."""
    rng = np.random.default_rng(0)
    n = 600
    states = torch.from_numpy(rng.normal(size=(n, 4))).float()
    features = rng.normal(size=(n, len(FEATURES)))
    accepted = np.minimum(rng.geometric(0.4 + 0.2 * (features[:, 0] > 0), n) - 1, 3)
    rows = DraftRows(features, accepted, np.zeros(n, bool), rng.uniform(0.2, 1, n))
    made = fit_draft(states, rows, 3, 3, 1e-2)
    x = np.hstack(
        [states.numpy() / np.sqrt(np.mean(states.numpy() ** 2)), 3 * (features - features.mean(0)) / features.std(0)]
    )
    for k in range(3):
        risk = accepted >= k
        weight = rows.weight[risk] / rows.weight[risk].sum()
        scaled = x / np.sqrt(np.mean(x[risk] ** 2))  # the penalty is meant for entries of RMS 1
        reference = LogisticRegression(C=1 / 1e-2, tol=1e-8, max_iter=2000).fit(
            scaled[risk], accepted[risk] > k, weight
        )
        odds = made["bias"][k] + states @ made["state"][k] + torch.from_numpy(features).float() @ made["features"][k]
        np.testing.assert_allclose(odds[risk].numpy(), reference.decision_function(scaled[risk]), atol=0.02)


def test_a_fit_without_states_has_features_alone() -> None:
    rng = np.random.default_rng(1)
    rows = DraftRows(rng.normal(size=(50, len(FEATURES))), rng.integers(0, 4, 50), np.zeros(50, bool), np.ones(50))
    made = fit_draft(torch.zeros(50, 0), rows, 5, 3, 1e-2)
    assert made["state"].shape == (3, 0) and made["features"].shape == (3, len(FEATURES))


@pytest.fixture(scope="module")
def captured(
    small_target: Callable[..., Target], tmp_path_factory: pytest.TempPathFactory
) -> tuple[CaptureStore, list[Prompt]]:
    texts = ["ABCDABCDABCD", "list:0;1;2;", "aaaa", "0123401234", "hijjihhijjih", "ab;cd;ab;cd;"]
    prompts = [
        Prompt(f"p{i}", "qa", f"g{i}", "validation" if i % 3 == 2 else "train", None, ({"role": "user", "content": t},))
        for i, t in enumerate(texts)
    ]
    config = CaptureConfig(sites=("resid_mid.2",), max_new_tokens=40, labels=LabelConfig(kappa=1))
    return capture(small_target("llama"), prompts, tmp_path_factory.mktemp("lengths") / "s", config), prompts


def test_a_head_is_fitted_from_a_store_and_a_log(
    captured: tuple[CaptureStore, list[Prompt]], small_target: Callable[..., Target]
) -> None:
    store, prompts = captured
    target = small_target("llama")
    texts = list(lengths.stored_texts(store, prompts, target.encode_messages))
    assert [t.split for t in texts] == [p.split for p in prompts]
    drafter = EagleDrafter(target, random_head(), sites=SITES)
    log = [
        log_text(
            target, drafter, t.ids, t.prompt, key=str(i), source=t.split, stopped=t.stopped, sites=["resid_mid.2"],
        )
        for i, t in enumerate(texts)
    ]  # fmt: skip
    config = lengths.LengthTrainConfig(sites=("resid_mid.2",), depth=8, hazards=3)
    head = lengths.train_lengths(store, texts, log, config)
    head.check_target(target.fingerprint)
    assert head.config.drafts == {"copy": 8, "eagle": 3} and head.config.kappa == 1
    assert head.config.split["copy texts"] == 4 and head.config.split["neural texts"] == 4
    assert set(head.config.metrics) == {"copy", "eagle"}
    alone = lengths.train_lengths(store, texts, [], config)
    assert alone.config.drafts == {"copy": 8} and "eagle.joint" not in alone.tensors
    for name in ("state", "features", "bias"):
        assert torch.equal(alone.tensors[f"copy.{name}"], head.tensors[f"copy.{name}"])
    logged_state = torch.cat([t.states["resid_mid.2"] for t in log])
    stored = torch.cat(
        [store.states("resid_mid.2")[torch.from_numpy(t.rows)][: x.steps] for t, x in zip(texts, log, strict=True)]
    )
    torch.testing.assert_close(logged_state, stored, atol=2e-4, rtol=1e-3)  # both sides are fitted to the same states
    with pytest.raises(ProbeError, match="was captured from other prompts"):
        list(lengths.stored_texts(store, prompts[1:], target.encode_messages))
    with pytest.raises(ProbeError, match="has no texts of the test split"):
        lengths.train_lengths(store, texts, log, config, split="test")


def test_judging_is_the_likelihood_of_what_came(small_target: Callable[..., Target]) -> None:
    head = small_lengths(small_target("llama"))
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(3, 32, generator=generator)
    features = torch.randn(3, len(FEATURES), generator=generator).numpy().astype(float)
    rows = DraftRows(features, np.array([0, 2, 5]), np.array([False, False, True]), np.array([1.0, 0.5, 0.25]))
    terms = []
    for i, readings in enumerate(head.project(states).tolist()):
        alive = [1.0, *head.chances("copy", head.hazards("copy", readings, features[i].tolist()))]
        n = int(rows.accepted[i])
        terms.append(np.log(alive[n] - (0 if rows.censored[i] else alive[n + 1])))
    found = lengths.judge(head, "copy", states, rows)
    assert found["log_likelihood"] == pytest.approx(np.average(terms, weights=rows.weight), abs=1e-3)
    assert found["accepted"] == pytest.approx(2 * 0.5 / 1.5, abs=1e-3) and found["rows"] == 3


def test_meetings_of_the_two_drafters_by_hand() -> None:
    """The head drafted 1 and 4, below 1 a 7; the copy says 1, 2, 9, and the text goes 1 7 3."""
    tree = DraftTree([1, 4, 7], [-1, -1, 0], ["eagle"] * 3, np.log([0.6, 0.2, 0.7]).tolist())
    a, b, c = (odds(q) for q in tree.logq)
    found = list(lengths.meetings(tree, [1, 2, 9], [1.5, -0.5], [1, 7, 3]))
    assert found == [
        (AGREE, 0, 1.5, a, True), (BESIDE, 0, 1.5, b, False), (PASSED_OVER, 1, -0.5, c, False),
        (BESIDE, 1, -0.5, c, True),
    ]  # fmt: skip
    assert [m[0] for m in lengths.meetings(tree, (), [1.0], [1, 7])] == [ALONE, ALONE, ALONE]
