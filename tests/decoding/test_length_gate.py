"""The cost gate on a length head, in situations whose best choice is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from activations.matching.match import Matches
from activations.target import Fingerprint
from decoding.budgets import FixedBudget
from decoding.costs import CostTable
from decoding.gates import BanditGate, Choice, Decision, Situation
from decoding.length_gate import LengthGate
from decoding.trace import StepRecord
from decoding.tree import DraftTree
from probes.length_head import JOINT, LengthConfig, LengthHead
from probes.surface import FEATURES

COPY, EAGLE = Choice("copy", FixedBudget(31, 20)), Choice("eagle", FixedBudget(7, 3))
CHAIN = list(range(100, 120))


def logit(p: float) -> float:
    p = min(max(p, 1e-12), 1 - 1e-12)
    return math.log(p / (1 - p))


def head(copy: float, eagle: float | None) -> LengthHead:
    """A head that gives every token of a drafter one chance of being accepted, whatever the situation."""
    drafts = {"copy": 20} if eagle is None else {"copy": 20, "eagle": 3}
    config = LengthConfig(
        sites=(), width=8, drafts=drafts, features=FEATURES, kappa=1, target=Fingerprint("", 8, 2, "", ""),
        target_name="small", split={}, metrics={}, provenance={},
    )  # fmt: skip
    tensors = {}
    for name, p in (("copy", copy), ("eagle", eagle)):
        if p is not None:
            made = {
                "state": torch.zeros(1, 0),
                "features": torch.zeros(1, len(FEATURES)),
                "bias": torch.tensor([logit(p)]),
            }
            tensors |= {f"{name}.{k}": v for k, v in made.items()}
    if eagle is not None:
        tensors["eagle.joint"] = torch.tensor([0.0, 1.0, 0.0]).expand(JOINT).clone()
        tensors["eagle.joint"][:2] = torch.tensor([1.0, 0.0, 0.0])
    return LengthHead(config, tensors)


def table(base: float, node: float, draft: float) -> CostTable:
    return CostTable({}, [1, 64], [64], [[base, base + 63 * node]], {"eagle": [draft * i for i in range(1, 9)]}, 0, 0)


def at(match: bool = True, room: int = 50, request: int = 0) -> Situation:
    if not match:
        return Situation(length=100, room=room, request=request, prompt=50, readings=(0.0, 0.0))
    matches = Matches(100, 1, (40,), (5,), 1.0)
    return Situation(100, room, 5, None, request, 50, matches, [CHAIN], None, (0.0, 0.0))


def record(tree: DraftTree, path: list[int], pending: int, decision: Decision, request: int = 0) -> StepRecord:
    return StepRecord(
        request=request, step=0, start=0.0, position=99, mode="switchsd", drafters=tuple(n for n, _ in decision.drafts),
        reason=decision.reason, intent=None, match_length=5, match_start=40, tokens=tuple(tree.tokens),
        parents=tuple(tree.parents), source=tuple(tree.source), logq=tuple(tree.logq), accepted=tuple(path),
        pending=pending, rows=1, draft_ms=0.0, verify_ms=50.0, overhead_ms=0.0,
    )  # fmt: skip


def drafts(decision: Decision) -> dict[str, int]:
    return {name: budget.nodes for name, budget in decision.drafts}


def test_it_abstains_where_no_draft_is_worth_its_time() -> None:
    gate = LengthGate(table(40, 4, 10), head(0.05, 0.1), COPY, EAGLE)
    decision = gate.choose(at())
    assert decision.drafts == () and decision.reason == "no draft is worth its time" and decision.trim is None


def test_a_sure_copy_is_taken_whole_and_a_doubtful_one_in_part() -> None:
    costs = table(40, 1, 5)
    sure = drafts(LengthGate(costs, head(0.99, 0.3), COPY, EAGLE).choose(at()))
    doubtful = drafts(LengthGate(costs, head(0.6, None), COPY).choose(at()))
    assert sure == {"copy": 20}
    assert list(doubtful) == ["copy"] and 1 <= doubtful["copy"] <= 7
    assert drafts(LengthGate(costs, head(0.99, 0.3), COPY, EAGLE).choose(at(room=4))) == {"copy": 4}


def test_without_a_match_the_neural_side_drafts() -> None:
    assert list(drafts(LengthGate(table(40, 1, 2), head(0.9, 0.6), COPY, EAGLE).choose(at(match=False)))) == ["eagle"]
    assert LengthGate(table(40, 1, 2), head(0.9, None), COPY, EAGLE).choose(at(match=False)).drafts == ()


def test_where_verifying_is_free_both_draft_and_other_candidates_fill_the_width() -> None:
    decision = LengthGate(table(40, 0, 1), head(0.5, 0.5), COPY, EAGLE).choose(at())
    assert [name for name, _ in decision.drafts] == ["eagle", "copy"]  # the head's nodes are merged first
    assert drafts(decision)["copy"] == COPY.budget.nodes and decision.drafts[1][1].depth == 20


def test_a_merged_tree_is_trimmed_to_what_is_worth_verifying() -> None:
    decision = LengthGate(table(40, 1, 1), head(0.5, 0.5), COPY, EAGLE).choose(at())
    assert decision.trim is not None and set(drafts(decision)) == {"copy", "eagle"}
    eagle = DraftTree([100, 7, 8], [-1, -1, 1], ["eagle"] * 3, [math.log(0.8), math.log(0.01), math.log(0.01)])
    tree = decision.trim(DraftTree.merge([eagle, DraftTree.chain(CHAIN, "copy")]))
    assert tree.tokens[0] == 100 and 7 not in tree.tokens and 1 < len(tree) < 12
    assert tree.tokens == CHAIN[: len(tree)]


@given(
    st.floats(0.02, 0.98), st.floats(0.02, 0.98), st.floats(5, 80), st.floats(0, 5), st.floats(0, 20),
    st.integers(1, 30), st.booleans(),
)  # fmt: skip
def test_no_other_option_has_a_higher_expected_rate(
    copy: float, eagle: float, base: float, node: float, draft: float, room: int, match: bool
) -> None:
    """Rates by their definitions: expected tokens, for independent drafts the larger of two lengths, over costs."""
    costs, situation = table(base, node, draft), at(match, room)
    gate = LengthGate(costs, head(copy, eagle), COPY, EAGLE)
    copied = [copy**k for k in range(1, min(20, room) + 1)] if match else []
    drafted = [eagle**k for k in range(1, min(3, room) + 1)]
    neural = 1 + sum(drafted), costs.draft("eagle", min(3, room)) + costs.verify(1 + 5, 100)
    rates = {(): 1 / costs.verify(1, 100), ("eagle",): neural[0] / neural[1]}
    widths = [w for w in (*gate.config.widths, len(copied)) if 0 < w <= len(copied)]
    for w in widths:
        alone = (1 + sum(copied[:w])) / costs.verify(1 + w, 100)
        rates["copy",] = max(rates.get(("copy",), 0.0), alone)
        longest = 1.0
        for k in range(max(w, len(drafted))):
            p, q = copied[k] if k < w else 0.0, drafted[k] if k < len(drafted) else 0.0
            longest += 1 - (1 - p) * (1 - q)
        time = costs.draft("eagle", min(3, room)) + costs.verify(1 + 0.8 * (w + 5), 100)
        rates["eagle", "copy"] = max(rates.get(("eagle", "copy"), 0.0), longest / time)
    chosen = tuple(name for name, _ in gate.choose(situation).drafts)
    assert rates[chosen] >= max(rates.values()) * (1 - 1e-6)


def test_what_came_shifts_a_requests_own_estimates() -> None:
    """A copy that is never followed is copied less, whether it was drafted or not; other requests are left alone."""
    gate = LengthGate(table(40, 12, 50), head(0.7, 0.1), COPY, EAGLE)
    before = drafts(gate.choose(at()))["copy"]
    for _ in range(40):
        decision = gate.choose(at())
        tree = DraftTree.chain(CHAIN[:3], "copy")
        gate.observe(record(tree, [], 1, decision))
    assert gate.choose(at()).drafts == ()
    assert drafts(gate.choose(at(request=1)))["copy"] == before
    for _ in range(60):  # nothing is drafted any more, and yet the text follows the candidate
        decision = gate.choose(at())
        gate.observe(record(DraftTree((), (), (), ()), [], CHAIN[0], decision))
    assert drafts(gate.choose(at()))["copy"] >= before


def test_sizes_of_the_heads_trees_are_learnt() -> None:
    costs = table(40, 3, 1)
    gate = LengthGate(costs, head(0.5, 0.5), COPY, EAGLE)
    assert gate.options([], [0.5], 100)[1].milliseconds == pytest.approx(costs.draft("eagle", 1) + 40 + 5 * 3)
    for _ in range(100):
        decision = replace(gate.choose(at(match=False)), drafts=(("eagle", EAGLE.budget),))
        gate.observe(record(DraftTree.chain([1], "eagle"), [0], 5, decision))
    assert gate.options([], [0.5], 100)[1].milliseconds == pytest.approx(costs.draft("eagle", 1) + 43, abs=0.1)


def test_the_bandit_takes_what_has_paid() -> None:
    gate = BanditGate(COPY, EAGLE)
    assert list(drafts(gate.choose(at(match=False)))) == ["eagle"]
    taken = []
    for _ in range(60):
        decision = gate.choose(at())
        name = next(iter(drafts(decision)))
        taken.append(name)
        accepted = 4 if name == "copy" else 1
        gate.observe(record(DraftTree.chain(CHAIN[:5], name), list(range(accepted)), 1, decision))
    assert taken[:2] == ["copy", "eagle"] and taken[-30:].count("copy") > 20
    gate.observe(record(DraftTree.chain([1], "eagle"), [0], 1, Decision((("eagle", EAGLE.budget),), "no match")))
    assert sum(gate._pulls.values()) == 60
