"""A drafter in a process of its own, so that it drafts while the target verifies.

Threads of one process would share one interpreter lock, and much of a draft's time is Python's. What the drafter is to
be is told as a `DrafterSpec`; requests, observations and questions go to it in order through one socket, and those of
one verification in one message.

When the process dies or gives no answer in time, the question is answered with no draft, and another process is
started in the meantime; when that is ready it takes over. A drafter that lives on tokens alone goes on with all
requests; one that reads states of the target goes on with new ones only. After DEATHS deaths without an answer
in between it stays off.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import monotonic
from typing import IO, Any

import torch

from decoding.budgets import Budget
from decoding.minedraft import wire
from decoding.minedraft.wire import WireError
from decoding.minedraft.worker import DrafterSpec, budget_to, request_to, tree_from
from decoding.request import Request
from decoding.tree import DraftTree

LOG = logging.getLogger("switchsd")
DEATHS = 3
"""Deaths in a row after which no other process is started."""
PATIENCE, LEAST_SECONDS = 20.0, 10.0
"""How many times its slowest answer, and seconds at least, a process is waited for."""
OPERATIONS = 64
"""Observations that wait at most for the next question before they are sent."""


class RemoteError(Exception):
    """A drafter's process that cannot be started, or a drafter that failed in it. The message says why."""


def own_device(target: torch.device) -> dict[str, Any]:
    """Where a drafter works beside a target, as fields of a `DrafterSpec`: the last CPU core, or another GPU than the
    target's; the same one where there is no other."""
    if target.type == "cuda":
        others = [i for i in range(torch.cuda.device_count()) if i != (target.index or 0)]
        return {"device": f"cuda:{others[0] if others else target.index or 0}"}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {"cores": (cores[-1],) if len(cores) > 1 else ()}


@dataclass
class _Known:
    """What the other side has of a request."""

    number: int
    length: int = 0
    """Tokens that it was told."""
    lost: bool = False
    """It cannot be told enough any more: the request goes on undrafted."""


