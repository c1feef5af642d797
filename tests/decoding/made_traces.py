"""Traces of texts that no model wrote, whose truth is known: which step and node each token comes from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from decoding.request import TARGET, Request
from decoding.trace import About, StepRecord, Trace

ABOUT = About("made", "switchsd", True, "ProbeGate", "resid_post.3", "follow", 0.5, 1, {"depth": 8}, {"seed": 0})
WORDS = [f" w{i}" if i % 11 else "\n" for i in range(200)]
Truth = list[tuple[int, int]]
"""Of each generated token: row of its step and node of its draft, or -1 and -1."""


def made(
    tokens: int = 120,
    prompt: int = 30,
    seed: int = 0,
    words: Sequence[str] = WORDS,
    about: About | None = ABOUT,
    alone: bool = False,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> tuple[Trace, list[Truth]]:
    """A trace with one text of about `tokens` generated tokens. `alone`: nothing is drafted."""
    trace = Trace(about=about, decode=decode or (lambda ids: "".join(words[i] for i in ids)))
    return trace, [write(trace, tokens, prompt, seed, len(words), alone)]


def write(trace: Trace, tokens: int, prompt: int, seed: int, words: int, alone: bool = False) -> Truth:
    """Another text, at the trace's end; copies come from where the pending token stood before."""
    draw = random.Random(seed)
    request = Request(seed, [draw.randrange(words) for _ in range(prompt)])
    index = trace.begin(request)
    text = request.tokens = [*request.prompt, draw.randrange(words)]
    request.sources.append(TARGET)
    truth: Truth = [(-1, -1)]
    last = {token: i + 1 for i, token in enumerate(request.prompt)}
    step = 0
    while len(text) - prompt < tokens:
        pending = len(text) - 1
        start = last.get(text[pending], -1)
        kind = "copy" if start > 0 and draw.random() < 0.4 else "eagle"
        count = 0 if alone else draw.randrange(9)
        draft = [text[min(start + i, pending)] if kind == "copy" else draw.randrange(words) for i in range(count)]
        parents = [i - 1 if kind == "copy" or i < 3 else draw.randrange(-1, i) for i in range(count)]
        path: list[int] = []
        for _ in range(draw.randrange(count + 1)):
            children = [i for i, parent in enumerate(parents) if parent == (path[-1] if path else -1)]
            if children:
                path.append(draw.choice(children))
        bonus = draw.randrange(words)
        row = len(trace)
        trace.add(
            StepRecord(
                request=seed, step=step, start=0.05 * row, position=pending, mode="switchsd",
                drafters=(kind,) if count else (), reason={"copy": "intent", "eagle": "no intent"}[kind],
                intent=draw.random(), match_length=int(start > 0), match_start=start, tokens=tuple(draft),
                parents=tuple(parents), source=(kind,) * count, logq=tuple(-draw.random() for _ in draft),
                accepted=tuple(path), pending=bonus, rows=1, draft_ms=draw.random(), verify_ms=40 + draw.random(),
                overhead_ms=0.5, text=index,
            )
        )  # fmt: skip
        step += 1
        for node in [*path, -1]:
            last[text[-1]] = len(text)
            text.append(draft[node] if node >= 0 else bonus)
            request.sources.append(kind if node >= 0 else TARGET)
            truth.append((row, node))
    return truth


def particles(count: int = 4, rounds: int = 6, seed: int = 0, words: int = 10_000) -> tuple[Trace, Truth]:
    """A text that one of several particles wrote, which were resampled in each round."""
    draw = random.Random(seed)
    trace = Trace(about=ABOUT, decode=lambda ids: "".join(f" {i}" for i in ids))
    request = Request(0, [1, 2, 3])
    trace.begin(request)
    texts: list[tuple[list[int], Truth]] = [([*request.prompt, 4], [(-1, -1)]) for _ in range(count)]
    for step in range(rounds):
        for i, (text, truth) in enumerate(texts):
            draft = [draw.randrange(words) for _ in range(draw.randrange(1, 4))]
            bonus, nodes = draw.randrange(words), tuple(range(len(draft)))
            row = len(trace)
            trace.add(
                StepRecord(
                    request=0, step=step, start=0.1 * step, position=len(text) - 1, mode="smcsd", drafters=("draft",),
                    reason="always", intent=None, match_length=0, match_start=-1, tokens=tuple(draft),
                    parents=tuple(n - 1 for n in nodes), source=("draft",) * len(draft), logq=(-1.5,) * len(draft),
                    accepted=nodes, pending=bonus, rows=count, draft_ms=10.0, verify_ms=20.0, overhead_ms=1.0,
                    particle=i, log_weight=float("-inf") if i == 1 else -float(i), ess=1.5,
                )
            )  # fmt: skip
            texts[i] = ([*text, *draft, bonus], [*truth, *((row, n) for n in nodes), (row, -1)])
        ancestors = [draw.randrange(count) for _ in range(count)]
        texts = [texts[a] for a in ancestors]
    text, truth = texts[0]
    request.tokens = text
    request.sources = [TARGET if node < 0 else "draft" for _, node in truth]
    return trace, truth
