"""Two hundred requests of random lengths through every mode, in one process: all finish, none waits for long, and
nothing of them stays behind."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter

import pytest
import torch
from test_learned_modes import TOP_K, arbiter, tree_policy

from decoding.decoder import Decoder
from decoding.draft.drafter import DraftModelDrafter
from decoding.draft.model import cut
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.training import initial_head
from decoding.engine import Draft, Engine
from decoding.minedraft.remote import RemoteDrafter
from decoding.minedraft.worker import DrafterSpec
from decoding.modes import MODES
from decoding.request import Request

REQUESTS, BATCH = 200, 8
LONGEST_TURN = {"minedraft": 3}
"""Most verifications in a row that leave a running request out: two batches take turns."""


def load(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(62) for _ in range(rng.choice((1, 3, 9, 20, 60)))] for _ in range(REQUESTS)]


@pytest.mark.parametrize("mode", list(MODES))
def test_two_hundred_requests(mode: str, small_target, request, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    target = small_target("llama")
    torch.manual_seed(0)
    eagle = EagleDrafter(target, initial_head(target, torch.arange(0, 64, 2)).requires_grad_(False), TOP_K)
    draft = DraftModelDrafter(target, cut(target, 2))
    elsewhere = RemoteDrafter(DrafterSpec("remote_drafters:Copies")) if mode == "minedraft" else None
    if elsewhere:
        request.addfinalizer(elsewhere.shut_down)
    decoder = Decoder(
        target,
        neural={"eagle": eagle, "draft": draft},
        elsewhere={"draft": elsewhere} if elsewhere else {},
        policies={"ltd": tree_policy(target, eagle), "cospec": arbiter(target, draft)},
    )
    waited: Counter[Request] = Counter()
    longest = 0
    verify = Engine.verify

    def counting(engine: Engine, drafts: list[Draft]):  # type: ignore[no-untyped-def]
        nonlocal longest
        there = {d.request.group for d in drafts}
        assert len(engine.requests) <= BATCH
        for one in engine.requests:
            waited[one] = 0 if one in there else waited[one] + 1
            longest = max(longest, waited[one])
        return verify(engine, drafts)

    monkeypatch.setattr(Engine, "verify", counting)
    options = {"mode": mode, "batch": BATCH, "temperature": 0.7, "max_new_tokens": 8, "kappa": 2, "gate": "match"}
    if elsewhere:
        options["neural"] = "draft"
    sizes = []
    for repetition in range(2):
        found = decoder.generate(load(repetition), **options)
        assert len(found) == REQUESTS
        assert all(len(g.tokens) == 8 or g.stopped for g in found) and not any(g.cut for g in found)
        waited.clear()
        decoder.trace.clear()  # it holds the texts
        del found
        gc.collect()
        assert not [o for o in gc.get_objects() if isinstance(o, Request)]
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert longest <= LONGEST_TURN.get(mode, 0)
    assert sizes[1] - sizes[0] < 200_000  # bytes, of 200 more requests
