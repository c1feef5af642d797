"""The prompts of a benchmark and the groups that its numbers are reported in.

Source of the file format: Spec-Bench, arXiv 2401.07851.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from activations.corpus import Prompt, PromptError, load_corpus, read_prompts
from activations.target import Target, TargetError

CONVERSATION = "multi-turn conversation"
TURNS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""The categories that Spec-Bench reports together as multi-turn conversation."""
COPY_HEAVY = ("summarization", "rag", "extraction", "coding")
"""Categories whose answers repeat their prompts; in the embedded corpus, `repetition` says it."""
BUILT_IN = ("validation", "decoys")
"""Embedded suites, by name: all held-out prompts, and those of them in which runs of words recur by accident and
go on in another way. Prompts that probes and heads were trained on are in neither."""
CONTEXT = "context"
"""Name of the sweep over prompt lengths."""


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt and where its numbers are counted."""

    key: str
    """File stem and prompt id: unique in a run."""
    group: str
    copy_heavy: bool
    messages: tuple[Mapping[str, str], ...]


def load_suite(files: Sequence[str | Path], limit: int = 0) -> list[SuitePrompt]:
    """The prompts of the files and embedded suites named, by default of all held-out ones; at most `limit` of each,
    0 for all.

    A limited file is thinned evenly over its groups, so that a short run still sees every one. Raises PromptError for
    two files of one name, and for a file that cannot be read.
    """
    parts: dict[str, list[Prompt]] = {}
    for file in files or BUILT_IN[:1]:
        name = str(file)
        if name in BUILT_IN:
            held_out = load_corpus("validation")
            parts[name] = held_out if name == "validation" else [p for p in held_out if p.decoy]
            continue
        stem = Path(file).stem
        if stem in parts:
            raise PromptError(f"two suite files are called {stem!r}: rename one, their rows could not be told apart")
        parts[stem] = read_prompts(file)
    suite = []
    for stem, prompts in parts.items():
        families = {p.family for p in prompts}
        part = [_place(stem, p, families) for p in prompts]
        suite.extend(_thin(part, limit) if limit else part)
    return suite


def _place(stem: str, prompt: Prompt, families: set[str]) -> SuitePrompt:
    group = CONVERSATION if prompt.family in TURNS else prompt.family
    if len(families) == 1:  # a data set of one task is a group of its own, whatever it calls its category
        group = stem
    heavy = prompt.family in COPY_HEAVY if prompt.repetition is None else prompt.repetition == "heavy"
    return SuitePrompt(f"{stem}:{prompt.id}", group, heavy, prompt.messages)


def _thin(prompts: list[SuitePrompt], limit: int) -> list[SuitePrompt]:
    """At most `limit` prompts, every group by its share (largest remainders), evenly spaced inside each."""
    if limit >= len(prompts):
        return prompts
    groups: dict[str, list[SuitePrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt)
    share = {name: limit * len(members) / len(prompts) for name, members in groups.items()}
    quota = {name: int(value) for name, value in share.items()}
    for name in sorted(share, key=lambda n: quota[n] - share[n])[: limit - sum(quota.values())]:
        quota[name] += 1
    chosen = {m[i * len(m) // quota[name]].key for name, m in groups.items() for i in range(quota[name])}
    return [p for p in prompts if p.key in chosen]


def at(length: int) -> str:
    """The group of the prompts that were filled up to a length."""
    return f"context {length}"


def at_lengths(suite: Sequence[SuitePrompt], target: Target, lengths: Sequence[int], room: int) -> list[SuitePrompt]:
    """Every prompt at each length in tokens that leaves `room` in the target, in groups by length: texts of the
    suite's other prompts stand before its last message. Prompts that are longer by themselves are left out of it.
    Raises PromptError for a length that the target cannot take, or that is shorter than every prompt.
    """
    out = []
    for length in lengths:
        if length + room > target.max_length:
            raise PromptError(
                f"{target.name} takes {target.max_length} tokens: a context of {length} leaves no room for {room} more"
            )
        filled = [_filled(suite, i, target, length) for i in range(len(suite))]
        kept = [replace(p, key=f"{p.key}@{length}", group=at(length)) for p in filled if p is not None]
        if not kept:
            raise PromptError(f"no prompt of the suite is as short as {length} tokens: name a longer context")
        out += kept
    return out


def _filled(suite: Sequence[SuitePrompt], place: int, target: Target, length: int) -> SuitePrompt | None:
    """The prompt with about `length` tokens, at most that many; None where it is longer by itself."""
    prompt = suite[place]
    others = [suite[(place + i) % len(suite)] for i in range(1, len(suite))] or [prompt]
    text = "\n\n".join(m["content"] for p in others for m in p.messages)
    bare = len(target.encode_messages(prompt.messages))
    if bare > length:
        return None
    while len(text) < 16 * length:  # more characters than so many tokens have
        text = f"{text}\n\n{text}"
    last = prompt.messages[-1]
    low, high = 0, len(text)  # characters that fit, and that do not
    best = prompt
    while high - low > 8:
        middle = min((low + high) // 2, max(2 * low, 4 * (length - bare)) + 8)  # the whole text is dear to encode
        message = {**last, "content": f"{text[:middle]}\n\n{last['content']}"}
        trial = replace(prompt, messages=(*prompt.messages[:-1], message))
        try:
            fits = len(target.encode_messages(trial.messages)) <= length
        except TargetError:
            fits = False
        if fits:
            low, best = middle, trial
        else:
            high = middle
    return best
