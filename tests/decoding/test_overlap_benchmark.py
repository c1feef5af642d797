"""The benchmark of overlapped decoding: its window, its rows and what they are summed up to."""

from __future__ import annotations

from typing import Any

import pytest
from schedules import Guesser, HashTarget, truth
from small import maker

from activations.sampling import Sampling
from decoding.minedraft.scheduler import OverlappedScheduler
from decoding.request import Request
from decoding.scheduler import SequentialScheduler


@pytest.mark.parametrize(("kind", "halves"), [(SequentialScheduler, 1), (OverlappedScheduler, 2)])
def test_a_window_counts_whole_steps_of_all_requests(kind: Any, halves: int) -> None:
    overlap = maker("overlap")
    requests = [Request(i, [i + 1], max_new_tokens=10_000) for i in range(4)]
    texts = {r.number: truth(r.prompt, Sampling(), r.number, 40) for r in requests}
    drafter = Guesser(texts, 1.0)
    engine = overlap.TimedEngine(HashTarget(), overlap.plan_for(drafter, 3), 4)
    found = overlap.window(kind, engine, requests, 5)
    assert len(found.steps) == 5 * halves
    assert all(step["verified"] == 4 / halves == step["drafted"] for step in found.steps)
    assert not engine.requests and not drafter.open
    row = found.row()
    tokens = sum(step["tokens"] for step in found.steps)
    assert row["per_step"] == tokens / (5 * 4) and row["steps"] == 5 * halves
    for number, text in enumerate(row["texts"]):
        wanted = texts[number]
        assert text[: len(wanted)] == wanted[: len(text)]


def rows(gain: float) -> list[dict[str, Any]]:
    """t(2) = 10, V(2) = 20, t(4) = 15, V(4) = 25; half-steps of 22 ms."""
    made = []
    for number in range(3):
        for system, count, t, v, step in (
            ("sd", 2, 10, 20, 30), ("sd", 4, 15, 25, 41), ("minedraft", 4, 11, 22, 22), ("sd-here", 4, 9, 21, 30)
        ):  # fmt: skip
            rate = {"minedraft": 100 * gain, "sd-here": 80}.get(system, 100)
            text = [[1, 2, 3], [4, 5], [6], [7, 7 if system == "sd" else 8]]
            made.append(
                {"drafter": "cut:2", "system": system, "rows": count, "k": 2, "round": number, "draft_ms": t,
                 "verify_ms": v, "step_ms": step, "tokens_per_second": rate, "texts": text[:count]}
            )  # fmt: skip
    return made


def test_the_summary() -> None:
    overlap = maker("overlap")
    [one] = overlap.summary(rows(0.9))
    assert (one["m"], one["k"], one["rounds"]) == (2, 2, 3)
    assert one["gain"][0] == pytest.approx(0.9) and one["gain_over_here"][0] == pytest.approx(90 / 80)
    assert one["predicted"][0] == 1.0 and one["efficiency"][0] == pytest.approx(30 / 22)
    assert one["ideal_efficiency"][0] == 1.5 and one["rho"][0] == pytest.approx(0.1)
    assert one["step_gain"][0] == pytest.approx(41 / 44)
    assert (one["same_texts"], one["texts"]) == (9, 12)
    assert "| cut:2 | 2 | 2 | 10.0 | 20.0 | 15.0 | 25.0 | 11.0 | 22.0 | 41.0 | 22.0 |" in overlap.markdown([one])
    assert overlap.tables(rows(1.0)) == {
        "cut:2": {"draft_ms": {2: {2: 10.0}, 4: {2: 15.0}}, "verify_ms": {2: {2: 20.0}, 4: {2: 25.0}}}
    }
    assert overlap.summary(rows(0.9)[:2]) == []  # nothing to compare yet
