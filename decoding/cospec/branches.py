"""What each sequence of decisions at the mismatches of an answer leads to.

Greedily, a question's answer is a function of the decisions alone: its mismatches are the nodes of a tree with two
branches each, and its leaves are texts that are right or wrong. `Branches` remembers the part of that tree that was
visited, of many questions; `Runner` visits more of it with the real models, through the engine that decodes.

    branches.json              the models and settings; others cannot go on in the same folder
    runs/00000.jsonl           one answer a line: its decisions, what stood for choice, its text
    runs/00000.safetensors     `states` [mismatches of all these answers, features], in their order

Rounding may make an answer in another batch meet other mismatches than before. What was seen first stands.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from activations.cache import KVCache
from activations.store import write_json
from activations.target import Target
from decoding.answers import Question, right
from decoding.budgets import FixedBudget
from decoding.cospec.state import STATE
from decoding.cospec.verifier import Arbiter, ArbitrationVerifier, ScriptedArbiter
from decoding.draft.drafter import DraftModelDrafter
from decoding.engine import Commit, Engine
from decoding.gates import Always, Choice
from decoding.modes import Plan
from decoding.policies.policy import PolicyError, differences
from decoding.request import Request
from decoding.scheduler import SequentialScheduler

VERSION = 1
Decisions = tuple[bool, ...]
"""At the mismatches of an answer, one after the other: whether the draft's token was kept."""
PROMPTS = 128
"""Most prompts whose keys and values are remembered."""
PART = 64
"""Answers that are written to the disk together."""
FORCED = 64
"""More mismatches than an answer has."""


class Place(NamedTuple):
    """A mismatch."""

    target: int
    """The target's token."""
    draft: int
    position: int
    """In the text."""
    state: torch.Tensor
    """Float32 [features]."""


class Outcome(NamedTuple):
    """A finished answer."""

    right: bool
    tokens: int
    forwards: int
    """Of the target, without prefill."""

    @property
    def speed(self) -> float:
        """Tokens per forward."""
        return self.tokens / max(self.forwards, 1)


class Job(NamedTuple):
    """An answer to be written: the script's decisions first, then the target's tokens."""

    question: Question
    script: Decisions


@dataclass(frozen=True)
class Run:
    """An answer that was written."""

    question: str
    """Its `identity`."""
    decisions: Decisions
    places: tuple[Place, ...]
    """One a decision."""
    outcome: Outcome
    tokens: tuple[int, ...]
    text: str


