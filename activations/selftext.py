"""Bulk text that the target itself wrote, with its states, for training drafters.

Part of the documents are conversations in which the target writes the user's turn too (it continues its own
chat prefix), or, without a chat template, texts that it writes from their beginning; the rest answer the tasks of
`activations.tasks`, over passages from earlier documents and over permissively licensed code, or prompts of the
user's own. Documents that share a 13-gram of words with a
benchmark file are dropped and counted.

The states are kept as generation computes them, so the text costs one forward pass a token and no second one.
The result is a capture store with selection `all`: a document's rows are contiguous and ordered, `loss_mask` is
True where the target wrote the token.

A target that writes the user's turn too: Magpie, arXiv 2406.08464.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from activations.corpus import Prompt, prompts_hash
from activations.generation import Completion, FollowUp, Request, complete
from activations.provenance import provenance
from activations.sampling import Sampling
from activations.sites import eagle_sites, last_site
from activations.store import CaptureStore, StoreWriter, text_rows
from activations.target import Target, TargetError
from activations.tasks import task, whole_words

NGRAM = 13
FUTILE = 1000
"""Failures after which it is useless to go on trying."""


@dataclass(frozen=True)
class SelfTextConfig:
    """What to write."""

    tokens: int = 1_000_000
    """Stop when the target has written this many tokens."""
    max_new_tokens: int = 288
    """Longest answer, in tokens."""
    max_prompt_tokens: int = 224
    """Longer task prompts are not used. Attention pays for the longest row of the batch."""
    passage_words: int = 110
    """Longest passage in a task prompt, in words."""
    rows: int = 112
    """Sequences decoded at once."""
    greedy: float = 0.7
    """Share of answers decoded greedily; the others are sampled at temperature 0.8."""
    own_turns: float = 0.75
    """Share of documents whose user turn the target writes; without a chat template, that it writes whole."""
    shard_documents: int = 96
    """Documents in a shard; an interrupted run loses at most one shard."""
    seed: int = 0
    """Chooses prompts and keys the sampling."""

    def __post_init__(self) -> None:
        for name in ("tokens", "max_new_tokens", "max_prompt_tokens", "passage_words", "rows", "shard_documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("greedy", "own_turns"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a share lies in [0, 1]")


def word_ngrams(text: str, n: int = NGRAM) -> set[tuple[str, ...]]:
    """All runs of n words, lower case."""
    words = text.lower().split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def benchmark_ngrams(files: Iterable[Path]) -> set[tuple[str, ...]]:
    """All 13-grams of the turns and references in Spec-Bench-format files."""
    grams: set[tuple[str, ...]] = set()
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            reference = record.get("reference") or ()
            for text in (*record.get("turns", ()), *map(str, [reference] if isinstance(reference, str) else reference)):
                grams |= word_ngrams(text)
    return grams


def write(
    target: Target,
    folder: Path,
    config: SelfTextConfig,
    benchmarks: Iterable[Path] = (),
    prompts: Sequence[Prompt] = (),
) -> Iterator[int]:
    """Extend the store in `folder` until the target has written `config.tokens` tokens; yields the count so far.

    Where `prompts` are given they are answered instead of tasks: all of them in turn, again and again; answers after
    the first round are sampled. Raises ValueError if nearly all that the target writes stands in the `benchmarks`
    files, or if no task prompt fits.
    """
    forbidden = benchmark_ngrams(benchmarks)
    sites = [*eagle_sites(target.blocks), last_site(target.blocks)]
    described = {k: v for k, v in asdict(config).items() if k not in ("tokens", "rows")}  # may change on resumption
    with StoreWriter(
        folder,
        {
            "target": target.fingerprint.to_dict(),
            "selection": "all",
            "config": described,
            "prompts": prompts_hash(prompts),
            "dtype": str(target.dtype).removeprefix("torch."),
            "attention": target.config._attn_implementation,
            "provenance": provenance(seed=config.seed),
        },
        sites,
    ) as store:
        written = sum(s["written"] for s in store.manifest["shards"])
        resumed = _resume(target, store) if store.complete_shards else ([], set())
        conversation = Conversation(target, config, resumed, prompts)
        shard: list[tuple[int, Completion]] = []
        contaminated = 0
        pending = 0

        def wanted() -> Iterator[Request]:
            while written + pending < config.tokens:
                yield conversation.next_request()

        for completion in complete(target, wanted(), config.rows, sites):
            start = conversation.observe(completion)
            if start is None:
                continue
            if forbidden and not forbidden.isdisjoint(
                word_ngrams(target.decode(completion.request.prompt + completion.tokens))
            ):
                contaminated += 1
                if contaminated >= FUTILE and contaminated > 20 * len(shard):
                    raise ValueError(
                        f"{contaminated} documents share {NGRAM} words with the benchmark files, and only {len(shard)} "
                        "do not: the files hold text that this target always writes"
                    )
                continue
            shard.append((start, completion))
            pending += len(completion.request.prompt) + len(completion.tokens) - start
            if len(shard) == config.shard_documents:
                store.write(*_rows(shard), written=pending, contaminated=contaminated)
                written += pending
                shard, pending, contaminated = [], 0, 0
            yield written + pending
        if shard:
            store.write(*_rows(shard), written=pending, contaminated=contaminated)


class Conversation:
    """Decides what is asked next, and where the target's own text begins in what comes back."""

    def __init__(
        self,
        target: Target,
        config: SelfTextConfig,
        resumed: tuple[list[str], set[int]],
        prompts: Sequence[Prompt] = (),
    ) -> None:
        self.target = target
        self.config = config
        self._prompts = [target.encode_messages(p.messages) for p in prompts]
        self.passages, self._done = resumed
        self._prefix, self._opening = chat_frame(target) if target.tokenizer.chat_template else (beginning(target), [])
        self._vocabulary = whole_words(target.tokenizer.get_vocab())
        self._number = 0

    def next_request(self) -> Request:
        """The next document to write: one of the given prompts, a turn of the target's own, or a task.

        Raises ValueError if no task prompt of very many fits into the limit of tokens.
        """
        too_long = 0
        while too_long < FUTILE:
            self._number += 1
            if self._number in self._done:
                continue
            rng = random.Random(f"{self.config.seed}:{self._number}")
            sampled = Sampling(0.8, top_k=64, seed=self.config.seed)
            answer = Sampling() if rng.random() < self.config.greedy else sampled
            if self._prompts:
                again, which = divmod(self._number - 1, len(self._prompts))
                prompt = self._prompts[which]
                return Request(self._number, prompt, self.config.max_new_tokens, sampled if again else Sampling())
            if rng.random() < self.config.own_turns and self._prefix:
                turn = Sampling(1.0, top_k=64, seed=self.config.seed)
                if not self._opening:  # no turns
                    return Request(self._number, self._prefix, self.config.max_new_tokens, turn)
                follow_up = FollowUp(tuple(self._opening), self.config.max_new_tokens, answer)
                return Request(self._number, self._prefix, 80, turn, follow_up)
            text, _ = task(rng, self.passages, self.config.passage_words, self._vocabulary)
            with suppress(TargetError):  # longer than the context, even
                ids = self.target.encode(text)
                if len(ids) <= self.config.max_prompt_tokens:
                    return Request(self._number, ids, self.config.max_new_tokens, answer)
            too_long += 1
        raise ValueError(f"no task prompt fits into max_prompt_tokens = {self.config.max_prompt_tokens}: allow more")

    def observe(self, completion: Completion) -> int | None:
        """Where the target's own text begins in a finished document; None if it never came to an answer."""
        if completion.request.follow_up and not completion.followed_up:
            return None
        if len(completion.tokens) > 90:
            text = completion.tokens
            if completion.followed_up:  # the answer alone
                text = text[next(i for i, t in enumerate(text) if t in self.target.stop_ids) + 1 :]
                text = text[len(self._opening) :]
            self.passages.append(self.target.decode(text))
            del self.passages[:-400]
        return len(completion.request.prompt)


