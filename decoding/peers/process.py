"""Another engine behind a pipe: one process with a model of its own, one JSON line a message.

    from it, once      {"ready": "what it is, with version", "differs": "what is not the target's"}
                       or {"error": "what is missing and what to do"}
    to it, a prompt    {"prompt": [ids], "max_new_tokens": 128, "stop": [ids]}
    from it            {"tokens": [ids], "decoded": 127, "steps": 127, "first_token_seconds": s, "decode_seconds": s}
                       or {"error": "..."}

An engine that serves many requests at a time (vLLM) also takes

    to it, a batch     {"prompts": [[ids], ...], "max_new_tokens": 128, "stop": [ids]} and what `Peer.ask_all` may add
    from it            {"answers": [...], "seconds": s, "forwards": 412, "counters": {...}, "profile": [...]}

Greedy unless a batch says otherwise. `tokens` ends with the stop token where one was met; `decoded` counts the tokens
that came after the first forward; `steps` is 0 where the engine does not tell. It ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any, TypeVar

Form = TypeVar("Form")

SETTLE_SECONDS = 0.3
"""Its threads may spin on for a while; the next column waits for that."""


class PeerError(Exception):
    """An engine that cannot be started or gave no answer. The message says what to do."""


@dataclass(frozen=True)
class Told:
    """One answer."""

    tokens: list[int]
    decoded: int
    steps: int
    first_token_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Served(Told):
    """One answer of a batch. Of an aborted request: what had come."""

    drafted: int
    """Tokens that were drafted for its steps."""
    prompt_forwards: int
    """Forwards that read a piece of its prompt: 2 and more where it was cut."""
    cached: int
    """Tokens of its prompt that were not read, because they were known from earlier ones."""


@dataclass(frozen=True)
class Batch:
    """The answers to a batch, in its order."""

    answers: list[Served]
    seconds: float
    """From the first request to the last token."""
    forwards: int
    """Steps of the engine."""
    counters: dict[str, float]
    """The engine's own, by the names of its Prometheus endpoint; they count from its start."""
    profile: list[dict[str, Any]]
    """`function`, `calls`, `own_ms`, `ms` (calls inside it included), dearest first; empty where none was asked for."""


class Peer:
    """Starts its process at the first question."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        start_seconds: float = 300.0,
        answer_seconds: float = 600.0,
    ) -> None:
        """`settings`: what its answers depend on, for JSON; `log` takes what the process says on standard error."""
        self.name = name
        self.settings = settings or {}
        self.about: dict[str, str] = {}
        """What it said of itself: `ready` and `differs`; empty before the first question."""
        self.log = log
        self._command, self._environment = list(command), environment or {}
        self._limits = (start_seconds, answer_seconds)
        self._process: subprocess.Popen[str] | None = None
        self._lines: Queue[str] = Queue()

    def ask(self, prompt: list[int], max_new_tokens: int, stop: Sequence[int] = ()) -> Told:
        """Its greedy continuation of the prompt. Raises PeerError."""
        answer = self._answer({"prompt": prompt, "max_new_tokens": max_new_tokens, "stop": list(stop)})
        told = self._read_as(Told, answer)
        if not told.tokens or len(told.tokens) > max_new_tokens:
            raise self._broken(f"wrote {len(told.tokens)} tokens where 1 to {max_new_tokens} were asked for")
        return told

    def ask_all(
        self, prompts: Sequence[list[int]], max_new_tokens: int, stop: Sequence[int] = (), **more: Any
    ) -> Batch:
        """Its continuations of all prompts, as many at a time as it takes. Raises PeerError.

        `more`: `concurrency` (at most so many at a time), `sampling` (arguments of the engine's own sampling),
        `abort` ({place: tokens}: given up once so many have come), `profile` (part of a path: functions in such files).
        """
        question = {"prompts": list(prompts), "max_new_tokens": max_new_tokens, "stop": list(stop), **more}
        answer = self._answer(question)
        answer["answers"] = [self._read_as(Served, a) for a in answer.get("answers", ())]
        return self._read_as(Batch, answer)

    def close(self) -> None:
        """End the process. Safe to repeat."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # -- inside -------------------------------------------------------------------------------------

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._broken(f"takes no more questions ({error.strerror})") from error
        answer = self._next(self._limits[1])
        time.sleep(SETTLE_SECONDS)
        return answer

    def _read_as(self, kind: type[Form], answer: dict[str, Any]) -> Form:
        try:
            return kind(**answer)
        except TypeError as error:
            raise self._broken(f"gave an answer of another form ({error})") from error

    def _start(self) -> None:
        self._lines = Queue()
        if self.log:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log or os.devnull, "w") as errors:
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                    env={**os.environ, **self._environment},
                )  # fmt: skip
            except OSError as error:
                raise PeerError(f"{self.name}: cannot run {self._command[0]}: {error.strerror}") from error
        threading.Thread(target=self._read, args=(self._process, self._lines), daemon=True).start()
        self.about = self._next(self._limits[0])

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")  # it has ended

    def _next(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except Empty:
            raise self._broken(f"gave no answer within {seconds:.0f} s") from None
        if not line:
            raise self._broken("ended by itself")
        try:
            found = json.loads(line)
        except ValueError:
            raise self._broken(f"said something that is no JSON: {line.strip()[:80]!r}") from None
        if not isinstance(found, dict) or "error" in found:
            raise self._broken(str(found["error"]) if isinstance(found, dict) else f"said {line.strip()[:80]!r}")
        return found

    def _broken(self, what: str) -> PeerError:
        self.close()
        return PeerError(f"{self.name}: {what}" + (f"; what it said is in {self.log}" if self.log else ""))
