"""The suffix index and the torch reference against the definition of a suffix match, read off token by token."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activations.matching import DeviceMatcher, TensorMatches
from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig, Matches
from activations.matching.reference import find_matches
from activations.matching.trie import merge


def brute_force(tokens: list[int], config: MatchConfig, prompt: int = 0) -> tuple[Matches, list[list[int]]]:
    """The definition: O(context) a call."""
    n, kappa = len(tokens), config.kappa
    found = []
    for p in range(kappa, n):
        length = 0
        while length < min(p, config.max_length) and tokens[p - length - 1] == tokens[n - length - 1]:
            length += 1
        if length >= kappa:
            found.append((length, p))
    best = sorted(found, reverse=True)[: config.candidates]
    starts, lengths = tuple(p for _, p in best), tuple(length for length, _ in best)
    same = [p for p in starts if tokens[p] == tokens[starts[0]]]
    agreement = len(same) / len(starts) if starts else 0.0
    candidates = [[tokens[p + k % (n - p)] for k in range(config.depth)] for p in starts]
    return Matches(n, len(found), starts, lengths, agreement, bool(starts) and starts[0] < prompt), candidates


def trie(candidates: list[list[int]]) -> tuple[list[int], list[int]]:
    """Tokens and parents: the first chain, then the others side by side."""
    nodes: dict[tuple[int, ...], int] = {(): -1}
    tokens, parents = [], []
    first = [(candidate[: k + 1]) for candidate in candidates[:1] for k in range(len(candidate))]
    depth = max(map(len, candidates), default=0)
    for prefix in first + [candidate[: k + 1] for k in range(depth) for candidate in candidates[1:]]:
        if tuple(prefix) not in nodes:
            nodes[tuple(prefix)] = len(tokens)
            tokens.append(prefix[-1])
            parents.append(nodes[tuple(prefix[:-1])])
    return tokens, parents


def check(matches: TensorMatches, texts: list[list[int]], prompts: list[int], config: MatchConfig) -> None:
    """Are these the matches of the texts, in every field and in the shapes that were promised?"""
    expected = [brute_force(text, config, prompt) for text, prompt in zip(texts, prompts, strict=True)]
    assert matches.host() == [found for found, _ in expected]
    assert matches.candidates() == [candidates for _, candidates in expected]
    b, w, d = len(texts), config.candidates, config.depth
    tensors = (matches.starts, matches.lengths, matches.tokens, matches.tree_tokens, matches.tree_parents)
    assert {t.dtype for t in (*tensors, matches.summary)} == {torch.int32}
    assert [t.shape for t in tensors] == [(b, w), (b, w), (b, w, d), (b, w * d), (b, w * d)]
    for row, (found, candidates) in enumerate(expected):
        n = len(found.starts)
        assert (matches.starts[row, n:] == -1).all() and (matches.lengths[row, n:] == 0).all()
        assert (matches.tokens[row, n:] == -1).all()
        tokens, parents = trie(candidates)
        unused = w * d - len(tokens)
        assert matches.tree_tokens[row].tolist() == tokens + [-1] * unused
        assert matches.tree_parents[row].tolist() == parents + [-2] * unused
        summary = (found.end, found.count, found.longest, found.distance, round(found.agreement * n), found.in_prompt)
        assert tuple(matches.summary[row].tolist()) == summary


@st.composite
def configs(draw: st.DrawFn) -> MatchConfig:
    kappa = draw(st.integers(1, 6))
    return MatchConfig(kappa, draw(st.integers(1, 10)), draw(st.integers(1, 20)), draw(st.integers(kappa, kappa + 12)))


@st.composite
def texts(draw: st.DrawFn, size: int = 60) -> list[int]:
    """Few different tokens, and long spans that return."""
    vocabulary = draw(st.integers(1, 4))
    ids = draw(st.lists(st.integers(0, vocabulary - 1), max_size=size))
    for _ in range(draw(st.integers(0, 3)) if ids else 0):
        start = draw(st.integers(0, len(ids) - 1))
        ids = ids + ids[start : start + draw(st.integers(1, 30))]
    return ids


@st.composite
def histories(draw: st.DrawFn) -> list[list[list[int]]]:
    """Tokens appended to each of some requests, in rounds."""
    rows = draw(st.integers(1, 3))
    piece = st.lists(st.integers(0, 2), max_size=12)
    return draw(st.lists(st.lists(piece, min_size=rows, max_size=rows), min_size=1, max_size=5))


def feed(history: list[list[list[int]]], config: MatchConfig, backend: str) -> None:
    """A matcher that gets the rounds is right after the last one, and after a reset."""
    rows = len(history[0])
    total = max(sum(len(round_[row]) for round_ in history) for row in range(rows))
    matcher = DeviceMatcher(rows, max(total, 1), config, backend=backend)
    texts: list[list[int]] = [[] for _ in range(rows)]
    prompts = [0] * rows
    for number, round_ in enumerate(history):
        width = max(len(tokens) for tokens in round_) + 1  # padding that must not be read
        padded = torch.tensor([tokens + [1] * (width - len(tokens)) for tokens in round_])
        matcher.append(padded, torch.tensor([len(tokens) for tokens in round_]))
        for text, tokens in zip(texts, round_, strict=True):
            text.extend(tokens)
        if number < rows:
            matcher.end_prompt(number)
            prompts[number] = len(texts[number])
    check(matcher.find(), texts, prompts, config)
    matcher.reset(0)
    check(matcher.find(), [[], *texts[1:]], [0, *prompts[1:]], config)


@given(texts(), configs(), st.data())
def test_index_is_the_definition(tokens: list[int], config: MatchConfig, data: st.DataObject) -> None:
    prompt = data.draw(st.integers(0, len(tokens)))
    index = SuffixIndex(config, prompt=prompt)
    fed = 0
    while True:
        expected, candidates = brute_force(tokens[:fed], config, prompt)
        assert index.find() == expected
        assert index.candidates(expected) == candidates
        assert index.tokens.tolist() == tokens[:fed]
        if fed == len(tokens):
            break
        chunk = data.draw(st.integers(1, len(tokens) - fed))
        index.extend(tokens[fed : fed + chunk])
        fed += chunk


@given(st.data(), configs())
def test_reference_is_the_definition(data: st.DataObject, config: MatchConfig) -> None:
    capacity = data.draw(st.integers(1, 60))
    line = st.lists(st.integers(0, data.draw(st.integers(0, 2))), min_size=capacity, max_size=capacity)
    rows = data.draw(st.lists(line, min_size=1, max_size=3))  # full: what lies behind the end is a trap
    length = st.lists(st.integers(0, capacity), min_size=len(rows), max_size=len(rows))
    lengths, prompts = data.draw(length), data.draw(length)
    contexts = torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths), torch.tensor(prompts, dtype=torch.int32)
    texts = [row[:n] for row, n in zip(rows, lengths, strict=True)]
    check(find_matches(*contexts, config), texts, prompts, config)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
    found = find_matches(*contexts, config, torch.tensor(chosen))
    check(found, [texts[row] for row in chosen], [prompts[row] for row in chosen], config)


@pytest.mark.parametrize("backend", ["index", "torch"])
@given(history=histories(), config=configs())
def test_matcher_is_the_definition(backend: str, history: list[list[list[int]]], config: MatchConfig) -> None:
    feed(history, config, backend)


def test_an_older_but_longer_match_outranks_thousands_of_recent_ones() -> None:
    """Where many places follow the short gram, no back end may look at the recent ones alone."""
    draw = random.Random(0)
    gram, phrase = [1, 2, 3, 4, 5], [draw.randrange(10, 99) for _ in range(27)] + [1, 2, 3, 4, 5]
    text = [6, *phrase, 7, 8, 9]
    for _ in range(3000):
        text += [*gram, 100 + draw.randrange(50)]
    for limit in (32, 20, 5):
        config = MatchConfig(max_length=limit)
        context = text + phrase
        expected, candidates = brute_force(context, config)
        assert expected.count == 3001
        assert (expected.starts[0] == 33) == (limit > 5)  # where no more than kappa is measured, recency decides
        index = SuffixIndex(config, text, prompt=0)
        index.extend(phrase)
        assert index.find() == expected
        assert index.candidates(expected) == candidates
        found = find_matches(
            torch.tensor([context], dtype=torch.int32), torch.tensor([len(context)]), torch.tensor([0]), config
        )
        assert found.host() == [expected]


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_text_that_repeats_itself_keeps_few_places(period: int) -> None:
    """Memory and work must not grow with the occurrences: what a node keeps is bounded."""
    config = MatchConfig()
    index = SuffixIndex(config)
    text = [t % period for t in range(3000)]
    for at in range(0, len(text), 3):
        index.extend(text[at : at + 3])
    expected, candidates = brute_force(text, config)
    assert index.find() == expected
    assert index.candidates(expected) == candidates
    assert max(map(len, index._places)) <= 4 * (config.candidates + 1)
    assert len(index._path) <= config.max_length - config.kappa + 1


@given(st.lists(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=5), min_size=1, max_size=3))
def test_merging_is_the_definition(rows: list[list[list[int]]]) -> None:
    padded = torch.tensor([row + [[-1] * 4] * (5 - len(row)) for row in rows], dtype=torch.int32)
    tokens, parents = merge(padded)
    for row, candidates in enumerate(rows):
        expected, above = trie(candidates)
        unused = 20 - len(expected)
        assert tokens[row].tolist() == expected + [-1] * unused
        assert parents[row].tolist() == above + [-2] * unused


def test_candidates_outlive_growth() -> None:
    index = SuffixIndex(MatchConfig(kappa=2, depth=5), [1, 2, 3, 1, 2])
    matches = index.find()
    index.extend([9, 9, 9])
    assert index.candidates(matches) == [[3, 1, 2, 3, 1]]  # what followed lies before the context's end of that time


def test_summary_of_a_repeated_text() -> None:
    #                                         0  1  2  3  4  5  6  7  8  9 10
    index = SuffixIndex(MatchConfig(kappa=2), [7, 8, 1, 2, 5, 1, 2, 4, 8, 1, 2], prompt=7)
    matches = index.find()
    assert (matches.starts, matches.lengths, matches.count) == ((4, 7), (3, 2), 2)
    assert (matches.longest, matches.distance, matches.agreement, matches.in_prompt) == (3, 7, 0.5, True)


def test_nothing_found() -> None:
    matches = SuffixIndex(MatchConfig(kappa=3), [1, 2, 3, 4]).find()
    assert (matches.longest, matches.distance, matches.agreement, matches.count) == (0, 0, 0.0, 0)


@pytest.mark.parametrize("backend", ["index", "torch", "triton"])
def test_a_full_context_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        kernel = pytest.importorskip("activations.matching.kernel")
        monkeypatch.setattr(
            kernel, "append_tokens", lambda buffer, lengths, capacity, tokens, counts: lengths.add_(counts)
        )
    matcher = DeviceMatcher(2, 4, backend=backend)
    matcher.append(torch.ones(2, 3, dtype=torch.int64), torch.tensor([1, 3]))
    matcher.append(torch.ones(2, 3, dtype=torch.int64), torch.tensor([3, 1]))
    assert matcher.lengths.tolist() == [4, 4]
    with pytest.raises(ValueError, match="a context would have 5 tokens and the matcher holds 4"):
        matcher.append(torch.ones(2, 1, dtype=torch.int64), torch.tensor([0, 1]))
    matcher.reset(1)
    matcher.append(torch.ones(2, 1, dtype=torch.int64), torch.tensor([0, 1]))
    assert matcher.lengths.tolist() == [4, 1]


def test_bad_matchers_are_refused() -> None:
    with pytest.raises(ValueError, match="rows is 0 and capacity 8; both must be 1 or more"):
        DeviceMatcher(0, 8)
    with pytest.raises(ValueError, match="backend is 'cuda'; it must be 'triton', 'index', 'torch' or None"):
        DeviceMatcher(1, 8, backend="cuda")


def test_the_back_end_follows_the_device() -> None:
    assert DeviceMatcher(1, 8).backend == "index"
    assert DeviceMatcher(1, 8, device="meta").backend == "torch"


@pytest.mark.parametrize("setting", [{"kappa": 0}, {"candidates": 0}, {"depth": -1}])
def test_bad_setting(setting: dict[str, int]) -> None:
    name, value = next(iter(setting.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be 1 or more"):
        MatchConfig(**setting)


def test_bad_max_length() -> None:
    with pytest.raises(ValueError, match=r"max_length is 3; it must be at least kappa \(5\)"):
        MatchConfig(max_length=3)
