"""The suffix index against the definition of a suffix match, read off token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig, Matches


def brute_force(tokens: list[int], config: MatchConfig) -> tuple[Matches, list[list[int]]]:
    """The definition: O(context) a call."""
    n, kappa = len(tokens), config.kappa
    found = [p for p in range(kappa, n) if tokens[p - kappa : p] == tokens[n - kappa : n]]
    starts = sorted(found, reverse=True)[: config.candidates]
    lengths = [
        max(k for k in range(1, min(p, config.max_length) + 1) if tokens[p - k : p] == tokens[n - k :]) for p in starts
    ]
    same = [p for p in starts if tokens[p] == tokens[starts[0]]]
    agreement = len(same) / len(starts) if starts else 0.0
    candidates = [tokens[p : min(p + config.depth, n)] for p in starts]
    return Matches(n, len(found), tuple(starts), tuple(lengths), agreement), candidates


@st.composite
def configs(draw: st.DrawFn) -> MatchConfig:
    kappa = draw(st.integers(1, 6))
    return MatchConfig(kappa, draw(st.integers(1, 10)), draw(st.integers(1, 20)), draw(st.integers(kappa, kappa + 12)))


def texts(size: int = 80) -> st.SearchStrategy[list[int]]:
    return st.integers(2, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab - 1), max_size=size))


@given(texts(), configs(), st.data())
def test_index_is_the_definition(tokens: list[int], config: MatchConfig, data: st.DataObject) -> None:
    index = SuffixIndex(config)
    fed = 0
    while True:
        expected, candidates = brute_force(tokens[:fed], config)
        assert index.find() == expected
        assert index.candidates(expected) == candidates
        assert index.tokens == tokens[:fed]
        if fed == len(tokens):
            break
        chunk = data.draw(st.integers(1, len(tokens) - fed))
        index.extend(tokens[fed : fed + chunk])
        fed += chunk


def test_candidates_outlive_growth() -> None:
    index = SuffixIndex(MatchConfig(kappa=2, depth=20), [1, 2, 3, 1, 2])
    matches = index.find()
    index.extend([9, 9, 9])
    assert index.candidates(matches) == [[3, 1, 2]]  # what followed lies before the context's end of that time


def test_summary_of_a_repeated_text() -> None:
    #                                         0  1  2  3  4  5  6  7  8  9 10
    index = SuffixIndex(MatchConfig(kappa=2), [7, 8, 1, 2, 5, 1, 2, 4, 8, 1, 2])
    matches = index.find()
    assert (matches.starts, matches.lengths, matches.count) == ((7, 4), (2, 3), 2)
    assert (matches.longest, matches.distance, matches.agreement) == (3, 4, 0.5)


def test_nothing_found() -> None:
    matches = SuffixIndex(MatchConfig(kappa=3), [1, 2, 3, 4]).find()
    assert (matches.longest, matches.distance, matches.agreement, matches.count) == (0, 0, 0.0, 0)


@pytest.mark.parametrize("setting", [{"kappa": 0}, {"candidates": 0}, {"depth": -1}])
def test_bad_setting(setting: dict[str, int]) -> None:
    name, value = next(iter(setting.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be 1 or more"):
        MatchConfig(**setting)


def test_bad_max_length() -> None:
    with pytest.raises(ValueError, match=r"max_length is 3; it must be at least kappa \(5\)"):
        MatchConfig(max_length=3)
