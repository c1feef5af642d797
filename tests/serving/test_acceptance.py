"""How many drafted tokens are kept in one vLLM: its own drafters beside the switch. The text is the same everywhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import TOKENS, engine, prompts, settings

from decoding.peers.process import Peer, Served

HEAVY, LIGHT = 8, 6
DRAFTERS = ("ngram", "suffix", "eagle3")
SUFFIX = importlib.util.find_spec("arctic_inference") is not None


def per_step(answers: list[Served]) -> float:
    """Accepted tokens a step."""
    return sum(a.decoded for a in answers) / sum(a.steps for a in answers) - 1


def test_the_switch_keeps_more_than_the_head_where_much_is_repeated(
    switch: Peer, written: Callable[..., list[list[int]]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = prompts(HEAVY, LIGHT)
    expected = written(asked)
    found = {}
    before = switch.ask_all(asked[-1:], 1).counters
    for column in (*(d for d in DRAFTERS if d != "suffix" or SUFFIX), "switchsd"):
        peer = switch if column == "switchsd" else engine(column, settings(column), folder)
        batch = peer.ask_all(asked, TOKENS)
        if peer is not switch:
            peer.close()
        assert [a.tokens for a in batch.answers] == expected, column
        assert all(a.drafted >= a.decoded - a.steps for a in batch.answers), column
        found[column] = (per_step(batch.answers[:HEAVY]), per_step(batch.answers[HEAVY:]))
    with capsys.disabled():
        print("\naccepted tokens a step, copy-heavy prompts and others:")
        for column, (heavy, light) in found.items():
            print(f"  {column:10} {heavy:.2f} {light:.2f}")
    assert found["switchsd"][0] >= found["eagle3"][0] > 0
    counted = {name: value - before.get(name, 0) for name, value in batch.counters.items()}
    assert counted["switchsd:copy_steps"] > 0
    assert counted["switchsd:copied_tokens"] > counted["switchsd:copied_tokens_kept"] > 0
    assert counted["switchsd:row_steps"] > counted["switchsd:copy_steps"] >= counted["switchsd:false_copies"]
    assert counted["switchsd:probe_score_count"] >= counted["switchsd:copy_steps"]