class RemoteDrafter:
    """A `Drafter` that can be asked ahead: `ask` sends a question and gives what waits for the answer."""

    def __init__(self, spec: DrafterSpec, answer_seconds: float = 60.0, start_seconds: float = 300.0) -> None:
        """Starts the process and waits until the drafter is built. Raises RemoteError if it cannot be.

        `answer_seconds`: how long the first answer may take; later ones PATIENCE times the slowest so far, or
        LEAST_SECONDS, if that is less.
        """
        self.spec = spec
        self._slowest = math.inf
        self._answer_seconds, self._start_seconds = answer_seconds, start_seconds
        self._process: _Process | None = _Process(spec)
        self._coming: _Process | None = None
        about = self._process.wait(start_seconds)
        self.name: str = about["name"]
        self.sites: tuple[str, ...] = tuple(about["sites"])
        self._described: dict[str, Any] = about["describe"]
        self.spent_ms = 0.0
        """That the latest answer took there."""
        self._deaths = 0
        self._requests: dict[Request, _Known] = {}
        self._told = 0
        self._questions = 0
        self._operations: list[dict[str, Any]] = []
        self._tensors: list[torch.Tensor] = []

    # -- the drafter's protocol ---------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        return {**self._described, "threads": self.spec.threads, "cores": list(self.spec.cores)}

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        self._take_over()
        known = self._requests[request] = self._new()
        if self._process is None:
            known.lost = bool(self.sites)
            return
        self._begin("start", request, known, features)

    def resume(self, request: Request, features: torch.Tensor | None, before: Request, kept: int) -> None:
        known = self._requests[request] = self._new()
        old = self._requests.get(before)
        if self._process is None or old is None or old.lost:
            known.lost = bool(self.sites)
            if self._process is not None and not known.lost:
                self._begin("start", request, known, features)
            return
        self._begin("resume", request, known, features, before=old.number, kept=kept)

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        known = self._requests.get(request)
        if known is None or known.lost or self._process is None:
            return
        tokens = request.tokens[known.length :]
        self._put({"op": "observe", "id": known.number, "at": known.length, "tokens": tokens}, features)
        known.length = len(request.tokens)
        if len(self._operations) >= OPERATIONS:
            self._flush()

    def ask(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> Callable[[], list[DraftTree | None]]:
        """Send the question; the result waits for the trees. Where the process dies or is silent they are None.

        Raises RemoteError, when it is waited for, if the drafter itself failed."""
        plain = [budget_to(budget) for budget in budgets]
        self._take_over()
        places = [i for i, r in enumerate(requests) if r in self._requests and not self._requests[r].lost]
        process = self._process
        nothing: list[DraftTree | None] = [None] * len(requests)
        if process is None or not places:
            return lambda: nothing
        self._questions += 1
        number, asked = self._questions, monotonic()
        patience = min(self._answer_seconds, max(PATIENCE * self._slowest, LEAST_SECONDS))
        ids = [self._requests[requests[i]].number for i in places]
        self._put({"op": "ask", "n": number, "ids": ids, "budgets": [plain[i] for i in places]})
        self._flush()

        def answer() -> list[DraftTree | None]:
            if self._process is not process:  # it has died since
                return nothing
            try:
                while True:
                    message, laws = wire.receive(process.sock, max(asked + patience - monotonic(), 1e-3))
                    if message["n"] == number:
                        break  # else nobody has waited for that one
            except WireError as error:
                self._fail(str(error))
                return nothing
            self._deaths = 0
            took = monotonic() - asked
            self._slowest = took if self._slowest == math.inf else max(self._slowest, took)
            if "error" in message:
                raise RemoteError(message["error"])
            self.spent_ms = message["ms"]
            trees: list[DraftTree | None] = list(nothing)
            for place, tree in zip(places, message["trees"], strict=True):
                trees[place] = None if tree is None else tree_from(tree, laws)
            return trees

        return answer

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return self.ask(requests, budgets)()

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        known = [self._requests[r] for r in requests]
        if self._process is None or any(k.lost for k in known):
            for k in known:
                k.lost = k.lost or bool(self.sites)
            return
        lengths = [k.length for k in known]
        self._put({"op": "select", "ids": [k.number for k in known], "rows": list(rows), "from": from_position})
        for k, row in zip(known, rows, strict=True):
            k.length = lengths[row]

    def close(self, request: Request) -> None:
        known = self._requests.pop(request, None)
        if known is None:
            return
        self._put({"op": "close", "ids": [known.number]})
        if not self._requests or len(self._operations) >= OPERATIONS:
            self._flush()

    # -- the process ----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether there is a process that answers, or one is being started."""
        return self._process is not None or self._coming is not None

    @property
    def cpu_threads(self) -> int:
        """Threads that it keeps busy while it drafts."""
        return self.spec.threads if self.spec.device == "cpu" else 0

    def shut_down(self) -> None:
        """End the process; nothing is drafted any more. Safe to repeat, and done at exit."""
        for process in (self._process, self._coming):
            if process is not None:
                process.end()
        self._process = self._coming = None
        self._operations, self._tensors = [], []

    def _fail(self, what: str) -> None:
        """The process is of no more use: another one is started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        self._operations, self._tensors = [], []
        for known in self._requests.values():
            known.length, known.lost = 0, bool(self.sites)
        self._deaths += 1
        self._coming, then = None, f"and it stays off after {DEATHS} failures"
        if self._deaths < DEATHS:
            try:
                self._coming, then = _Process(self.spec), "and another one is started"
            except RemoteError as error:
                then = f"and it stays off: {error}"
        LOG.warning("The %s drafter's process failed (%s): the target goes on alone, %s.", self.name, what, then)

    def _take_over(self) -> None:
        """A process that was started in the meantime takes over as soon as it is ready."""
        coming = self._coming
        if coming is None:
            return
        try:
            if not coming.answers:
                if monotonic() > coming.started + self._start_seconds:
                    raise RemoteError(f"not ready within {self._start_seconds:g} s")
                return
            coming.wait(1.0)
        except RemoteError as error:
            coming.kill()
            self._coming = None
            self._fail(str(error))
            return
        self._process, self._coming = coming, None
        for request, known in self._requests.items():
            if not known.lost:
                self._begin("start", request, known, None)

    def _new(self) -> _Known:
        self._told += 1
        return _Known(self._told)

    def _begin(self, op: str, request: Request, known: _Known, features: torch.Tensor | None, **more: Any) -> None:
        self._put({"op": op, "id": known.number, "request": request_to(request), **more}, features)
        known.length = len(request.tokens)
        self._flush()

    def _put(self, operation: dict[str, Any], features: torch.Tensor | None = None) -> None:
        if self._process is None:  # the next one is told everything anew
            return
        if features is not None:
            operation["features"] = len(self._tensors)
            self._tensors.append(features)
        self._operations.append(operation)

    def _flush(self) -> None:
        if self._process is None or not self._operations:
            return
        operations, tensors = self._operations, self._tensors
        self._operations, self._tensors = [], []
        try:
            wire.send(self._process.sock, {"do": operations}, tensors, self._answer_seconds)
        except WireError as error:
            self._fail(str(error))


class _Process:
    """The other process, and the socket to it."""

    def __init__(self, spec: DrafterSpec) -> None:
        """Starts it, and does not wait. Raises RemoteError."""
        cores = os.cpu_count() or 1
        wrong = [c for c in spec.cores if not 0 <= c < cores]
        if wrong:
            raise RemoteError(
                f"there is no core {wrong[0]} for the drafter's process: this machine has 0 to {cores - 1}"
            )
        pin = f"import os; os.sched_setaffinity(0, {set(spec.cores)}); " if spec.cores else ""
        self.sock, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_end`
        self.started = monotonic()
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        try:
            with theirs:
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-c", f"{pin}from decoding.minedraft import worker; worker.main()",
                     str(theirs.fileno())],
                    stdin=subprocess.PIPE, stdout=self._errors, stderr=self._errors, pass_fds=(theirs.fileno(),),
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(spec.threads)},
                    process_group=0,  # Ctrl-C is for the parent, which then ends it
                )  # fmt: skip
        except OSError as error:
            self.sock.close()
            raise RemoteError(f"the drafter's process cannot be started: {error.strerror}") from error
        self._end = weakref.finalize(self, _end, self._popen, self.sock, self._errors)
        with contextlib.suppress(WireError):  # `wait` tells what it said before it ended
            wire.send(self.sock, {"spec": asdict(spec)}, (), 10.0)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def answers(self) -> bool:
        """Whether it has said something, or has ended."""
        return bool(select.select([self.sock], [], [], 0)[0])

    def wait(self, seconds: float) -> dict[str, Any]:
        """What it says of the drafter that it has built. Raises RemoteError."""
        try:
            about, _ = wire.receive(self.sock, seconds)
        except WireError as error:
            self._popen.kill()
            self._popen.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip().splitlines()
            self.end()
            more = f"; its last words: {said[-1][:300]}" if said else ""
            raise RemoteError(f"the drafter's process did not start ({error}{more})") from error
        if "error" in about:
            self.end()
            raise RemoteError(f"the drafter's process could not build the drafter ({about['error']})")
        return about

    def end(self) -> None:
        """Close the pipes, which ends it. Safe to repeat."""
        self._end()

    def kill(self) -> None:
        """End it, whatever it is at. Safe to repeat."""
        self._popen.kill()
        self._end()


def _end(popen: subprocess.Popen[bytes], sock: socket.socket, errors: IO[bytes]) -> None:
    sock.close()
    assert popen.stdin is not None
    popen.stdin.close()
    try:
        popen.wait(timeout=2)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    errors.close()
