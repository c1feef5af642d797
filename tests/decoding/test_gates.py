"""Gates decide from the situation alone."""

from __future__ import annotations

import pytest

from decoding.budgets import FixedBudget
from decoding.gates import Always, Choice, MatchLengthGate, Never, ProbeGate, Situation

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
