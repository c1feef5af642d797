"""Interventions on a probe's direction and on heads, against the same thing written out one forward at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from activations.cache import KVCache
from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.heads import Head, HeadMeans, ablated, induction_scores, repeated_tokens, top_heads
from activations.labels import LabelConfig, follow_rows
from activations.store import CaptureStore
from activations.target import Target
from activations.texts import StoredText
from probes.anchors import AnchoredText, anchored
from probes.artifact import ChoiceError, Probe, ProbeConfig, ProbeError
from probes.causality import CausalityConfig, Study
from probes.direction import choose_anchors, direction_effects, random_directions, tokens_needed, unit_direction
from probes.induction import COPIED, head_counts, induction, random_heads
from probes.induction import tokens_needed as tokens_for_heads

SITE = "resid_mid.2"
N = 3


def make_probe_config(target: Target, site: str = SITE) -> ProbeConfig:
    return ProbeConfig(
        site=site, width=target.width, label="follow", label_settings={"match": 1}, threshold=0.5,
        threshold_rule="none", target=target.fingerprint, target_name=target.name, store="0" * 64, split={},
        metrics={}, provenance={},
    )  # fmt: skip


def make_probe(target: Target, site: str = SITE, sign: float = 1.0) -> Probe:
    weight = torch.randn(32 * len(site.split("+")), generator=torch.Generator().manual_seed(4))
    return Probe(make_probe_config(target, site), weight, bias=0.3, scale=0.5, calibration=(1.2 * sign, 0.1))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request: pytest.FixtureRequest, small_target: Callable[..., Target]) -> Target:
    return small_target(request.param)


@pytest.fixture(scope="module")
def texts() -> list[AnchoredText]:
    rng, labels, found = np.random.default_rng(0), LabelConfig(kappa=1), []
    for document in range(5):
        piece = rng.integers(0, 20, 12).tolist()
        ids = [*piece, *rng.integers(0, 20, 5).tolist(), *piece[2:9], *rng.integers(0, 20, 6).tolist(), *piece[:6]]
        rows = follow_rows(ids, 10, labels)
        rows["document"] = np.full(len(rows["position"]), document)
        found.append(anchored(StoredText(document, ids, 10), rows, labels, 1))
    return found


def margin(target: Target, hidden: torch.Tensor, token: int) -> float:
    logits = target.logits(hidden[None])[0]
    return float(logits[token] - torch.cat([logits[:token], logits[token + 1 :]]).max())


def change(target: Target, ids: list[int], new: dict[int, torch.Tensor]) -> torch.Tensor:
    """Final states when the states at resid_mid.2 are exchanged, by recomputing block 2 and what follows by hand."""

    def write(module: Any, args: Any) -> None:
        for position, state in new.items():
            args[0][0, position] = state

    place = target.structure.layouts[2].place("resid_mid")
    assert place.is_input
    handle = target.layers[2].get_submodule(place.path).register_forward_pre_hook(write)
    try:
        return target.hidden(torch.tensor([ids]), KVCache(1, capacity=len(ids)))[0]
    finally:
        handle.remove()


def test_effects_are_those_of_single_forwards(target: Target, texts: list[AnchoredText]) -> None:
    probe = make_probe(target)
    chosen = choose_anchors(texts, 2, seed=1)
    told: list[int] = []
    effects = direction_effects(target, probe, chosen, N, resamples=20, seed=5, tell=told.append)
    assert sum(told) == tokens_needed(chosen, N)
    unit = probe.tensors["weight"] / probe.tensors["weight"].norm()
    torch.testing.assert_close(unit_direction(probe), unit)
    lines = [unit, *random_directions(32, N, seed=5)]

    anchors, states = [], []
    for text in chosen:
        with target.read([SITE]) as reader:
            target.hidden(torch.tensor([text.ids]), KVCache(1, capacity=len(text.ids)))
        (state,) = reader.states.values()
        for a in text.anchors:
            anchors.append((text, a))
            states.append(state[0])
    component = np.array([float(s[a.position] @ unit) for (_, a), s in zip(anchors, states, strict=True)])
    genuine = np.array([a.genuine for _, a in anchors])
    assert 0 < genuine.sum() < len(genuine)
    seen = set()
    for effect in effects:
        seen.add((effect.intervention, effect.where, effect.kind))
        if effect.intervention == "interchange":
            continue  # whose goals are drawn; see below
        of_kind = genuine == (effect.kind == "genuine")
        goal = component[~of_kind].mean()
        rows = []
        for (text, a), state in zip(anchors, states, strict=True):
            if a.genuine != (effect.kind == "genuine"):
                continue
            t = a.position
            places = [t] if effect.where == "anchor" else range(min(t, t + 2 - a.match_length), t + 2)
            asked = ((t + 1, a.candidate), (t, text.ids[t + 1]))
            plain = change(target, text.ids, {})
            before = [margin(target, plain[at], token) for at, token in asked]
            moved = []
            for line in lines:
                after = change(target, text.ids, {p: state[p] + (goal - state[p] @ unit) * line for p in places})
                moved.append([margin(target, after[at], token) for at, token in asked])
            rows.append((before, np.array(moved) - np.array(before)))
        unchanged = np.array([b for b, _ in rows])
        changes = np.array([m for _, m in rows])  # [anchors, lines, predictions]
        assert effect.anchors == len(rows) == of_kind.sum()
        assert effect.displacement == pytest.approx(np.abs(goal - component[of_kind]).mean(), rel=1e-4)
        for n, found in enumerate((effect.next, effect.own)):
            assert found.before.estimate == pytest.approx(unchanged[:, n].mean(), abs=1e-4)
            assert found.probe.estimate == pytest.approx(changes[:, 0, n].mean(), abs=1e-4)
            assert found.random.estimate == pytest.approx(changes[:, 1:, n].mean(), abs=1e-4)
            assert found.difference.estimate == pytest.approx(found.probe.estimate - found.random.estimate, abs=1e-9)
            means = np.abs(changes[..., n].mean(0))
            assert found.beyond == (means[1:] >= means[0]).sum()
            assert found.difference.lower <= found.difference.estimate <= found.difference.upper
            assert np.abs(changes[:, 0, n]).max() > 1e-3  # the change is one that can be seen
    assert len(seen) == len(effects) == 8


def test_interchange_takes_the_component_of_the_nearest_match_length(texts: list[AnchoredText]) -> None:
    from probes.direction import _goals

    anchors = [a for t in choose_anchors(texts, 3, seed=1) for a in t.anchors]
    component = np.arange(len(anchors), dtype=float)
    goals = _goals(anchors, component, seed=2)
    drawn = set()
    for seed in range(30):
        drawn |= set(_goals(anchors, component, seed)["interchange"].tolist())
    for row, a in enumerate(anchors):
        partner = anchors[int(goals["interchange"][row])]
        others = [o for o in anchors if o.genuine != a.genuine]
        assert partner.genuine != a.genuine
        gaps = [abs(o.match_length - a.match_length) for o in others]
        assert abs(partner.match_length - a.match_length) == min(gaps)
        assert goals["ablate"][row] == np.mean([i for i, o in enumerate(anchors) if o.genuine != a.genuine])
    assert len(drawn) > 2


def test_the_same_seed_gives_the_same_and_random_directions_are_of_norm_one(texts: list[AnchoredText]) -> None:
    assert choose_anchors(texts, 1, 0) == choose_anchors(texts, 1, 0)
    assert all(sum(a.genuine for a in t.anchors) <= 1 for t in choose_anchors(texts, 1, 0))
    drawn = random_directions(32, 500, 0)
    assert torch.equal(drawn, random_directions(32, 500, 0)) and not torch.equal(drawn, random_directions(32, 500, 1))
    torch.testing.assert_close(drawn.norm(dim=1), torch.ones(500))
    assert drawn.mean(0).norm() < 0.1


def test_one_class_and_probes_without_a_direction(
    texts: list[AnchoredText], small_target: Callable[..., Target]
) -> None:
    target = small_target("llama")
    only = [AnchoredText(t.document, t.ids, tuple(a for a in t.anchors if a.genuine)) for t in texts]
    with pytest.raises(ProbeError, match="both genuine and accidental ones are needed"):
        choose_anchors(only, 2, 0)
    with pytest.raises(ChoiceError, match=r"this probe is linear at resid_mid\.2\+resid_post\.1"):
        unit_direction(make_probe(target, "resid_mid.2+resid_post.1"))
    probe = make_probe(target)
    turned = make_probe(target, sign=-1)
    torch.testing.assert_close(unit_direction(probe), -unit_direction(turned))


def test_heads_are_ablated_and_compared(small_target: Callable[..., Target], texts: list[AnchoredText]) -> None:
    target = small_target("llama")
    probe = make_probe(target, SITE + "+resid_post.3")
    told: list[int] = []
    counts = head_counts(target, (1, 4, 8, 9))
    assert counts == [1, 4, 8]
    found = induction(target, probe, texts, counts, resamples=20, seed=2, tell=told.append)
    assert sum(told) == tokens_for_heads(texts, 3)
    scores = induction_scores(target, repeated_tokens(target, seed=2))
    assert torch.equal(found.scores, scores)
    assert [(len(a.heads), a.which) for a in found.ablations] == [
        (0, "top"), (1, "top"), (1, "random"), (4, "top"), (4, "random"), (8, "top"), (8, "random")
    ]  # fmt: skip
    by_size = {(len(a.heads), a.which): a for a in found.ablations}
    order = sorted((Head(b, h) for b in range(4) for h in range(4)), key=lambda o: -float(scores[o.block, o.head]))
    assert list(by_size[8, "top"].heads) == order[:8]
    assert not set(by_size[8, "random"].heads) & set(order[:8])

    means = HeadMeans()
    with means.watching():
        for text in texts:
            target.hidden(torch.tensor([text.ids]), KVCache(1, capacity=len(text.ids)))

    def by_hand(heads: tuple[Head, ...]) -> dict[str, np.ndarray]:
        logit, intent, follow, away = [], [], [], []
        for text in texts:
            with ablated(target, heads, means), target.read([SITE, "resid_post.3"]) as reader:
                hidden = target.hidden(torch.tensor([text.ids]), KVCache(1, capacity=len(text.ids)))[0]
            one, two = (state[0] for state in reader.states.values())
            for a in text.anchors:
                state = torch.cat([one[a.position], two[a.position]])
                logit.append(float(probe.logit(state)))
                intent.append(float(probe.score(state)))
                away.append(margin(target, hidden[a.position + 1], a.candidate))
                follow.append(int(target.logits(hidden[a.position + 1][None]).argmax()) == a.candidate)
        return {
            k: np.array(v)
            for k, v in zip(("logit", "intent", "follow", "margin"), (logit, intent, follow, away), strict=True)
        }

    whole = by_hand(())
    assert found.anchors == len(whole["intent"]) and found.documents == 5
    for one in found.ablations:
        expected = by_hand(one.heads)
        assert one.intent.estimate == pytest.approx(expected["intent"].mean(), abs=1e-5)
        assert one.follow.estimate == pytest.approx(expected["follow"].mean(), abs=1e-9)
        assert one.margin_change.estimate == pytest.approx((expected["margin"] - whole["margin"]).mean(), abs=1e-4)
        assert one.intent_change.estimate == pytest.approx((expected["intent"] - whole["intent"]).mean(), abs=1e-5)
        if one.heads:
            both = expected["logit"] - whole["logit"], expected["margin"] - whole["margin"]
            assert one.together.estimate == pytest.approx(np.corrcoef(*both)[0, 1], abs=1e-3)
    top, other = by_size[4, "top"], by_size[4, "random"]
    assert top.over_random is not None and other.over_random is None
    for name in ("intent", "follow", "margin"):
        gap = getattr(top, name).estimate - getattr(other, name).estimate
        assert top.over_random[name].estimate == pytest.approx(gap, abs=1e-9)
    assert found.to_dict()["ablations"][1]["heads"] == [str(order[0])]


def test_random_heads_stand_in_the_same_blocks() -> None:
    scores = torch.zeros(3, 4)
    top = [Head(1, 0), Head(1, 2), Head(2, 3)]
    assert [h.block for h in random_heads(scores, top, 0)] == [1, 1, 2]
    assert len({tuple(random_heads(scores, top, seed)) for seed in range(20)}) > 2
    full = [Head(1, h) for h in range(4)]
    others = random_heads(scores, full, 0)
    assert len(set(others)) == 4 and not {h.block for h in others} & {1}


def test_a_study_from_a_store_to_a_file(small_target: Callable[..., Target], tmp_path: Path) -> None:
    target = small_target("llama")
    prompts = [
        Prompt(
            f"p{i}", "user", f"p{i}", "validation" if i % 2 else "train", None, ({"role": "user", "content": c * 3},)
        )
        for i, c in enumerate(["012", "ab", "klm", "5A4", "QR", "7", "0a", "9Z1"])
    ]
    config = CaptureConfig((SITE,), max_new_tokens=30, batch=4, labels=LabelConfig(kappa=1))
    store: CaptureStore = capture(target, prompts, tmp_path / "store", config)
    asked = CausalityConfig(documents=3, anchors=2, directions=2, heads=(1, 2), resamples=20)
    study = Study(target, make_probe(target), store, prompts, asked)
    assert {t.document for t in study.texts} <= {1, 3, 5, 7} and study.part == "validation"
    assert study.seconds() > 0
    told: list[int] = []
    found = study.run(told.append)
    assert told[-1] == study.tokens and told == sorted(told)
    values = json.loads(found.save(tmp_path / "out").read_text())
    assert values["probe"] == {"site": SITE, "label": "follow", "target": "small-llama", "dtype": "float32"}
    assert len(values["direction"]) == 8 and len(values["induction"]["ablations"]) == 5
    again = Study(target, make_probe(target), store, prompts, asked).run()
    assert again.to_dict()["direction"] == found.to_dict()["direction"]
    with pytest.raises(ChoiceError, match="does not fit small-llama"):
        Study(target, make_probe(small_target("qwen3")), store, prompts, asked)


@pytest.mark.parametrize("wrong", [{"documents": 0}, {"anchors": 0}, {"directions": 0}, {"heads": (0,)}])
def test_settings_check_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        CausalityConfig(**wrong)


def test_a_model_that_copies_stops_where_its_induction_heads_are_gone() -> None:
    from activations import packaged
    from activations.target import load_target

    if not packaged.SHIPPED["small-qwen3"].is_dir():
        pytest.skip("the small model is not in this package")
    target = load_target("small-qwen3", dtype="float32", device="cpu")
    labels, texts = LabelConfig(kappa=1), []
    for number, ids in enumerate(repeated_tokens(target, length=40, rows=6, seed=1).tolist()):
        rows = follow_rows(ids, 40, labels)
        rows["document"] = np.full(len(rows["position"]), number)
        texts.append(anchored(StoredText(number, ids, 40), rows, labels, 1))
    probe = Probe(make_probe_config(target, "resid_post.3"), torch.ones(target.width))
    scores = induction_scores(target, repeated_tokens(target, seed=0))
    count = int((scores >= COPIED).sum())
    assert 0 < count <= 8
    whole, top, _ = induction(target, probe, texts, [count], resamples=20, seed=0).ablations
    assert whole.follow.estimate > 0.9 and top.follow.estimate < 0.3 and top.margin_change.upper < -3
    elsewhere = [h for h in top_heads(scores, scores.numel()) if h.block == target.blocks - 1 and h not in top.heads]
    follow = []
    for text in texts:
        with ablated(target, elsewhere):
            logits = target.forward(torch.tensor([text.ids]), KVCache(1, capacity=len(text.ids)))[0]
        follow += [int(logits[a.position + 1].argmax()) == a.candidate for a in text.anchors]
    assert np.mean(follow) > 0.7  # heads that look elsewhere are not missed