def identity(question: Question) -> str:
    """The same for the same prompt and answer, whatever their number or seed."""
    told = json.dumps([[dict(m) for m in question.messages], question.answer], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


class Branches:
    """The visited part of the questions' trees, in memory."""

    def __init__(self) -> None:
        self._places: dict[str, dict[Decisions, Place]] = {}
        self._outcomes: dict[str, dict[Decisions, Outcome]] = {}
        self.contradictions = 0
        """Runs that met something else than an earlier run of the same decisions."""

    def add(self, run: Run, script: Decisions | None = None) -> None:
        """What a run met. Where that is not what an earlier one met, its end stands where the script led to nowhere, so
        that nobody asks again."""
        places = self._places.setdefault(run.question, {})
        outcomes = self._outcomes.setdefault(run.question, {})
        for n, place in enumerate(run.places):
            before = run.decisions[:n]
            known = places.setdefault(before, place)
            if before in outcomes or known[:3] != place[:3]:
                if known is place:
                    del places[before]
                break
        else:
            if run.decisions not in places:
                outcomes.setdefault(run.decisions, run.outcome)
                return
        self.contradictions += 1
        script = run.decisions if script is None else script
        decisions: Decisions = ()
        while isinstance(self.at(run.question, decisions), Place):
            n = len(decisions)
            decisions = (*decisions, n < len(script) and script[n])
        outcomes.setdefault(decisions, run.outcome)

    def at(self, question: str, decisions: Decisions) -> Place | Outcome | None:
        """What these decisions lead to: the next mismatch, or the end; None where nobody has been."""
        return self._places.get(question, {}).get(decisions) or self._outcomes.get(question, {}).get(decisions)

    def follow(self, question: str, script: Decisions, draft: bool = False) -> tuple[Decisions, Outcome] | None:
        """Where the script leads, and after it always the draft's token or always the target's."""
        decisions: Decisions = ()
        while not isinstance(found := self.at(question, decisions), Outcome):
            if found is None:
                return None
            n = len(decisions)
            decisions = (*decisions, script[n] if n < len(script) else draft)
        return decisions, found

    def places(self, question: str) -> dict[Decisions, Place]:
        """The mismatches of a question that were visited."""
        return self._places.get(question, {})

    def outcomes(self, question: str) -> dict[Decisions, Outcome]:
        """The answers to a question that were written."""
        return self._outcomes.get(question, {})


class BranchStore(Branches):
    """Branches in a folder."""

    def __init__(self, folder: Path, describes: dict[str, Any]) -> None:
        """`describes`: models and settings. Raises PolicyError for a folder of others, or one that is damaged."""
        super().__init__()
        self.folder = folder
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        meta = {"version": VERSION, "state": list(STATE), **describes}
        file = folder / "branches.json"
        if file.is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
                different = differences(found, meta)
            except (OSError, ValueError, TypeError) as error:
                raise PolicyError(f"cannot read {file} ({error}): delete {folder} and begin again") from error
            if different:
                raise PolicyError(
                    f"{folder} holds branches of other models or settings ({'; '.join(different)}): choose another "
                    "folder, or delete it"
                )
        else:
            write_json(file, meta)
        self._parts = 0
        self._waiting: list[Run] = []
        for part in sorted((folder / "runs").glob("*.jsonl")):
            for run in _read(part):
                self.add(run)
            self._parts = int(part.stem) + 1

    def keep(self, runs: Sequence[Run], jobs: Sequence[Job]) -> None:
        """What came of some jobs: in memory, and soon in the folder."""
        for run, job in zip(runs, jobs, strict=True):
            self.add(run, job.script)
        self._waiting += runs
        if len(self._waiting) >= PART:
            self.flush()

    def flush(self) -> None:
        """Write what is not yet in the folder."""
        if not self._waiting:
            return
        runs, self._waiting = self._waiting, []
        part = self.folder / "runs" / f"{self._parts:05d}.jsonl"
        states = [place.state for run in runs for place in run.places]
        tensors = {"states": torch.stack(states) if states else torch.zeros(0, len(STATE))}
        scratch = part.with_suffix(".tmp")
        save_file(tensors, scratch)
        scratch.replace(part.with_suffix(".safetensors"))
        scratch.write_text("".join(json.dumps(_line(run)) + "\n" for run in runs), encoding="utf-8")
        scratch.replace(part)  # the part counts from here on
        self._parts += 1


def _line(run: Run) -> dict[str, Any]:
    return {
        "question": run.question,
        "decisions": [int(d) for d in run.decisions],
        "mismatches": [list(place[:3]) for place in run.places],
        "right": run.outcome.right,
        "forwards": run.outcome.forwards,
        "tokens": list(run.tokens),
        "text": run.text,
    }


def _read(part: Path) -> list[Run]:
    """The runs of a part."""
    try:
        states = load_file(part.with_suffix(".safetensors"))["states"]
        lines = [json.loads(line) for line in part.read_text(encoding="utf-8").splitlines()]
        if states.shape != (sum(len(line["decisions"]) for line in lines), len(STATE)) or not states.isfinite().all():
            raise ValueError(f"states {list(states.shape)} that do not belong to its lines")
        runs, at = [], 0
        for line in lines:
            decisions = tuple(bool(d) for d in line["decisions"])
            places = tuple(
                Place(int(target), int(draft), int(position), states[at + i])
                for i, (target, draft, position) in zip(range(len(decisions)), line["mismatches"], strict=True)
            )
            outcome = Outcome(bool(line["right"]), len(line["tokens"]), int(line["forwards"]))
            at += len(decisions)
            runs.append(Run(line["question"], decisions, places, outcome, tuple(line["tokens"]), line["text"]))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise PolicyError(
            f"cannot read {part} ({error}): delete it and the file of states beside it; its answers are written again"
        ) from error
    return runs


# -- visiting -----------------------------------------------------------------------------------------


class Writer(Protocol):
    """What writes answers as it is told."""

    def describe(self) -> dict[str, Any]:
        """What the answers depend on, for JSON."""
        ...

    def run(self, jobs: Sequence[Job], rest: Arbiter | None = None) -> list[Run]:
        """The answers, in the order of the jobs. `rest` decides where a script has ended; by default the target's
        tokens are taken."""
        ...


class Runner:
    """Writes answers with the real models, many at once, as mode cospec does, but told what to decide."""

    def __init__(
        self,
        target: Target,
        drafter: DraftModelDrafter,
        draft_tokens: int,
        max_new_tokens: int,
        stops: bool = True,
        rows: int = 32,
    ) -> None:
        self.target, self.max_new_tokens = target, max_new_tokens
        self._arbiter = ScriptedArbiter({})
        self._verifier = ArbitrationVerifier(target, self._arbiter, stops, records=True)
        gate = Always(Choice(drafter.name, FixedBudget(draft_tokens, draft_tokens)))
        self._engine = _Engine(target, Plan(gate, (drafter.telling(),), verifier=self._verifier), rows)
        self._describes = {
            "target": target.fingerprint.to_dict(),
            "dtype": str(target.dtype),
            "drafter": drafter.telling().describe(),
            "draft_tokens": draft_tokens,
            "max_new_tokens": max_new_tokens,
            "stops": stops,
        }

    def describe(self) -> dict[str, Any]:
        """What the answers depend on, for JSON."""
        return self._describes

    def run(self, jobs: Sequence[Job], rest: Arbiter | None = None) -> list[Run]:
        """The answers, in the order of the jobs; those to one question are best side by side. `rest` decides where a
        script has ended; by default the target's tokens are taken."""
        requests = [
            Request(i, self.target.encode_messages(job.question.messages), self.max_new_tokens)
            for i, job in enumerate(jobs)
        ]
        self._arbiter.scripts, self._arbiter.rest = {i: job.script for i, job in enumerate(jobs)}, rest
        runs: list[Run | None] = [None] * len(jobs)

        def ended(commit: Commit) -> bool:
            request = commit.request
            tokens = request.generated[: self.max_new_tokens]
            stops = [i for i, token in enumerate(tokens) if token in self.target.stop_ids]
            if not stops and len(tokens) < self.max_new_tokens and not commit.cut:
                return False
            tokens = tokens[: stops[0] + 1] if stops else tokens
            runs[request.number] = self._finished(request, jobs[request.number].question, tokens)
            return True

        list(SequentialScheduler(self._engine).run(requests, ended))
        self._engine.trace.clear()
        if not all(runs):
            raise PolicyError("not every answer was written: the machine is out of memory; use fewer rows")
        return [run for run in runs if run is not None]

    def _finished(self, request: Request, question: Question, tokens: Sequence[int]) -> Run:
        text = self.target.decode([t for t in tokens if t not in self.target.stop_ids])
        decisions = self._verifier.running(request).decisions
        places = tuple(Place(d.target, d.draft, d.position, d.state) for d in decisions)
        outcome = Outcome(right(question, text), len(tokens), self._engine.steps(request))
        return Run(identity(question), tuple(d.kept for d in decisions), places, outcome, tuple(tokens), text)

    def close(self) -> None:
        """Forget the models. Safe to repeat."""
        self._engine.close()


class _Engine(Engine):
    """Remembers what it has computed of the latest prompts."""

    def __init__(self, target: Target, plan: Plan, rows: int) -> None:
        super().__init__(target, plan, rows)
        self._prompts: OrderedDict[tuple[int, ...], KVCache] = OrderedDict()

    def steps(self, request: Request) -> int:
        return self._steps[request]

    def _prefill(self, tokens: list[int], cache: KVCache) -> torch.Tensor:
        known = self._prompts.get(tuple(tokens))
        if known is None:
            logits = super()._prefill(tokens, cache)
            self._prompts[tuple(tokens)] = cache.branches([len(tokens)], 0)
            while len(self._prompts) > PROMPTS:
                self._prompts.popitem(last=False)
            return logits
        cache.load_row(0, known)
        cache.crop_row(0, len(tokens))  # a view tells the whole
        return torch.empty(0)  # the verifier opens: nobody asks for them


def plans(branches: Branches, question: Question, first: int) -> Iterator[Job]:
    """The answers that are not yet known, of those that show what decisions are worth: the target's tokens all the way
    and the draft's; and either's after one to `first` - 1 of the other's. What comes later depends on what the earlier
    ones show: ask again until nothing comes."""
    key = identity(question)
    for draft in (False, True):
        alone = branches.follow(key, (), draft)
        if alone is None:
            yield Job(question, (draft,) * FORCED)
            continue
        for n in range(1, min(len(alone[0]), first)):
            if branches.follow(key, (draft,) * n, not draft) is None:
                yield Job(question, (draft,) * n + (not draft,) * FORCED)


def explore(
    store: BranchStore, runner: Writer, questions: Sequence[Question], first: int = 4, together: int = 32
) -> Iterator[int]:
    """Visit what `plans` names, for `together` questions at a time; yields how many questions are done."""
    for start in range(0, len(questions), together):
        part = questions[start : start + together]
        while jobs := [job for question in part for job in plans(store, question, first)]:
            store.keep(runner.run(jobs), jobs)
        store.flush()
        yield start + len(part)


class Explored:
    """Questions by number, whose branches are looked up, and written where nobody has been.

    Who goes somewhere goes on: `rest` says how an answer that has to be written is likely to continue, so that its next
    mismatches are known too.
    """

    def __init__(
        self, store: BranchStore, runner: Writer, questions: Sequence[Question], rest: Arbiter | None = None
    ) -> None:
        self.store, self.questions, self.rest = store, questions, rest
        self._runner = runner
        self._keys = [identity(question) for question in questions]

    def __len__(self) -> int:
        return len(self.questions)

    def at(self, question: int, decisions: Decisions) -> Place | Outcome | None:
        """The next mismatch, or the end; None where nobody has been."""
        return self.store.at(self._keys[question], decisions)

    def visit(self, wanted: Sequence[tuple[int, Decisions]]) -> None:
        """Go there: afterwards `at` knows each of these."""
        for start in range(0, len(wanted), PART):
            jobs = [Job(self.questions[q], decisions) for q, decisions in wanted[start : start + PART]]
            self.store.keep(self._runner.run(jobs, self.rest), jobs)

    def mixed(self, question: int) -> bool:
        """Whether some of its answers are known to be right and some to be wrong."""
        found = [outcome.right for outcome in self.store.outcomes(self._keys[question]).values()]
        return any(found) and not all(found)


# -- what they show -----------------------------------------------------------------------------------


class Examples(NamedTuple):
    """Mismatches both of whose branches were followed to their ends."""

    states: torch.Tensor
    """Float32 [n, features]."""
    keep: torch.Tensor
    """Bool [n]: the draft's token leads to a right answer."""
    take: torch.Tensor
    """Bool [n]: the target's token does."""
    question: torch.Tensor
    """Long [n]: which of the questions."""

    @property
    def ties(self) -> torch.Tensor:
        """Bool [n]: both are right or both are wrong."""
        return self.keep == self.take


def examples(
    branches: Branches, questions: Iterable[Question], own: bool = False, first: int | None = None
) -> Examples:
    """All that were visited of these questions; `first`: only those that `plans` names, and none that depend on what a
    policy has visited. After either token the target's were taken wherever there was a choice; `own`: after the draft's
    token, the draft's."""
    rows: list[tuple[torch.Tensor, bool, bool, int]] = []
    for number, question in enumerate(questions):
        key = identity(question)
        for decisions, place in branches.places(key).items():
            if first is not None and (len(decisions) >= first or len(set(decisions)) > 1):
                continue
            keep = branches.follow(key, (*decisions, True), draft=own)
            take = branches.follow(key, (*decisions, False))
            if keep is not None and take is not None:
                rows.append((place.state, keep[1].right, take[1].right, number))
    states = torch.stack([row[0] for row in rows]) if rows else torch.zeros(0, len(STATE))
    flags = torch.tensor([row[1:3] for row in rows], dtype=torch.bool).view(-1, 2)
    return Examples(states, flags[:, 0], flags[:, 1], torch.tensor([row[3] for row in rows], dtype=torch.long))


def shares(branches: Branches, questions: Sequence[Question]) -> dict[str, float]:
    """Of the explored questions: shares that the target alone gets right, that the draft gets right wherever it may
    speak, and that the best of the visited sequences of decisions does; the same four ways crossed; mismatches an
    answer has."""
    found = []
    for question in questions:
        key = identity(question)
        ends = [branches.follow(key, (), draft) for draft in (False, True)]
        if ends[0] is not None and ends[1] is not None:
            best = any(outcome.right for outcome in branches.outcomes(key).values())
            worst = all(outcome.right for outcome in branches.outcomes(key).values())
            found.append((ends[0][1].right, ends[1][1].right, best, worst, len(ends[0][0])))
    if not found:
        return {"questions": 0}
    n = len(found)
    return {
        "questions": n,
        "target": sum(t for t, *_ in found) / n,
        "draft": sum(d for _, d, *_ in found) / n,
        "best": sum(b for _, _, b, *_ in found) / n,
        "worst": sum(w for _, _, _, w, _ in found) / n,
        "both": sum(t and d for t, d, *_ in found) / n,
        "only_draft": sum(d and not t for t, d, *_ in found) / n,
        "only_target": sum(t and not d for t, d, *_ in found) / n,
        "neither": sum(not (t or d) for t, d, *_ in found) / n,
        "mismatches": sum(m for *_, m in found) / n,
    }
