"""The shared store against its definition, and its rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activations.matching.shared import SharedConfig, SharedStore

Weighed = tuple[float, set[tuple[int, ...]]]


def occurrences(texts: list[list[int]], context: list[int], c: SharedConfig) -> tuple[int, list[tuple[int, list[int]]]]:
    """How many there are, and match length and what follows of the most recent ones."""
    suffix = context[-c.max_length :]
    if len(suffix) < c.kappa:
        return 0, []
    found = []
    for text in texts:
        for p in range(c.kappa, len(text)):
            if text[p - c.kappa : p] == suffix[-c.kappa :]:
                length = max(k for k in range(min(p, len(suffix)) + 1) if k == 0 or text[p - k : p] == suffix[-k:])
                found.append((length, text[p:]))
    return len(found), found[-c.occurrences :]


def weigh(follows: list[list[int]], matched: int, c: SharedConfig) -> float:
    """The sum of the shares of the likeliest tokens: with shares that never grow downwards, simply the largest."""
    depth = min(c.depth, max(1, int(c.factor * matched)))
    counts: dict[tuple[int, ...], int] = {}
    for tokens in follows:
        for n in range(1, min(depth, len(tokens)) + 1):
            counts[tuple(tokens[:n])] = counts.get(tuple(tokens[:n]), 0) + 1
    return sum(
        sorted((n / len(follows) for n in counts.values() if n >= c.min_share * len(follows)), reverse=True)[: c.nodes]
    )


@st.composite
def shared_configs(draw: st.DrawFn) -> SharedConfig:
    kappa = draw(st.integers(1, 4))
    return SharedConfig(
        max_tokens=draw(st.integers(5, 60)),
        kappa=kappa,
        max_length=draw(st.integers(kappa, kappa + 8)),
        depth=draw(st.integers(1, 6)),
        nodes=draw(st.integers(1, 12)),
        factor=draw(st.sampled_from([0.5, 1.0, 3.0])),
        occurrences=draw(st.integers(1, 8)),
        min_share=draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    )


lines = st.lists(st.integers(0, 2), max_size=25)


@given(st.lists(lines, max_size=8), lines, shared_configs())
def test_store_is_the_definition(texts: list[list[int]], context: list[int], c: SharedConfig) -> None:
    store = SharedStore(c)
    kept: list[list[int]] = []
    for text in texts:
        store.add(text)
        text = text[-c.max_tokens :]
        if len(text) > c.kappa:
            kept.append(text)
            while sum(map(len, kept)) > c.max_tokens:
                kept.pop(0)
    assert len(store) == sum(map(len, kept)) <= c.max_tokens
    grams = {tuple(t[i : i + c.kappa]) for t in kept for i in range(len(t) - c.kappa)}
    assert len(store._places) == len(grams)  # what was dropped leaves nothing behind

    found = store.find(context)
    count, counted = occurrences(kept, context, c)
    longest = max((length for length, _ in counted), default=0)
    assert (found.count, found.length) == (count, longest)
    if not count:
        assert found.candidates == ()
        return
    best = max(
        weigh([f for length, f in counted if length == longest], longest, c),
        weigh([f for _, f in counted], c.kappa, c),
    )
    inner = {chain[:n] for chain in found.candidates for n in range(1, len(chain) + 1)}
    assert len(inner) <= c.nodes
    assert list(found.scores) == sorted(found.scores, reverse=True)
    assert not any(a != b and b[: len(a)] == a for a in found.candidates for b in found.candidates)  # leaves only
    for closest in (True, False):
        follows = [f for length, f in counted if length == longest or not closest]
        shares = {chain: sum(tuple(f[: len(chain)]) == chain for f in follows) / len(follows) for chain in inner}
        scores = [sum(shares[chain[:n]] for n in range(1, len(chain) + 1)) for chain in found.candidates]
        if sum(shares.values()) == pytest.approx(best) and scores == pytest.approx(found.scores):
            break
    else:
        raise AssertionError("neither set of occurrences gives these candidates")


def test_the_usual_continuation_comes_first() -> None:
    store = SharedStore(SharedConfig(kappa=2, depth=3, factor=2.0))
    for after in ([5, 6], [5, 7], [9, 9], [5, 6]):
        store.add([1, 2, *after])
    found = store.find([8, 1, 2])
    assert (found.length, found.count) == (2, 4)
    assert found.candidates == ((5, 6), (5, 7), (9, 9))
    assert found.scores == (0.75 + 0.5, 0.75 + 0.25, 0.25 + 0.25)


def test_a_closer_match_is_heard_before_the_usual_one() -> None:
    store = SharedStore(SharedConfig(kappa=2, factor=1.0))
    for after in (5, 6, 7, 8):
        store.add([9, 1, 2, after, after])
    store.add([3, 4, 1, 2, 10, 11, 12, 13])
    found = store.find([3, 4, 1, 2])
    assert (found.length, found.count, found.candidates) == (4, 5, ((10, 11, 12, 13),))


def test_stores_know_nothing_of_each_other_and_forget() -> None:
    one, other = SharedStore(SharedConfig(kappa=2)), SharedStore(SharedConfig(kappa=2))
    one.add([1, 2, 3, 4])
    assert one.find([1, 2]).count == 1 and other.find([1, 2]).count == 0
    one.reset()
    assert one.find([1, 2]).count == 0 and len(one) == 0


def test_a_match_does_not_cross_texts() -> None:
    store = SharedStore(SharedConfig(kappa=2))
    store.add([1, 2, 3, 4])
    store.add([5, 6, 7, 8])
    assert store.find([3, 4]).count == 0  # nothing followed in that text
    assert store.find([4, 5]).count == 0
    assert store.find([3, 4, 5, 6]).length == 2


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
        ({"max_length": 3}, r"max_length is 3; it must be at least kappa \(5\)"),
        ({"factor": 0.0}, "factor is 0.0; it must be above 0"),
        ({"min_share": 1.5}, r"min_share is 1.5; a share lies in \[0, 1\]"),
    ],
)
def test_bad_settings_are_named(setting: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SharedConfig(**setting)  # type: ignore[arg-type]
