"""The prompts of a benchmark and the groups that its numbers are reported in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from activations.corpus import Prompt, PromptError, load_corpus, read_prompts

CONVERSATION = "multi-turn conversation"
TURNS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""The categories that Spec-Bench reports together as multi-turn conversation."""
COPY_HEAVY = ("summarization", "rag", "extraction", "coding")
"""Categories whose answers repeat their prompts; in the embedded corpus, `repetition` says it."""
BUILT_IN = "validation"


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt and where its numbers are counted."""

    key: str
    """File stem and prompt id: unique in a run."""
    group: str
    copy_heavy: bool
    messages: tuple[Mapping[str, str], ...]


def load_suite(files: Sequence[str | Path], limit: int = 0) -> list[SuitePrompt]:
    """The prompts of the files, or of the embedded validation corpus; at most `limit` of each file, 0 for all.

    A limited file is thinned evenly over its groups, so that a short run still sees every one.
    """
    parts = {BUILT_IN: load_corpus("validation")} if not files else {}
    for file in files:
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
