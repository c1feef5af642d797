"""Rows of a cache that requests hold, and views of them."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from activations.cache import WIDE, KVCache
from decoding.request import Request
from decoding.rows import Rows


def write(cache: KVCache, marks: list[list[int]]) -> None:
    """Each row gets its marks as new committed slots, in two layers."""
    new = max(map(len, marks))
    states = torch.zeros(cache.rows, 1, new, 1)
    for row, mine in enumerate(marks):
        states[row, 0, : len(mine), 0] = torch.tensor(mine)
    for layer in range(2):
        keys, _ = cache.update(states, states + layer, layer)
        for row, mine in enumerate(marks):
            start = cache.lengths[row]
            assert keys[row, 0, start : start + len(mine), 0].tolist() == mine
    cache.commit([range(len(mine)) for mine in marks])


def held(rows: Rows, request: Request) -> list[int]:
    row = rows.requests.index(request)
    length = rows.length(request)
    found = [rows.cache.keys[layer][row, 0, :length, 0].int().tolist() for layer in range(2)]
    assert found[0] == found[1]
    return found[0]


@settings(max_examples=80, deadline=None)
@given(most=st.sampled_from([1, 3, 6, WIDE + 2]), seed=st.integers(0, 10**6), steps=st.integers(1, 25))
def test_every_request_keeps_what_was_written_for_it(most: int, seed: int, steps: int) -> None:
    """Against a list a request, over random admissions, forwards of some requests, copies and leavings."""
    rng = random.Random(seed)
    rows, wanted, number = Rows(most), dict[Request, list[int]](), 0
    for _ in range(steps):
        action = rng.choice(("admit", "write", "write", "write", "leave", "group"))
        room = most - len(rows.requests)
        if action in ("admit", "group") and room:
            marks = [rng.randrange(1000) for _ in range(rng.randint(1, 9))]
            fresh = [Request(number + i, []) for i in range(rng.randint(1, room) if action == "group" else 1)]
            number += len(fresh)
            write(rows.free(), [marks])
            rows.hold(fresh)
            wanted.update({r: list(marks) for r in fresh})
        elif action == "write" and wanted:
            some = rng.sample(list(wanted), rng.randint(1, len(wanted)))
            marks = {r: [rng.randrange(1000) for _ in range(rng.randint(1, 4))] for r in some}
            write(rows.take(some), [marks[r] for r in some])
            for request in some:
                wanted[request] += marks[request]
        elif action == "leave" and wanted:
            some = rng.sample(list(wanted), rng.randint(1, len(wanted)))
            rows.leave([*some, Request(-1, [])])  # one that never held a row has none to give
            for request in some:
                del wanted[request]
        assert set(rows.requests) == set(wanted)
        for request, marks in wanted.items():
            assert request in rows and held(rows, request) == marks


def test_rows_that_lie_together_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(4)
    requests = [Request(i, []) for i in range(4)]
    for request in requests:
        write(rows.free(), [[request.number]])
        rows.hold([request])
    monkeypatch.setattr(KVCache, "swap_rows", None)
    assert rows.take(requests) is rows.cache
    for some in (requests[:2], requests[2:], requests[1:3]):
        assert rows.take(some).keys[0].data_ptr() == rows.cache.keys[0][some[0].number].data_ptr()
    assert rows.order([requests[2], requests[0]]) == [requests[0], requests[2]]


def test_a_full_cache_and_a_wrong_view_are_refused() -> None:
    rows = Rows(1)
    write(rows.free(), [[1]])
    rows.hold([Request(0, [])])
    with pytest.raises(IndexError, match="all 1 rows are held"):
        rows.free()
    cache = KVCache(3)
    with pytest.raises(ValueError, match="rows 2 to 4 of a cache of 3"):
        cache.view(2, 4)
    with pytest.raises(ValueError, match="1 rows for a view of 2"):
        cache.view(0, 2).select([0])


def test_a_kept_row_is_prefilled_behind_what_it_keeps() -> None:
    rows, first, second = Rows(1), Request(0, []), Request(1, [])
    write(rows.free(), [[1, 2, 3]])
    rows.hold([first])
    rows.leave([first])
    write(rows.free(2), [[7]])
    rows.hold([second])
    assert held(rows, second) == [1, 2, 7]


def test_a_wider_cache_keeps_what_is_held() -> None:
    rows, first, second = Rows(1), Request(0, []), Request(1, [])
    rows.widen(1)
    rows.widen(2)  # nothing was written yet
    write(rows.free(), [[1, 2, 3]])
    rows.hold([first])
    rows.widen(4)
    assert rows.cache.rows == 4 and rows.cache.lengths == [3, 0, 0, 0]
    write(rows.free(), [[4, 5]])
    rows.hold([second])
    assert held(rows, first) == [1, 2, 3] and held(rows, second) == [4, 5]


def test_a_row_is_passed_on() -> None:
    rows, first, second, third = Rows(2), Request(0, []), Request(1, []), Request(2, [])
    for request, text in ((first, [1, 2]), (second, [3])):
        write(rows.free(), [text])
        rows.hold([request])
    rows.pass_on(first, third)
    assert rows.requests == [third, second] and first not in rows
    assert held(rows, third) == [1, 2]