def chat_frame(target: Target) -> tuple[list[int], list[int]]:
    """The chat template's ids before a first user turn, and between the turn's stop token and the answer."""
    marker = "\x00"
    text = str(target.tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False))
    prefix = list(target.tokenizer(text.split(marker)[0], add_special_tokens=False)["input_ids"])
    ids = target.encode("a")
    last_stop = max(i for i, t in enumerate(ids) if t in target.stop_ids)
    return prefix, ids[last_stop + 1 :]


def beginning(target: Target) -> list[int]:
    """The ids before a text's first word; none where the tokenizer marks neither beginning nor end."""
    # Where only the end is marked (GPT-2), the end of another text comes before.
    marks = (target.tokenizer.bos_token_id, target.tokenizer.eos_token_id)
    return [int(mark) for mark in marks if mark is not None][:1]


def _rows(shard: list[tuple[int, Completion]]) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor]]:
    parts = [text_rows(c.request.number, c.request.prompt + c.tokens, start) for start, c in shard]
    rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    sites = shard[0][1].states
    return rows, {site: torch.cat([c.states[site] for _, c in shard]) for site in sites}


def _resume(target: Target, writer: StoreWriter) -> tuple[list[str], set[int]]:
    store = CaptureStore(writer.folder, writer.manifest)  # without the shards that are to be written again
    done = {d for s in store.shards for d in s["documents"]}
    last = store.shard_rows(len(store.shards) - 1)
    passages = []
    for number in np.unique(last["document"]):
        mine = last["document"] == number
        passages.append(target.decode(last["pending"][mine & last["loss_mask"]].tolist()))
    return passages, done
