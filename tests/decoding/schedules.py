"""A target whose law is a hash of the text, behind the real engine and the real cache: whoever mixes up two rows, a
path or a position gets another text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from activations.cache import KVCache
from activations.sampling import Sampling
from decoding.budgets import Budget, FixedBudget
from decoding.engine import Asked, Commit, Draft, Engine
from decoding.gates import Always, Choice
from decoding.modes import Plan
from decoding.request import Request
from decoding.tree import DraftTree

VOCABULARY, LONGEST, LAWS, PRIME = 12, 64, 499, 2_147_483_647
STOP = 11
_generator = torch.Generator().manual_seed(7)
WEIGHTS = torch.randint(1, PRIME, (LONGEST,), generator=_generator)
TABLE = 2 * torch.randn(LAWS, VOCABULARY, generator=_generator)


class HashTarget:
    """The cache's keys are the tokens themselves."""

    device, vocab_size = torch.device("cpu"), VOCABULARY

    def sites(self, names: Sequence[str]) -> list[Any]:
        assert not names
        return []

    def forward(
        self,
        tokens: torch.Tensor,
        cache: KVCache,
        ancestors: torch.Tensor | None = None,
        depths: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        lengths = torch.tensor(cache.lengths)
        rows, q = tokens.shape
        states = tokens[:, None, :, None].double()
        keys, _ = cache.update(states, states, 0)
        keys = keys[:, 0, :, 0].long()
        slots = torch.arange(keys.shape[1])
        before = ((keys + 1) * WEIGHTS[: len(slots)] * (slots < lengths[:, None])).sum(1)
        if ancestors is None or depths is None:
            ancestors, depths = torch.ones(rows, q, q, dtype=torch.bool).tril(), torch.arange(q).expand(rows, q)
        new = (tokens + 1) * WEIGHTS[lengths[:, None] + depths]
        hashed = before[:, None] + (ancestors * new[:, None, :]).sum(2)
        return TABLE[hashed % PRIME % LAWS][:, -logits_to_keep:]


def truth(prompt: Sequence[int], sampling: Sampling, number: int, most: int) -> list[int]:
    """The target's own text, one token at a time; the stop token is its last one."""
    hashed = sum((t + 1) * int(WEIGHTS[i]) for i, t in enumerate(prompt))
    tokens: list[int] = []
    while len(tokens) < most and (not tokens or tokens[-1] != STOP):
        place = len(prompt) + len(tokens)
        law = TABLE[hashed % PRIME % LAWS][None]
        tokens.append(int(sampling.next_tokens(law, torch.tensor([number]), torch.tensor([place]))))
        hashed += (tokens[-1] + 1) * int(WEIGHTS[place])
    return tokens


class Guesser:
    """Knows the texts, and is right so often; its guess depends on the request and the position alone."""

    name = "draft"
    sites: tuple[str, ...] = ()

    def __init__(self, texts: dict[int, list[int]], right: float) -> None:
        self.texts, self.right = texts, right
        self.open: set[Request] = set()

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        self.open.add(request)

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        assert request in self.open

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [self._tree(r, min(b.depth, r.room)) for r, b in zip(requests, budgets, strict=True)]

    def _tree(self, request: Request, depth: int) -> DraftTree | None:
        assert request in self.open
        done = len(request.tokens) - len(request.prompt)
        draw = random.Random(1000 * request.number + done)
        ahead = self.texts[request.number][done : done + draw.randint(0, depth)]
        if not ahead:
            return None
        tokens, parents = [], []
        for i, token in enumerate(ahead):
            tokens.append(token if draw.random() < self.right else draw.randrange(VOCABULARY))
            parents.append(i - 1)
        for _ in range(draw.randint(0, 2)):  # a few branches
            tokens.append(draw.randrange(VOCABULARY))
            parents.append(draw.randint(-1, len(ahead) - 1))
        return DraftTree(tokens, parents, [self.name] * len(tokens), [0.0] * len(tokens))

    def close(self, request: Request) -> None:
        self.open.discard(request)


class Elsewhere(Guesser):
    """Is asked ahead, and answers from what it knew then."""

    def ask(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> Callable[[], list[DraftTree | None]]:
        trees = self.propose(requests, budgets)
        return lambda: trees


class WatchedEngine(Engine):
    """Nothing is verified with a draft that was asked for before the latest verification."""

    def begin(self, requests: Sequence[Request] | None = None) -> Asked:
        asked = super().begin(requests)
        self.__dict__.setdefault("asked", {}).update({row: len(row.tokens) for row in asked.rows})
        return asked

    def verify(self, drafts: Sequence[Draft]) -> list[Commit]:
        for draft in drafts:
            assert self.__dict__["asked"][draft.request] == len(draft.request.tokens), "a stale draft"
        return super().verify(drafts)


def engine_for(drafter: Any, rows: int, depth: int = 4) -> WatchedEngine:
    plan = Plan(Always(Choice(drafter.name, FixedBudget(8, depth))), (drafter,))
    return WatchedEngine(HashTarget(), plan, rows)  # type: ignore[arg-type]


def ends(commit: Commit) -> bool:
    """As a decoder cuts what lies behind a stop token or a limit."""
    request = commit.request
    if commit.cut:
        return True
    kept = request.generated
    if STOP in kept:
        kept = kept[: kept.index(STOP) + 1]
    kept = kept[: request.max_new_tokens]
    request.tokens = [*request.prompt, *kept]
    return kept[-1] == STOP or len(kept) == request.max_new_tokens
