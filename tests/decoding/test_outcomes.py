"""What steps came to, and what false copies cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_steps import RECORDS, record

from decoding.costs import CostTable
from decoding.outcomes import NOTHING, FalseCopies, Outcome, false_copies, outcomes

COSTS = CostTable({}, [1, 13], [64], [[10.0, 22.0]], {}, 0.0, 0.0)


def test_steps_by_drafter_and_by_what_was_kept() -> None:
    assert outcomes(RECORDS) == [
        Outcome("copy", True, 1, 5, 21.5), Outcome("copy", False, 1, 1, 21.5),
        Outcome("eagle", True, 1, 2, 21.5), Outcome(NOTHING, False, 1, 1, 21.5),
    ]  # fmt: skip
    assert outcomes([]) == []


@given(st.lists(st.tuples(st.sampled_from([(), ("copy",), ("eagle", "copy")]), st.integers(0, 1)), max_size=20))
def test_nothing_is_lost_or_counted_twice(drawn: list) -> None:
    records = [record(i, source, min(kept, len(source))) for i, (source, kept) in enumerate(drawn)]
    found = outcomes(records)
    assert sum(o.steps for o in found) == len(records)
    assert sum(o.tokens for o in found) == sum(1 + len(r.accepted) for r in records)
    assert sum(o.milliseconds for o in found) == pytest.approx(21.5 * len(records))
    assert all(o.rate == pytest.approx(1e3 * o.tokens / o.milliseconds) for o in found)


def test_time_is_shared_by_the_requests_of_a_forward() -> None:
    [shared] = outcomes([replace(RECORDS[0], rows=4)])
    assert shared.milliseconds == 21.5 / 4
    assert Outcome("copy", True, 1, 1, 0.0).rate == 0.0


def test_a_false_copy_costs_what_a_step_alone_would_not_have_taken() -> None:
    beside = record(4, ("copy", "eagle"), 0)  # the head drafted as well: no false copy alone
    found = false_copies([*RECORDS, beside], COSTS)
    assert found == FalseCopies(steps=1, copy_steps=3, milliseconds=21.5, lost_ms=11.5, lost_tokens=1.15)
    assert false_copies([], COSTS) == FalseCopies(0, 0, 0, 0, 0)
