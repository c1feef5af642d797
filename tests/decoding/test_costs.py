"""Cost tables: look-ups between the points, files, and what is measured (never how fast)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_eagle_head import random_head

from decoding import costs
from decoding.costs import CostError, CostTable
from decoding.draft.drafter import DraftModelDrafter
from decoding.drafters import CopyDrafter
from decoding.eagle.drafter import EagleDrafter

TABLE = CostTable(
    key={"target": "t"}, widths=[1, 8, 16], contexts=[64, 256], verify_ms=[[10.0, 17.0, 33.0], [20.0, 27.0, 43.0]],
    draft_ms={"eagle": [1.0, 3.0, 5.0]}, probe_ms=0.1, match_ms=0.2,
)  # fmt: skip


def test_measured_points_are_returned_as_they_are() -> None:
    for i, context in enumerate(TABLE.contexts):
        for j, width in enumerate(TABLE.widths):
            assert TABLE.verify(width, context) == TABLE.verify_ms[i][j]
    assert [TABLE.draft("eagle", d) for d in (1, 2, 3)] == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("width", "context", "wanted"),
    [(2, 64, 11.0), (12, 64, 25.0), (24, 64, 49.0), (1, 160, 15.0), (8, 448, 37.0), (1, 5, 10.0), (12, 160, 30.0)],
)
def test_between_and_beyond_the_points(width: int, context: int, wanted: float) -> None:
    assert TABLE.verify(width, context) == pytest.approx(wanted)


def test_draft_beyond_the_points() -> None:
    assert TABLE.draft("eagle", 5) == pytest.approx(9.0)
    assert TABLE.draft("unknown", 3) == 0.0


def test_round_trip_and_broken_files(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "costs.json"
    TABLE.save(file)
    assert CostTable.load(file) == TABLE
    for content in ("", "[]", '{"version": 99}', '{"version": 1, "widths": []}'):
        file.write_text(content)
        with pytest.raises(CostError, match="switchsd profile"):
            CostTable.load(file)


def test_measure_fills_every_point(small_target, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    probe = SimpleNamespace(
        config=SimpleNamespace(sites=("resid_mid.1",)), score=lambda state: torch.sigmoid(state.sum(-1))
    )
    found = costs.measure(target, [CopyDrafter()], probe, budget_seconds=0.2)  # type: ignore[arg-type]
    assert found.contexts == [64] and found.widths == [w for w in costs.WIDTHS if w + 64 <= target.max_length]
    assert all(ms > 0 for row in found.verify_ms for ms in row)
    assert len(found.draft_ms["copy"]) == len(costs.DEPTHS)
    assert found.probe_ms > 0 and found.match_ms > 0


def test_a_head_is_measured_at_every_depth(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    drafter = EagleDrafter(target, random_head())
    found = costs.measure(target, [drafter], budget_seconds=0.2)
    assert len(found.draft_ms["eagle"]) == len(costs.DEPTHS)
    assert not drafter._states


def test_first_use_measures_and_later_uses_read(small_target, own_cost_tables, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SWITCHSD_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "costs_file", own_cost_tables)
    measured, added = [], []

    def fake(target, drafters=(), probe=None):  # type: ignore[no-untyped-def]
        measured.append(drafters)
        table = replace(TABLE, match_ms=float(len(measured)), draft_ms={})
        return costs.with_drafters(table, target, drafters, 1.0)

    def drafted(target, drafter, deadline):  # type: ignore[no-untyped-def]
        added.append(drafter)
        return [1.0, 2.0]

    monkeypatch.setattr(costs, "measure", fake)
    monkeypatch.setattr(costs, "_draft_ms", drafted)
    target = small_target("llama")
    assert costs.cached_costs(target) is None
    assert costs.get_costs(target) == costs.get_costs(target) == costs.cached_costs(target)
    assert len(measured) == 1
    copy = CopyDrafter()
    assert costs.cached_costs(target, [copy]) is None
    for _ in range(2):
        found = costs.get_costs(target, [copy])
        assert found.draft_ms == {"copy": [1.0, 2.0]} and len(added) == 1, "only what is missing is measured"
    sized: Any = CopyDrafter()
    sized.size = {"blocks": 2}
    assert costs.get_costs(target, [sized]).knows(sized) and len(added) == 2, "another drafter of the name"
    assert not costs.get_costs(target).knows(copy)
    assert len(measured) == 1
    costs.costs_file(target).write_text("broken")
    assert costs.get_costs(target, [copy]).match_ms == 2.0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    costs.get_costs(target)
    assert len(measured) == 3, "another number of threads has costs of its own"


def test_several_drafters_in_one_table(small_target) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    drafter = DraftModelDrafter(target, target)
    found = costs.measure(target, [CopyDrafter(), drafter], budget_seconds=0.2)
    assert set(found.draft_ms) == {"copy", "draft"} and found.knows(drafter)
    assert len(found.draft_ms["draft"]) == len(costs.DEPTHS) and not drafter._held
