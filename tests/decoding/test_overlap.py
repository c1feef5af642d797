"""Two batches that take turns: who is in which, and that every text is what it is one after the other."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import Elsewhere, Guesser, HashTarget, ends, engine_for, truth

from activations.sampling import Sampling
from decoding.drafters import CopyDrafter
from decoding.minedraft.batches import BatchManager, HalfStep
from decoding.minedraft.scheduler import OverlappedScheduler
from decoding.request import Request
from decoding.scheduler import ABORTED, SequentialScheduler

SCHEDULES = 1000
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_k=6, top_p=0.9, seed=5))


# -- the manager alone -------------------------------------------------------------------------------


def finish(manager: BatchManager[int], now: HalfStep[int]) -> None:
    manager.drafted(now.draft)
    manager.verified(now.verify)
    manager.flip()


def test_the_first_half_steps() -> None:
    """One batch is drafted for; then it is verified while the other one is drafted for; and so on."""
    manager: BatchManager[int] = BatchManager()
    for request in range(4):
        manager.admit(request)
    found = []
    for _ in range(5):
        now = manager.half_step()
        found.append((now.verify, now.draft))
        finish(manager, now)
    assert found == [([], [0, 2]), ([0, 2], [1, 3]), ([1, 3], [0, 2]), ([0, 2], [1, 3]), ([1, 3], [0, 2])]


def test_a_single_request_is_drafted_and_verified_in_turn() -> None:
    manager: BatchManager[int] = BatchManager()
    manager.admit(0)
    for i in range(6):
        now = manager.half_step()
        assert (now.verify, now.draft) == (([0], []) if i % 2 else ([], [0]))
        finish(manager, now)


def test_later_requests_have_a_draft_when_their_turn_comes() -> None:
    manager: BatchManager[int] = BatchManager()
    for request in range(4):
        manager.admit(request)
    for _ in range(2):
        finish(manager, manager.half_step())
    manager.leave([0])
    manager.admit(9)
    now = manager.half_step()
    assert 9 in now.draft and 9 not in now.verify
    finish(manager, now)
    assert 9 in manager.half_step().verify


def test_a_moved_request_keeps_its_draft_and_sits_out_once() -> None:
    manager: BatchManager[int] = BatchManager()
    for request in range(6):
        manager.admit(request)
    for _ in range(2):
        finish(manager, manager.half_step())  # 0, 2, 4 were verified, 1, 3, 5 have drafts
    manager.leave([0, 2, 4])
    now = manager.half_step()
    assert now.verify == [3, 5] and now.draft == []  # 1 sits out
    assert 1 in manager.batch(manager.drafting)
    finish(manager, now)
    assert manager.half_step() == HalfStep([1], [3, 5])


def test_what_leaves_is_forgotten_and_an_empty_manager_begins_anew() -> None:
    manager: BatchManager[int] = BatchManager()
    manager.admit(0)
    finish(manager, manager.half_step())
    with pytest.raises(ValueError, match="in a batch already"):
        manager.admit(0)
    manager.leave([0, 7])
    assert len(manager) == 0 and manager.drafting == 0
    manager.drafted([0])
    manager.verified([0])
    assert 0 not in manager
    manager.admit(0)
    assert manager.half_step() == HalfStep([], [0])


class Watch:
    """Carries out a manager's half-steps and checks what must hold in each."""

    def __init__(self, most: int) -> None:
        self.manager: BatchManager[int] = BatchManager()
        self.drafted: set[int] = set()
        self.waits: Counter[int] = Counter()
        self.bound = 4 + math.ceil(math.log2(most + 1))

    def step(self) -> HalfStep[int]:
        manager = self.manager
        now = manager.half_step()
        sides = [set(manager.batch(i)) for i in (0, 1)]
        assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == len(manager)
        assert abs(len(sides[0]) - len(sides[1])) <= 1
        assert set(now.verify) <= sides[1 - manager.drafting] and set(now.draft) <= sides[manager.drafting]
        assert set(now.verify) <= self.drafted and not set(now.draft) & self.drafted
        assert now.verify or now.draft or not len(manager)
        self.drafted = (self.drafted - set(now.verify)) | set(now.draft)
        for request in sides[0] | sides[1]:
            self.waits[request] = 0 if request in now.verify else self.waits[request] + 1
            assert self.waits[request] <= self.bound, "a request starves"
        finish(manager, now)
        return now

    def leave(self, requests: list[int]) -> None:
        self.manager.leave(requests)
        self.drafted -= set(requests)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_invariants_whoever_comes_and_goes(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 12))
    watch, number = Watch(most), 0
    for _ in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(0, most - len(watch.manager)))):
            watch.manager.admit(number)
            number += 1
        now = watch.step()
        if now.verify:  # most end where they are verified, some are aborted anywhere
            watch.leave(data.draw(st.lists(st.sampled_from(now.verify), unique=True)))
        there = watch.manager.batch(0) + watch.manager.batch(1)
        if there and data.draw(st.booleans()):
            watch.leave([data.draw(st.sampled_from(there))])


