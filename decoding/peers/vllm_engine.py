"""vLLM as a peer (see `process.py`): a script for the Python of its environment, which imports nothing of this project.

One engine in this process, stepped by hand, so that every forward's tokens and time are seen.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def main() -> None:
    """Start an engine, say so, and answer a question a line until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=json.loads, required=True, help="arguments of vllm.LLM, as JSON")
    settings = parser.parse_args().settings
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        import vllm

        engine = vllm.LLM(**settings).llm_engine
    except Exception as error:  # whatever it is, the other side must be told
        reply({"error": f"vllm cannot be started: {type(error).__name__}: {error}"})
        return
    drafts = settings.get("speculative_config")
    differs = "its own kernels for the same weights" + (f"; {json.dumps(drafts)}" if drafts else "")
    reply({"ready": f"vllm {vllm.__version__}", "differs": differs})
    for line in sys.stdin:
        try:
            question = json.loads(line)
            reply(ask_all(engine, question) if "prompts" in question else ask(engine, question))
        except Exception as error:
            reply({"error": f"vllm gave no answer: {type(error).__name__}: {error}"})


@dataclass
class Asked:
    """One request and what has come of it."""

    prompt: list[int]
    began: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each piece came; the first one comes from reading the prompt."""
    pieces: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    """Tokens drafted for each forward after the prompt."""
    prompt_forwards: int = 0
    """Forwards that read a piece of the prompt; 0 where nobody watched."""
    cached: int = 0
    """Tokens of the prompt that were known from earlier ones."""
    read: int = 0
    """Tokens of the prompt that have been read."""

    def take(self, tokens: list[int]) -> None:
        """Note all tokens so far, and the time if there are new ones."""
        if len(tokens) > len(self.tokens):
            self.times.append(time.perf_counter())
            self.pieces.append(len(tokens) - len(self.tokens))
            self.tokens = tokens

    def told(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "decoded": sum(self.pieces[1:]),
            "steps": max(len(self.pieces) - 1, 0),
            "first_token_seconds": self.times[0] - self.began if self.times else 0.0,
            "decode_seconds": self.times[-1] - self.times[0] if self.times else 0.0,
        }

    def told_more(self) -> dict[str, Any]:
        drafted = sum(self.drafted[: max(len(self.pieces) - 1, 0)])
        return {**self.told(), "drafted": drafted, "prompt_forwards": self.prompt_forwards, "cached": self.cached}


def ask(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to one prompt, as it is sent back."""
    asked = Asked(question["prompt"])
    run(engine, [asked], question, {})
    return asked.told()


def ask_all(engine: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Answers to all prompts of a question at once, with what they took: seconds, forwards, counters, a profile."""
    requests = [Asked(prompt) for prompt in question["prompts"]]
    profile = cProfile.Profile() if question.get("profile") else None
    with watching(engine) as inside, profile or contextlib.nullcontext():
        began = time.perf_counter()
        forwards = run(engine, requests, question, inside)
        seconds = time.perf_counter() - began
    return {
        "answers": [asked.told_more() for asked in requests],
        "seconds": seconds,
        "forwards": forwards,
        "counters": counters(),
        "profile": functions(profile, question["profile"]) if profile else [],
    }


def run(engine: Any, requests: list[Asked], question: dict[str, Any], inside: dict[str, Asked]) -> int:
    """Answer all of them, at most `concurrency` at a time; the number of the engine's steps. `inside` takes the
    requests by the names that the scheduler has for them."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        **{"temperature": 0.0, **question.get("sampling", {})}, max_tokens=question["max_new_tokens"],
        stop_token_ids=question["stop"], detokenize=False,
    )  # fmt: skip
    aborts = question.get("abort", {})
    room = question.get("concurrency") or len(requests)
    waiting = [(str(place), asked) for place, asked in enumerate(requests)]
    running: dict[str, Asked] = {}
    steps = 0
    while waiting or running or engine.has_unfinished_requests():  # the last: what is under way for aborted ones
        while waiting and len(running) < room:
            name, asked = waiting.pop(0)
            running[name] = asked
            asked.began = time.perf_counter()
            inside[engine.add_request(name, {"prompt_token_ids": asked.prompt}, sampling)] = asked
        steps += 1
        for output in engine.step():
            running[output.request_id].take(list(output.outputs[0].token_ids))
            if output.finished:
                del running[output.request_id]
        for name in [n for n, asked in running.items() if len(asked.tokens) >= aborts.get(n, sys.maxsize)]:
            engine.abort_request([name])
            del running[name]
    return steps


@contextlib.contextmanager
def watching(engine: Any) -> Iterator[dict[str, Asked]]:
    """Notes of every forward what it reads and verifies for the requests that are put into the dictionary."""
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    inside: dict[str, Asked] = {}
    scheduler.schedule = lambda *given, **named: watch(schedule(*given, **named), inside)
    try:
        yield inside
    finally:
        del scheduler.schedule  # the class's own shows again


def watch(scheduled: Any, inside: dict[str, Asked]) -> Any:
    """Note what a forward is going to read and verify for the requests of `inside`; gives `scheduled` back."""
    for new in scheduled.scheduled_new_reqs:
        if new.req_id in inside:
            inside[new.req_id].cached = inside[new.req_id].read = new.num_computed_tokens
    for name, count in scheduled.num_scheduled_tokens.items():
        asked = inside.get(name)
        if asked is None:
            continue
        if asked.read < len(asked.prompt):
            asked.prompt_forwards += 1
            asked.read += count
        else:
            asked.drafted.append(len(scheduled.scheduled_spec_decode_tokens.get(name, ())))
    return scheduled


def counters() -> dict[str, float]:
    """What this process has counted since it started, by the names of its Prometheus endpoint."""
    from prometheus_client import REGISTRY

    found: dict[str, float] = {}
    for metric in REGISTRY.collect():
        if metric.name.startswith(("vllm:", "switchsd:")) and metric.type in ("counter", "histogram"):
            for sample in metric.samples:
                if sample.name.endswith(("_total", "_count", "_sum")):
                    name = sample.name.removesuffix("_total")
                    found[name] = found.get(name, 0.0) + sample.value
    return found


def functions(profile: Any, part: str) -> list[dict[str, Any]]:
    """Calls and milliseconds of the functions whose file has `part` in its path, dearest first."""
    found = [
        {"function": f"{os.path.basename(file)}:{name}", "calls": calls, "own_ms": own * 1e3, "ms": whole * 1e3}
        for (file, _, name), (calls, _, own, whole, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
        if part in file
    ]
    return sorted(found, key=lambda f: -f["ms"])


if __name__ == "__main__":
    main()
