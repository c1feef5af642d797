"""Rows of the cache as requests come and go, and the packed input."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from decoding.drafters import CopyDrafter
from decoding.engine import Engine
from decoding.gates import Decision, Never, Situation
from decoding.modes import ModeSettings, Parts, get_mode
from decoding.packing import pack
from decoding.request import Request
from decoding.tree import DraftTree

PROMPTS = [[1, 5, 9, 5, 9, 5], [2, 7, 7], [30, 31, 32, 30, 31, 32, 30, 31], [4]]
LEAVERS = [c for n in (1, 2, 3) for c in itertools.combinations(range(4), n)]


@pytest.mark.parametrize("mode", ["ar", "copy"])
@pytest.mark.parametrize("gone", LEAVERS)
def test_requests_that_stay_are_not_disturbed(gone, mode, small_target) -> None:  # type: ignore[no-untyped-def]
    """Against each request alone in an engine of one row."""
    target = small_target("llama")

    def engine(rows: int) -> Engine:
        plan = get_mode(mode).build(Parts(target, ModeSettings(kappa=2, copy_nodes=4)))
        return Engine(target, plan, rows)

    alone = []
    for prompt in PROMPTS:
        single, request = engine(1), Request(0, prompt, max_new_tokens=99)
        single.admit(request)
        for _ in range(8):
            single.verify(single.draft())
        alone.append(request.tokens)
        single.close()
    together = engine(4)
    requests = [Request(i, p, max_new_tokens=99) for i, p in enumerate(PROMPTS)]
    for request in requests:
        together.admit(request)
    for _ in range(3):
        together.verify(together.draft())
    together.leave([requests[i] for i in gone])
    together.verify(together.draft())
    again = Request(9, PROMPTS[gone[0]], max_new_tokens=99)  # a freed row is taken
    together.admit(again)
    together.verify(together.draft())
    together.leave([again])
    for _ in range(3):
        together.verify(together.draft())
    for i, request in enumerate(requests):
        assert request.tokens == alone[i][: len(request.tokens)]
        assert (len(request.tokens) > len(PROMPTS[i]) + 8) or i in gone
    assert again.tokens == alone[gone[0]][: len(again.tokens)]
    assert set(together.requests) == {r for i, r in enumerate(requests) if i not in gone}
    drafters = [d for d in together.plan.drafters if isinstance(d, CopyDrafter)]
    assert all(set(d._indices) == set(together.requests) for d in drafters)
    together.close()


def test_packing_pads_rows_and_draws_ancestors() -> None:
    forked = DraftTree([11, 12, 13], [-1, 0, -1], ["a"] * 3, [0.0] * 3)
    tokens, ancestors, depths = pack([5, 6], [forked, DraftTree.chain([21], "a")], 3)
    assert tokens.tolist() == [[5, 11, 12, 13], [6, 21, 0, 0], [0, 0, 0, 0]]
    assert ancestors is not None and depths is not None
    assert depths.tolist() == [[0, 1, 2, 1], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert ancestors[0].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert ancestors[1].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert np.array_equal(ancestors[2], np.eye(4, dtype=bool))


def test_unused_nodes_see_the_context_and_themselves() -> None:
    padded = DraftTree([11, 0], [-1, -2], ["a", "a"], [0.0, 0.0])
    _, ancestors, depths = pack([5], [padded], 1)
    assert ancestors is not None and depths is not None
    assert ancestors[0].astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    assert depths.tolist() == [[0, 1, 0]]


def test_without_drafts_nothing_but_the_pending_tokens_is_packed() -> None:
    empty = DraftTree((), (), (), ())
    tokens, ancestors, depths = pack([5, 6], [empty, empty], 2)
    assert tokens.tolist() == [[5], [6]] and ancestors is None and depths is None


def test_a_gate_sees_the_longest_match_of_the_candidates(small_target) -> None:  # type: ignore[no-untyped-def]
    """What the rows of a capture store call match_length, not the length of the most recent candidate."""
    seen: list[Situation] = []

    class Seeing(Never):
        def choose(self, situation: Situation) -> Decision:
            seen.append(situation)
            return super().choose(situation)

    target = small_target("llama")
    plan = replace(get_mode("copy").build(Parts(target, ModeSettings(kappa=2))), gate=Seeing())
    engine, request = Engine(target, plan), Request(0, [1, 2, 3, 4, 9, 8, 3, 4, 7, 2, 3], max_new_tokens=9)
    engine.admit(request)
    request.tokens[-1] = 4  # ... 2 3 4 stands at the start, 3 4 more recently
    plan.drafters[0].start(request, None)
    [draft] = engine.draft()
    assert draft.matches is not None and draft.matches.lengths == (3, 2)
    assert [s.match_length for s in seen] == [3]
    engine.close()
