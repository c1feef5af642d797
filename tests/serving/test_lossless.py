"""Whatever is drafted, vLLM writes the target's own greedy text: mixed batches, prompts in pieces, known prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import BUDGET, TOKENS, engine, prompts, settings

from decoding.peers.process import Peer

Texts = Callable[..., list[list[int]]]


def fifty() -> list[list[int]]:
    """Prompts of many lengths; the last twelve begin as others do."""
    first = prompts(16, 22)
    longest = sorted(first, key=len)[-12:]
    return first + [long[: len(long) // 2] + short for long, short in zip(longest, first, strict=False)]


@pytest.fixture(scope="module")
def three(folder: Path) -> Iterator[Peer]:
    """Three tokens a draft."""
    peer = engine("three", settings("switchsd", 3), folder)
    yield peer
    peer.close()


@pytest.mark.parametrize("name", ["three", "switch"])
def test_greedy_text_is_the_targets_own(name: str, written: Texts, request: pytest.FixtureRequest) -> None:
    asked = fifty()
    expected = written(asked)
    peer: Peer = request.getfixturevalue(name)
    first = peer.ask_all(asked, TOKENS)
    again = peer.ask_all(asked, TOKENS)
    for batch in (first, again):
        assert [a.tokens for a in batch.answers] == expected
        assert sum(a.decoded for a in batch.answers) > 1.3 * sum(a.steps for a in batch.answers), "drafts were kept"
    assert sum(a.prompt_forwards > 1 for a in first.answers) >= 10, "prompts are read in pieces"
    assert max(map(len, asked)) > BUDGET
    assert sum(a.cached > 0 for a in first.answers) >= 10, "beginnings are shared"
    assert all(a.cached >= len(p) - 2 * 32 - 1 for a, p in zip(again.answers, asked, strict=True)), "known but the end"
    assert max(first.forwards, again.forwards) < sum(a.steps for a in first.answers), "many at a time"
