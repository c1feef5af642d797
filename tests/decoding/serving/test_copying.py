"""The proposer that only copies, driven as vLLM's runner drives it: rows of requests that come, go, move and wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_matching import brute_force

from activations.matching import SuffixIndex
from decoding.serving.vllm.copying import SAMPLES, WAITS, CopyProposer, shortest_match

LIMIT, DRAFT, KAPPA = 64, 6, 2


def made(additional: Any = None, limit: int = LIMIT) -> CopyProposer:
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFT),
        model_config=SimpleNamespace(max_model_len=limit),
        additional_config={"switchsd": {"kappa": KAPPA}} if additional is None else additional,
    )
    return CopyProposer(config)


def step(proposer: CopyProposer, rows: list[list[int]], sampled: list[int], junk: int = 7) -> list[list[int]]:
    """One call: the rows' tokens, of which the last `sampled` are new; behind them stand old drafts."""
    buffer = np.full((len(rows) + 1, proposer.limit), junk, dtype=np.int32)
    for row, tokens in zip(buffer, rows, strict=False):
        row[: len(tokens)] = tokens
    lengths = np.array([len(tokens) for tokens in rows] + [0], dtype=np.int32)
    news = [tokens[len(tokens) - count :] if count else [] for tokens, count in zip(rows, sampled, strict=True)]
    return proposer.propose(news, lengths, buffer)


def expected(tokens: list[int], proposer: CopyProposer) -> list[int]:
    candidates = brute_force(tokens, proposer.config)[1]
    return candidates[0][: proposer.limit - len(tokens)] if candidates else []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_drafts_are_those_of_each_rows_own_context(data: st.DataObject) -> None:
    """Whatever the rows do: requests end, others take their rows (often with the same length), rows change places,
    requests wait for some steps, prompts are read in pieces."""
    proposer = made()
    token = st.integers(0, 2)
    running: list[list[int]] = []
    waiting: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.lists(st.sampled_from(["end", "new", "like", "move", "wait", "back"]), max_size=4))
        for action in what:
            if action == "new":
                running.append(data.draw(st.lists(token, min_size=1, max_size=20)))
            elif action == "like" and running:  # the same length as one that runs, or ended
                running.append(data.draw(st.lists(token, min_size=len(running[0]), max_size=len(running[0]))))
            elif action == "end" and running:
                running.pop(0)
            elif action == "move" and len(running) > 1:
                running = data.draw(st.permutations(running))
            elif action == "wait" and running:
                waiting.append(running.pop())
            elif action == "back" and waiting:
                running.append(waiting.pop())
        running = [tokens for tokens in running if len(tokens) < LIMIT - DRAFT]
        reading = [data.draw(st.integers(0, 5)) == 0 for _ in running]
        news = [[] if still else data.draw(st.lists(token, min_size=1, max_size=3)) for still in reading]
        for tokens, new in zip(running, news, strict=True):
            tokens.extend(new)
        drafts = step(proposer, running, [len(new) for new in news])
        for tokens, new, draft in zip(running, news, drafts, strict=True):
            assert draft == (expected(tokens, proposer) if new else [])


def test_a_step_reads_only_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rows that move nor a request that waits a few steps has its context read again; a new one has."""
    read: list[int] = []
    extend = SuffixIndex.extend
    monkeypatch.setattr(SuffixIndex, "extend", lambda index, new: (read.append(len(new)), extend(index, new))[1])
    proposer = made(limit=3000)
    first, second = [int(t) for t in np.arange(1000) % 17], [int(t) for t in np.arange(1500) % 13]
    step(proposer, [[*first, 1], [*second, 2]], [1, 1])
    assert read == [0, 1001, 0, 1501]
    read.clear()
    step(proposer, [[*second, 2, 3], [*first, 1, 5, 6]], [1, 2])
    assert read == [1, 2]
    for _ in range(WAITS):
        step(proposer, [[*second, 2, 3]], [0])
    read.clear()
    step(proposer, [[*first, 1, 5, 6, 7]], [1])
    assert read == [1]
    step(proposer, [[*first[::-1], 1, 5, 6, 7]], [1])  # as long and with the same end, and another request
    assert read[1:] == [0, 1004]


def test_two_requests_of_one_text_have_a_context_each() -> None:
    proposer = made()
    text = [1, 2, 3, 4, 1, 2]
    step(proposer, [text, text], [1, 1])
    assert step(proposer, [[*text, 3], [*text, 9]], [1, 1]) == [[4, 1, 2, 3, 4, 1], []]
    assert step(proposer, [[*text, 3, 4], [*text, 9, 1]], [1, 1]) == [[1, 2, 3, 4, 1, 2], []]


def test_contexts_of_ended_requests_are_forgotten() -> None:
    proposer = made()
    for request in range(50):
        step(proposer, [[request] * (SAMPLES + 1)], [1])
    assert sum(map(len, proposer._known.values())) <= WAITS + 1


def test_the_end_of_the_context_is_never_passed() -> None:
    proposer = made(limit=10)
    assert step(proposer, [[1, 2, 3, 1, 2, 3, 1, 2]], [1]) == [[3, 1]]
    assert step(proposer, [[1, 2, 3, 1, 2, 3, 1, 2, 3, 1]], [2]) == [[]]


@pytest.mark.parametrize("values", [{"kappa": 0}, {"kappa": True}, {"kappa": "5"}, {"probe": "p"}, [1]])
def test_wrong_settings_are_named(values: Any) -> None:
    with pytest.raises(ValueError, match=r"additional_config\.switchsd"):
        made({"switchsd": values})


def test_settings() -> None:
    assert shortest_match({}) == shortest_match(None) == 5
    assert shortest_match({"switchsd": {"kappa": 40}}) == 40
    assert made({"switchsd": {"kappa": 40}}).config.max_length == 40
