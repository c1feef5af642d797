"""Gates decide from the situation alone."""

from __future__ import annotations

import pytest

from decoding.budgets import FixedBudget
from decoding.costs import CostTable
from decoding.gates import Always, Choice, CostGate, CostGateConfig, MatchLengthGate, Never, ProbeGate, Situation
from decoding.trace import StepRecord

COPY, EAGLE = Choice("copy", FixedBudget(20, 20)), Choice("eagle", FixedBudget(15, 5))


def at(match: int = 0, intent: float | None = None, room: int = 50) -> Situation:
    return Situation(length=100, room=room, match_length=match, intent=intent)


def names(decision) -> list[str]:  # type: ignore[no-untyped-def]
    return [name for name, _ in decision.drafts]


def test_simple_gates() -> None:
    assert names(Never().choose(at(9, 1.0))) == []
    assert names(Always(EAGLE).choose(at())) == ["eagle"]
    gate = MatchLengthGate(COPY, EAGLE, 7)
    assert names(gate.choose(at(7))) == ["copy"] and gate.choose(at(7)).copies
    assert names(gate.choose(at(6))) == ["eagle"] and not gate.choose(at(6)).copies
    assert names(MatchLengthGate(COPY).choose(at(0))) == []


def test_probe_gate_is_switchsds_rule() -> None:
    gate = ProbeGate(COPY, EAGLE, tau=0.6)
    cases = {(5, 0.6): "copy", (5, 0.59): "eagle", (0, 0.99): "eagle", (0, None): "eagle"}
    for (match, intent), name in cases.items():
        assert names(gate.choose(at(match, intent))) == [name]
    reasons = {gate.choose(at(m, i)).reason for m, i in cases}
    assert reasons == {"intent", "no intent", "no match"}
    assert names(ProbeGate(COPY, None, 0.6).choose(at(5, 0.1))) == []
    with pytest.raises(ValueError, match="needs the probe's output"):
        gate.choose(at(5, None))
    with pytest.raises(ValueError, match=r"tau is 1\.5"):
        ProbeGate(COPY, EAGLE, 1.5)


def table(verify: list[float], draft: float) -> CostTable:
    return CostTable({}, [1, 16, 32], [64], [verify], {"eagle": [draft] * 5}, 0.0, 0.0)


def record(source: str, drafted: int, accepted: int, match: int = 5, intent: float = 0.9) -> StepRecord:
    return StepRecord(
        request=0, step=0, start=0.0, position=0, mode="switchsd", drafters=(source,), reason="", intent=intent,
        match_length=match, match_start=0, tokens=(1,) * drafted, parents=tuple(range(-1, drafted - 1)),
        source=(source,) * drafted, logq=(0.0,) * drafted, accepted=tuple(range(accepted)), pending=1, rows=1,
        draft_ms=0.0, verify_ms=1.0, overhead_ms=0.0,
    )  # fmt: skip


def test_cost_gate_follows_the_costs() -> None:
    flat = table([40.0, 40.0, 40.0], draft=1.0)
    gate = CostGate(flat, COPY, EAGLE)
    assert names(gate.choose(at(5, 0.95))) == ["copy"]
    assert names(gate.choose(at(5, 0.01))) == ["eagle"], "a copy that is not followed brings less than a draft"
    assert names(gate.choose(at(0, 0.95))) == ["eagle"]
    steep = table([40.0, 400.0, 800.0], draft=1.0)
    assert names(CostGate(steep, COPY, EAGLE).choose(at(0))) == [], "verifying a tree costs ten steps"
    assert names(CostGate(table([40.0, 60.0, 80.0], draft=200.0), COPY, EAGLE).choose(at(0))) == []


def test_cost_gate_drafts_no_more_than_is_worth_verifying() -> None:
    cheap, dear = table([40.0, 41.0, 42.0], 1.0), table([40.0, 60.0, 80.0], 1.0)
    sizes = [CostGate(t, COPY).choose(at(5, 0.95)).drafts[0][1].nodes for t in (cheap, dear)]
    assert sizes[0] > sizes[1] >= 1
    short = CostGate(cheap, COPY).choose(at(5, 0.95, room=3)).drafts[0][1].nodes
    assert short <= 3


def test_cost_gate_learns_from_what_is_accepted() -> None:
    costs = table([40.0, 60.0, 80.0], draft=10.0)
    gate = CostGate(costs, COPY, EAGLE, CostGateConfig(memory=16))
    assert names(gate.choose(at(5, 0.9))) == ["copy"]
    for _ in range(80):
        gate.observe(record("copy", 10, 0))
    assert names(gate.choose(at(5, 0.9))) != ["copy"]
    assert names(gate.choose(at(0))) == ["eagle"]
    for _ in range(80):
        gate.observe(record("eagle", 10, 0))
    assert names(gate.choose(at(0))) == []
    for _ in range(80):
        gate.observe(record("copy", 10, 10))
    assert names(gate.choose(at(5, 0.9))) == ["copy"]