def test_nobody_starves_when_batches_keep_running_dry() -> None:
    """The hardest case: whatever was verified ends, so that one side is always empty and requests are moved."""
    draw = random.Random(0)
    for most in (2, 3, 8, 16):
        watch, number = Watch(most), 0
        for _ in range(300):
            if draw.random() < 0.3:
                for _ in range(draw.randint(0, most - len(watch.manager))):
                    watch.manager.admit(number)
                    number += 1
            watch.leave(watch.step().verify)


def test_who_has_waited_is_not_moved_again() -> None:
    """Whatever is verified ends, and so many come in that one request must be moved at every half-step."""
    watch, number = Watch(64), 62
    for request in range(number):
        watch.manager.admit(request)
    for _ in range(60):
        watch.leave(watch.step().verify)
        verified_next = len(watch.manager.batch(1 - watch.manager.drafting))
        for _ in range(verified_next - 2):
            watch.manager.admit(number)
            number += 1


# -- the scheduler on the engine -----------------------------------------------------------------------


def requests_of(draw: random.Random, count: int) -> list[Request]:
    return [
        Request(
            number,
            [draw.randrange(11) for _ in range(draw.randint(1, 4))],
            max_new_tokens=draw.randint(1, 9),
            sampling=draw.choice(SAMPLINGS),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", [SequentialScheduler, OverlappedScheduler])
@pytest.mark.parametrize("part", range(4))
def test_every_text_is_the_target_s_own_whatever_batch_it_sat_in(part: int, kind: Any) -> None:
    """Random requests, rows, drafts, ends and aborts: in every schedule each text is the target's own, and nothing is
    left behind."""
    batches: Counter[str] = Counter()
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        draw = random.Random(seed)
        requests = requests_of(draw, draw.randint(1, 5))
        wanted = {r.number: truth(r.prompt, r.sampling, r.number, r.max_new_tokens) for r in requests}
        drafter = draw.choice([Guesser, Elsewhere])(wanted, draw.choice([0.3, 0.8, 1.0]))
        engine = engine_for(drafter, rows=draw.randint(1, 5))
        scheduler = kind(engine)
        aborted = {r for r in requests if draw.random() < 0.15}
        when = {r: draw.randint(0, 6) for r in aborted}
        stop_after = draw.randint(1, 12) if draw.random() < 0.1 else None
        cuts: set[Request] = set()
        running = scheduler.run(iter(requests), ends)
        for i, commit in enumerate(running):
            if commit.cut:
                assert commit.cut == ABORTED and commit.request in aborted and not commit.tokens
                cuts.add(commit.request)
            if kind is OverlappedScheduler:
                sizes = [len(scheduler.batches.batch(side)) for side in (0, 1)]
                batches["both" if all(sizes) else "one"] += 1
            for request in aborted:
                if when[request] == i:
                    scheduler.abort(request)
            if i == stop_after:
                running.close()
                break
        for request in requests:
            text = request.generated
            if request in cuts or stop_after is not None:
                assert text == wanted[request.number][: len(text)], seed
            else:
                assert text == wanted[request.number], seed
        assert not engine.requests and not drafter.open
        if kind is OverlappedScheduler:
            assert not len(scheduler.batches) and not scheduler._drafts
    assert kind is SequentialScheduler or min(batches["both"], batches["one"]) > 100


def test_sequential_and_overlapped_agree_and_overlapping_needs_no_more_verifications() -> None:
    """With everybody admitted at once, each request is verified as often in either."""
    draw = random.Random(1)
    for _ in range(10):
        requests = requests_of(draw, 4)
        wanted = {r.number: truth(r.prompt, r.sampling, r.number, r.max_new_tokens) for r in requests}
        counts = []
        for kind in (SequentialScheduler, OverlappedScheduler):
            again = [Request(r.number, r.prompt, r.max_new_tokens, r.sampling) for r in requests]
            engine = engine_for(Elsewhere(wanted, 0.8), rows=4)
            steps = Counter(c.request.number for c in kind(engine).run(again, ends))
            assert {r.number: r.generated for r in again} == wanted
            counts.append(steps)
        assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", [SequentialScheduler, OverlappedScheduler])
def test_abort(kind: Any) -> None:
    """Before it comes in, while it runs, and after it has ended."""
    requests = [Request(i, [i + 1], max_new_tokens=8) for i in range(4)]
    wanted = {r.number: truth(r.prompt, r.sampling, r.number, 8) for r in requests}
    engine = engine_for(Elsewhere(wanted, 0.5), rows=2)
    scheduler = kind(engine)
    scheduler.abort(requests[3])
    cuts = []
    for i, commit in enumerate(scheduler.run(requests, ends)):
        if i == 2:
            scheduler.abort(requests[0])
            assert requests[0] in engine.requests
        if commit.cut:
            cuts.append(commit.request.number)
            assert commit.request not in engine.requests
    assert cuts == [0, 3]
    assert requests[3].tokens == [] and requests[0].generated == wanted[0][: len(requests[0].generated)]
    assert [r.generated for r in requests[1:3]] == [wanted[1], wanted[2]]
    assert not engine.requests


def test_the_target_leaves_threads_to_a_drafter_elsewhere() -> None:
    """While it verifies; between two steps the threads are everybody's."""
    import torch

    before, seen = torch.get_num_threads(), []
    drafter = Elsewhere({0: truth([1], Sampling(), 0, 8)}, 1.0)
    drafter.cpu_threads = 2  # type: ignore[attr-defined]
    try:
        for threads in (3, 1):
            torch.set_num_threads(threads)
            engine = engine_for(drafter, rows=1)
            verify = engine.verify
            engine.verify = lambda drafts, f=verify: (seen.append(torch.get_num_threads()), f(drafts))[1]  # type: ignore[method-assign,misc]
            for _ in OverlappedScheduler(engine).run([Request(0, [1], max_new_tokens=8)], ends):
                assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(seen) > 2 and set(seen) == {1}


def test_memory_that_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The longest request is cut; drafts that were not verified are still good for the others."""
    requests = [Request(i, [i + 1] * (1 + 2 * i), max_new_tokens=9) for i in range(4)]
    wanted = {r.number: truth(r.prompt, r.sampling, r.number, 9) for r in requests}
    engine = engine_for(Elsewhere(wanted, 1.0), rows=4)
    forward, calls = HashTarget.forward, []

    def scarce(self: HashTarget, tokens: Any, *args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise MemoryError
        return forward(self, tokens, *args, **more)

    monkeypatch.setattr(HashTarget, "forward", scarce)
    cut = [c.request.number for c in OverlappedScheduler(engine).run(requests, ends) if c.cut]
    assert len(cut) == 1
    for request in requests:
        text = request.generated
        assert text == wanted[request.number][: len(text)]
        assert text == wanted[request.number] or request.number in cut
    assert not engine.requests


def test_a_drafter_that_fails_while_the_other_batch_is_verified(caplog: pytest.LogCaptureFixture) -> None:
    requests = [Request(i, [i + 1], max_new_tokens=8) for i in range(3)]
    wanted = {r.number: truth(r.prompt, r.sampling, r.number, 8) for r in requests}
    drafter = Elsewhere(wanted, 0.8)

    def broken() -> Any:
        raise RuntimeError("the answer is lost")

    ask, calls = drafter.ask, []
    drafter.ask = lambda *a: broken if calls.append(1) or len(calls) == 3 else ask(*a)  # type: ignore[method-assign]
    engine = engine_for(drafter, rows=3)
    list(OverlappedScheduler(engine).run(requests, ends))
    assert {r.number: r.generated for r in requests} == wanted
    assert [r.message for r in caplog.records] == [
        "The draft drafter failed (the answer is lost): the target goes on without it."
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_on_a_model(family: str, small_target: Any) -> None:
    """A real target and copies, in rows of both batches, with windows: every text is `ar`'s own."""
    from decoding.decoder import Decoder
    from decoding.engine import Engine
    from decoding.modes import ModeSettings, Parts, get_mode

    target = small_target(family)
    draw = random.Random(0)
    prompts = [[i, *[draw.randrange(62) for _ in range(4)] * 3] for i in range(5)]
    copied = 0
    for temperature in (0.0, 1.0):
        plain = Decoder(target).generate(prompts, mode="ar", max_new_tokens=48, temperature=temperature, seed=4)
        plan = get_mode("copy").build(Parts(target, ModeSettings(kappa=2, copy_nodes=6)))
        engine = Engine(target, plan, rows=4)
        sampling = Sampling(temperature=temperature, seed=4)
        requests = [Request(i, p, max_new_tokens=48, sampling=sampling) for i, p in enumerate(prompts)]

        def over(commit: Any) -> bool:
            request = commit.request
            text = request.generated[:48]
            return len(text) == 48 or bool(target.stop_ids & set(text))

        for commit in OverlappedScheduler(engine).run(requests, over):
            copied += "copy" in commit.sources
        engine.close()
        for request, one in zip(requests, plain, strict=True):
            assert request.generated[: len(one.tokens)] == one.tokens
        assert all(not d._indices for d in plan.drafters if isinstance(d, CopyDrafter))
    assert copied
