"""Contexts of an engine's requests, against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activations.matching import MatchConfig, SuffixIndex
from decoding.serving.contexts import Context, Contexts, Gap

CONFIG = MatchConfig(kappa=2, candidates=1, depth=4)
TOKENS = st.lists(st.integers(0, 3), max_size=12)


def nothing(place: int) -> int:
    raise AssertionError(f"position {place} was asked for")


def longest(tokens: list[int], depth: int = 4, kappa: int = 2, limit: int = 32) -> list[int]:
    """What followed the longest earlier occurrence of the end, the most recent of equals; by trying them all."""
    best, found = 0, -1
    for place in range(kappa, len(tokens)):
        length = 0
        while length < min(place, limit) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= kappa and length >= best:
            best, found = length, place
    period = len(tokens) - found
    return [tokens[found + i % period] for i in range(depth)] if best else []


@given(st.lists(st.tuples(st.integers(0, 12), TOKENS), max_size=12))
def test_writes_are_those_of_a_list(writes: list[tuple[int, list[int]]]) -> None:
    context, reference = Context(CONFIG), []
    for start, tokens in writes:
        if start > len(reference):
            with pytest.raises(Gap):
                context.write(start, tokens, lambda place: -1)
            continue
        context.write(start, tokens, nothing)
        if reference[start : start + len(tokens)] != tokens[: len(reference) - start]:
            same = next(i for i in range(len(tokens)) if reference[start + i] != tokens[i])
            reference = reference[: start + same]
        reference[start : start + len(tokens)] = tokens
        assert context.index.tokens.tolist() == reference
        assert context.copy() == longest(reference)


@given(TOKENS, st.integers(0, 12))
def test_cut_leaves_the_index_of_the_rest(tokens: list[int], length: int) -> None:
    context = Context(CONFIG, tokens)
    context.cut(length)
    assert context.index.tokens == SuffixIndex(CONFIG, tokens[:length]).tokens
    assert context.copy() == longest(tokens[:length])


def test_positions_whose_states_were_cached_are_asked_for() -> None:
    context = Context(CONFIG)
    context.write(3, [4, 5], [1, 2, 3].__getitem__)
    assert context.index.tokens.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(Gap, match="position 6 is unknown"):
        context.write(8, [1], {5: 7, 6: -1, 7: -1}.__getitem__)
    assert len(context) == 5


def test_a_key_that_is_used_again_begins_anew() -> None:
    contexts: Contexts[str] = Contexts(CONFIG)
    first, second = object(), object()
    contexts.of("a", first).write(0, [1, 2], nothing)
    assert len(contexts.of("a", first)) == 2
    assert len(contexts.of("a", second)) == 0
    contexts.of("b", first)
    contexts.keep({"b"}.__contains__)
    assert len(contexts) == 1 and len(contexts.of("a", second)) == 0
