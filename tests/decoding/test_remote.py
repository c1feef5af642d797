"""A drafter in its own process: the same drafts, and a text that does not suffer when that process does."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import family_target
from remote_drafters import SITES, Copies, Laws, eagle, head

from activations.sampling import Sampling
from decoding.budgets import FixedBudget, PricedBudget
from decoding.engine import Engine
from decoding.gates import Always, Choice, Never
from decoding.minedraft.remote import RemoteDrafter, RemoteError
from decoding.minedraft.scheduler import OverlappedScheduler
from decoding.minedraft.worker import DrafterSpec, Worker, budget_from, budget_to, build
from decoding.modes import Plan
from decoding.request import Request
from decoding.scheduler import Scheduler, SequentialScheduler

BUDGET = FixedBudget(6, 4)
Make = Callable[..., RemoteDrafter]


@pytest.fixture
def remote() -> Iterator[Make]:
    """remote(kind, seconds to answer, **options) -> RemoteDrafter; all are shut down after the test."""
    made: list[RemoteDrafter] = []

    def make(kind: str, seconds: float = 60.0, **options: Any) -> RemoteDrafter:
        made.append(RemoteDrafter(DrafterSpec(f"remote_drafters:{kind}", options=options), seconds, 120.0))
        return made[-1]

    yield make
    for one in made:
        one.shut_down()


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[i, *[draw.randrange(97) for _ in range(4)] * 3] for i in range(4)]


def texts(plan: Plan, kind: type[Scheduler] = SequentialScheduler, rows: int = 4, n: int = 14) -> tuple[Any, Engine]:
    """Tokens by request, and the engine, closed."""
    requests = [Request(i, p, max_new_tokens=n, sampling=Sampling(seed=2)) for i, p in enumerate(prompts())]
    engine = Engine(family_target("llama"), plan, rows)

    def ended(commit: Any) -> bool:
        request = commit.request
        del request.tokens[len(request.prompt) + n :]
        return len(request.generated) == n

    list(kind(engine).run(requests, ended))
    engine.close()
    return {r.number: r.generated for r in requests}, engine


def always(drafter: Any) -> Plan:
    return Plan(Always(Choice(drafter.name, BUDGET)), (drafter,))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """The process has ended (a zombie that nobody has asked for has not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# -- the same drafts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", [SequentialScheduler, OverlappedScheduler])
def test_a_head_elsewhere_drafts_what_it_drafts_here(remote: Make, scheduler: type[Scheduler]) -> None:
    """Features, tokens and budgets arrive: the trees are the same, and so is the text."""
    wanted, _ = texts(Plan(Never()))
    here, local = texts(always(eagle()), scheduler)
    there = remote("eagle")
    assert there.name == "eagle" and there.sites == tuple(SITES)
    assert there.describe()["weights"] == eagle().describe()["weights"]
    found, distant = texts(always(there), scheduler)
    assert found == here == wanted
    trees = [
        sorted((r.request, r.step, r.tokens, r.parents, r.source, r.accepted) for r in engine.trace)
        for engine in (local, distant)
    ]
    assert trees[0] == trees[1] and any(tree[2] for tree in trees[0])
    assert any(r.accepted for r in distant.trace)
    assert not there._requests


def test_every_call_of_the_protocol(remote: Make) -> None:
    """Step by step against the same drafter here, with resumed and resampled requests."""
    here, there = Copies(), remote("Copies")
    draw, drafted = random.Random(0), []
    requests = [Request(i, [5, 6, 7, 5, 6, 7, i], max_new_tokens=40) for i in range(3)]

    def both(call: str, *args: Any) -> None:
        for drafter in (here, there):
            getattr(drafter, call)(*args)

    def same() -> None:
        budgets = [FixedBudget(draw.randint(1, 9), draw.randint(1, 9)) for _ in requests]
        trees = [d.propose(requests, budgets) for d in (here, there)]
        for mine, theirs in zip(*trees, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert [*mine.tokens] == theirs.tokens and [*mine.parents] == theirs.parents
                assert [*mine.source] == theirs.source and [*mine.logq] == theirs.logq
            drafted.append(mine is not None)

    for request in requests:
        request.tokens = [*request.prompt, 5]
        both("start", request, None)
    for _ in range(4):
        for request in requests:
            request.tokens += [draw.choice([5, 6, 7]) for _ in range(draw.randint(1, 3))]
            both("observe", request, None)
        same()
    rows = [2, 2, 0]
    both("select", requests, rows, 3)
    states = [list(r.tokens) for r in requests]
    for request, row in zip(requests, rows, strict=True):
        request.tokens = list(states[row])
    same()
    for request in requests:
        request.tokens += [6, 7]
        both("observe", request, None)
    same()
    old, new = requests[0], Request(9, requests[0].tokens[:-1], max_new_tokens=9)
    new.tokens = [*new.prompt, 6]
    both("resume", new, None, old, 5)
    both("close", old)
    requests[0] = new
    same()
    for request in requests:
        both("close", request)
        both("close", request)
    assert not there._requests and sum(drafted) > 10


def test_states_and_laws_travel_bit_for_bit(remote: Make) -> None:
    """bfloat16 states there, float32 laws back; an answer that nobody waited for is passed over."""
    there, here = remote("Laws"), Laws()
    requests = [Request(0, [1, 2, 3]), Request(1, [4])]
    generator = torch.Generator().manual_seed(0)
    for request in requests:
        request.tokens = [*request.prompt, 5]
        states = torch.randn(len(request.prompt), 5, generator=generator).bfloat16()
        for drafter in (here, there):
            drafter.start(request, states)
    for _ in range(3):
        there.ask(requests, [BUDGET] * 2)  # its answer is left there
        waiting = there.ask(requests, [BUDGET] * 2)
        mine = here.propose(requests, [BUDGET] * 2)
        for tree, other in zip(mine, waiting(), strict=True):
            assert tree is not None and other is not None
            assert other.q_logits.dtype == torch.float32 and torch.equal(tree.q_logits, other.q_logits)
            assert other.logq == tree.logq
        for request in requests:
            request.tokens += [7, 8]
            states = torch.randn(2, 5, generator=generator).bfloat16()
            for drafter in (here, there):
                drafter.observe(request, states)


def test_what_waits_is_sent_in_one_message(remote: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from decoding.minedraft import wire

    there = remote("Copies")
    requests = [Request(i, [5, 6, 5]) for i in range(3)]
    for request in requests:
        request.tokens = [*request.prompt, 6]
        there.start(request, None)
    sent: list[list[str]] = []
    send = wire.send
    monkeypatch.setattr(
        wire, "send", lambda sock, m, *rest: (sent.append([o["op"] for o in m["do"]]), send(sock, m, *rest))[1]
    )
    for request in requests:
        request.tokens.append(5)
        there.observe(request, None)
    assert sent == []
    there.propose(requests, [BUDGET] * 3)
    assert sent == [["observe", "observe", "observe", "ask"]]


def test_budgets_travel_and_others_are_refused() -> None:
    for budget in (FixedBudget(3, 2), PricedBudget(5, 4, 0.1, 0.2)):
        assert budget_from(budget_to(budget)) == budget

    class Learned(FixedBudget):
        pass

    with pytest.raises(TypeError, match="Learned cannot be sent"):
        budget_to(Learned())


# -- faults --------------------------------------------------------------------------------------------


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records]


@pytest.mark.parametrize("how", ["die", "hang", "is killed", "is stopped"])
def test_another_process_takes_over(remote: Make, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The question goes unanswered; running requests are drafted for again when the next process is ready."""
    there = remote("failing", 60.0, how=how, after=1, file=str(tmp_path / "failed"))
    silent = how in ("hang", "is stopped")
    first = there._process
    assert first is not None
    request = Request(0, [5, 6, 7, 5, 6, 7, 5], max_new_tokens=40)
    request.tokens = [*request.prompt, 6]
    there.start(request, None)
    [tree] = there.propose([request], [BUDGET])
    assert tree is not None
    if how.startswith("is"):
        os.kill(first.pid, signal.SIGKILL if how == "is killed" else signal.SIGSTOP)
    there._answer_seconds = 1.0 if silent else 60.0
    with caplog.at_level(logging.WARNING, "switchsd"):
        began = time.monotonic()
        assert there.propose([request], [BUDGET]) == [None]
        assert time.monotonic() - began < 20
        there._answer_seconds = 60.0
    [told] = messages(caplog)
    assert "draft drafter's process failed" in told and "another one is started" in told
    assert ("no answer within" in told) == silent
    assert gone(first.pid) and there.running and there._process is None
    request.tokens += [7, 5]
    there.observe(request, None)  # nobody is there to be told
    assert there.propose([request], [BUDGET]) == [None]
    until(lambda: there._coming is not None and there._coming.answers)
    [tree] = there.propose([request], [BUDGET])
    local = Copies()
    local.start(request, None)
    [wanted] = local.propose([request], [BUDGET])
    assert tree is not None and wanted is not None and tree.tokens == [*wanted.tokens]
    assert len(messages(caplog)) == 1


def test_who_needs_states_goes_on_undrafted_and_new_requests_are_drafted_for(remote: Make, tmp_path: Path) -> None:
    there = remote("failing", how="die", after=1, file=str(tmp_path / "failed"), sites=["resid_pre.1"])
    states = torch.zeros(7, 4)
    old, new = (Request(i, [5, 6, 7, 5, 6, 7, 5], max_new_tokens=40) for i in range(2))
    old.tokens, new.tokens = [*old.prompt, 6], [*new.prompt, 6]
    there.start(old, states)
    assert there.propose([old], [BUDGET])[0] is not None
    assert there.propose([old], [BUDGET]) == [None]
    until(lambda: there._coming is not None and there._coming.answers)
    there.start(new, states)  # who comes now finds it ready
    there.observe(old, states[:1])
    trees = there.propose([old, new], [BUDGET] * 2)
    assert trees[0] is None and trees[1] is not None
    there.close(old)
    there.close(new)
    assert not there._requests


def test_it_stays_off_after_three_deaths(remote: Make, caplog: pytest.LogCaptureFixture) -> None:
    """And all the while the text is the target's own, whatever the scheduler."""
    wanted, _ = texts(Plan(Never()))
    there = remote("failing", how="die")
    pids = []
    for death in range(3):
        process = there._process
        assert process is not None
        pids.append(process.pid)
        found, _ = texts(always(there), OverlappedScheduler)
        assert found == wanted
        if death < 2:
            until(lambda: there._coming is not None and there._coming.answers)
            there._take_over()
    told = messages(caplog)
    assert len(told) == 3 and "stays off after 3 failures" in told[2] and not there.running
    assert all(map(gone, pids))
    assert texts(always(there))[0] == wanted and len(messages(caplog)) == 3


def test_a_drafter_that_raises_there_is_dropped_as_one_here(remote: Make, caplog: pytest.LogCaptureFixture) -> None:
    wanted, _ = texts(Plan(Never()))
    there = remote("failing", how="raise", after=2)
    assert texts(always(there), OverlappedScheduler)[0] == wanted
    assert messages(caplog) == ["The draft drafter failed (it is broken): the target goes on without it."]
    assert there.running


def test_an_abandoned_run_leaves_nothing_behind(remote: Make) -> None:
    """The generator is closed with a question on its way; the next run gets its own answers."""
    there = remote("Copies")
    plan, target = always(there), family_target("llama")
    for stop in range(1, 6):
        engine = Engine(target, plan, rows=4)
        requests = [Request(i, p, max_new_tokens=14) for i, p in enumerate(prompts())]
        running = OverlappedScheduler(engine).run(requests, lambda c: False)
        for _ in range(3 + stop):
            next(running)
        running.close()
        engine.close()
        assert not engine.requests and not there._requests
    assert texts(plan, OverlappedScheduler)[0] == texts(Plan(Never()))[0]


def test_starts_that_fail() -> None:
    def start(kind: str, **spec: Any) -> str:
        with pytest.raises(RemoteError) as error:
            RemoteDrafter(DrafterSpec(kind, **spec), 10.0, 60.0)
        return str(error.value)

    told = start("remote_drafters:nothing")
    assert "could not build the drafter" in told and "nothing" in told
    assert "its last words: nothing works here" in start("remote_drafters:failing", options={"how": "no start"})
    assert f"no core {os.cpu_count()}" in start("copy", cores=(os.cpu_count() or 1,))
    assert "unknown drafter 'eagel': use eagle, draft" in start("eagel")


# -- the process ends ------------------------------------------------------------------------------------


def test_it_keeps_to_its_cores_and_ends(remote: Make) -> None:
    mine = min(os.sched_getaffinity(0))
    there = RemoteDrafter(DrafterSpec("copy", cores=(mine,), threads=1))
    assert there._process is not None
    pid = there._process.pid
    assert os.sched_getaffinity(pid) == {mine}
    assert there.describe()["cores"] == [mine]
    there.shut_down()
    there.shut_down()
    assert gone(pid) and not there.running
    assert there.propose([Request(0, [1], tokens=[1, 2])], [BUDGET]) == [None]


SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test in the background inherits that it is ignored
from decoding.minedraft.remote import RemoteDrafter
from decoding.minedraft.worker import DrafterSpec
from decoding.budgets import FixedBudget
from decoding.request import Request
there = RemoteDrafter(DrafterSpec("remote_drafters:failing", options={"how": "hang"}))
print(there._process.pid, flush=True)
request = Request(0, [1, 2], tokens=[1, 2, 3])
there.start(request, None)
waiting = there.ask([request], [FixedBudget(3, 3)])
if sys.argv[1] == "wait":
    waiting()
"""


@pytest.mark.parametrize("end", ["exit", "interrupt", "kill"])
def test_it_does_not_outlive_its_parent(end: str) -> None:
    """Though it hangs in a draft: at exit, after Ctrl-C, and when the parent is killed. The script needs no guard."""
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "exit" if end == "exit" else "wait"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    if end != "exit":
        parent.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
    _, told = parent.communicate(timeout=60)
    assert (parent.returncode == 0) == (end == "exit"), told
    until(lambda: gone(pid) or _zombie(pid), 20)


def _zombie(pid: int) -> bool:
    """Ended, and waiting for whoever adopts orphans in this container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


# -- what is built ---------------------------------------------------------------------------------------


def test_a_head_is_built_from_folders_and_the_blocks_are_not_kept(tmp_path: Path) -> None:
    """As the process does it: the target by its folder, the head by its own; and then only what the head uses."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from activations.target import load_target
    from decoding.eagle.drafter import EagleDrafter
    from decoding.eagle.formats import load_head

    target = family_target("llama")
    target.model.save_pretrained(tmp_path / "target")
    raw = Tokenizer(models.BPE(vocab={chr(i + 200): i for i in range(97)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path / "target")
    own = replace(head().config)
    one = head()
    one.save(tmp_path / "head")
    assert own == one.config
    spec = DrafterSpec(
        "eagle", str(tmp_path / "target"), "float32", folder=str(tmp_path / "head"),
        options={"sites": SITES},
    )  # fmt: skip
    found = build(spec)
    assert isinstance(found, EagleDrafter)
    assert not any(True for layer in found._target.layers for _ in layer.parameters())
    whole = load_target(str(tmp_path / "target"), dtype="float32")
    wanted = EagleDrafter(whole, load_head(tmp_path / "head", 97), sites=SITES)
    request = Request(0, list(range(12)), max_new_tokens=20)
    request.tokens = [*request.prompt, 3]
    states = torch.randn(12, 96, generator=torch.Generator().manual_seed(0))
    trees = []
    for drafter in (found, wanted):
        drafter.start(request, states)
        [tree] = drafter.propose([request], [BUDGET])
        assert tree is not None
        trees.append((tree.tokens, tree.parents, tree.logq))
    assert trees[0] == trees[1]
    with pytest.raises(ValueError, match="needs the folder of its head"):
        build(replace(spec, folder=None))


def test_a_request_whose_start_failed_is_answered_so_and_others_are_not() -> None:
    """In the worker: what raised for one request concerns that one alone, until it is closed."""

    class Picky(Copies):
        def start(self, request: Request, features: torch.Tensor | None) -> None:
            if request.number == 1:
                raise ValueError("not this one")
            super().start(request, features)

    from decoding.minedraft.worker import request_to

    worker = Worker(Picky())
    for number in (0, 1):
        request = Request(number, [5, 6, 7, 5, 6, 7, 5], tokens=[5, 6, 7, 5, 6, 7, 5, 6])
        worker.carry_out({"op": "start", "id": number, "request": request_to(request)}, [])

    def ask(*ids: int) -> dict[str, Any]:
        found = worker.carry_out({"op": "ask", "n": 1, "ids": ids, "budgets": [budget_to(BUDGET)] * len(ids)}, [])
        assert found is not None
        return found[0]

    assert ask(0)["trees"][0]["tokens"]
    worker.carry_out({"op": "observe", "id": 1, "at": 8, "tokens": [7]}, [])
    assert ask(0, 1) == {"n": 1, "error": "not this one"}
    worker.carry_out({"op": "close", "ids": [1]}, [])
    assert ask(0)["trees"][0]["tokens"]


def test_resampled_requests_have_their_ancestor_s_text_there_too() -> None:
    from decoding.minedraft.worker import request_to

    worker = Worker(Copies())
    for number in range(3):
        request = Request(number, [5, 6], tokens=[5, 6, number])
        worker.carry_out({"op": "start", "id": number, "request": request_to(request)}, [])
    worker.carry_out({"op": "select", "ids": [0, 1, 2], "rows": [1, 1, 0], "from": 2}, [])
    worker.carry_out({"op": "observe", "id": 2, "at": 3, "tokens": [9]}, [])
    assert [worker._mirrors[i].tokens for i in range(3)] == [[5, 6, 1], [5, 6, 1], [5, 6, 0, 9]]
