"""Drafting with a small causal LM: a chain of tokens for each request, all requests together.

The draft model keeps a row of its own KV cache for each request. What a row lacks is fed when the next draft is asked
for (lazy catch-up), in the same forward as the pending token; of what was drafted before, the tokens that the target
has followed are there already. A chain that was followed to its end leaves two tokens to feed: its last one, which
nobody has read, and the target's own.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from activations.cache import KVCache
from activations.linear import Product
from activations.sampling import Sampling
from activations.target import Target
from decoding.budgets import Budget, FixedBudget, Growth
from decoding.digest import in_bytes
from decoding.request import Request
from decoding.rows import Rows
from decoding.tree import DraftTree

Draw = Literal["keyed", "own"]
OWN = "draft"
"""Stream of the noise of draws of its own."""
FEW = 16
"""Tokens that a row may lack to be fed together with others, which are padded to as many."""


@dataclass
class _Held:
    """What a request's row holds: the first `shared` tokens of the request, then drafted ones."""

    shared: int = 0
    drafted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Group:
    """Requests that are sampled alike."""

    sampling: Sampling
    places: torch.Tensor
    """Their indices [n] among the requests that are asked about."""
    keys: torch.Tensor
    positions: torch.Tensor
    """Of their first drafted tokens."""


class Outputs:
    """Some rows of a model's output matrix."""

    def __init__(self, model: Target, tokens: Sequence[int]) -> None:
        """Raises ValueError for ids that the model lacks, or for none."""
        self.tokens = torch.tensor(sorted(set(tokens)), dtype=torch.long, device=model.device)
        if not len(self.tokens) or self.tokens[0] < 0 or self.tokens[-1] >= model.vocab_size:
            raise ValueError(f"the frequent tokens of {model.name} must be some of 0 to {model.vocab_size - 1}")
        rule, bias = model.structure.logit_rule, getattr(model.head, "bias", None)
        assert rule is not None  # else the target has no logits
        self._rule, self._size = rule, model.vocab_size
        weight = model.head.weight.detach()[self.tokens].contiguous()
        self._product = Product(weight, None if bias is None else bias.detach()[self.tokens])

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[B, V] after normed states [B, width]; -inf where there is no row."""
        with torch.no_grad():
            some = self._rule(self._product(states))
        out = some.new_full((len(some), self._size), -torch.inf)
        out[:, self.tokens] = some
        return out


class DraftModelDrafter:
    """Proposes a chain from a causal LM with the target's vocabulary.

    Greedy requests get the model's first choices. Where a request samples, tokens are drawn from the model's law under
    the request's own sampling: with the target's noise (`keyed`), so that both draw the same token as often as their
    laws allow, or with noise of its own (`own`), and then the tree tells the law as `q_logits`.

    A budget's scores are log-probabilities, cumulated along the chain, of the model's first choices: equal to those of
    the drafted tokens where it is greedy. How likely a drawn token was says little about whether the target draws it
    too; and a length that depended on the last drawn token would bend the law that rejection sampling is told.

    The output matrix is most of a small model's time. Where draws are keyed, nothing but the `frequent` tokens need be
    proposed, and only their rows are multiplied; draws of its own are from the whole law.

    A drafter that `tells` draws with the target's noise, and its trees carry as `q_logits` what the model made of every
    position, whatever the sampling: unprocessed, -inf for tokens that it does not propose.
    """

    name = "draft"
    sites: tuple[str, ...] = ()

    def __init__(
        self,
        target: Target,
        model: Target,
        draw: Draw = "keyed",
        frequent: Sequence[int] | None = None,
        tells: bool = False,
    ) -> None:
        """`frequent`: ids of the tokens that are proposed; all by default. Raises ValueError for a model of fewer
        tokens than the target's."""
        if draw not in get_args(Draw):
            raise ValueError(f"unknown draw {draw!r}: use {' or '.join(get_args(Draw))}")
        if tells and draw == "own":
            raise ValueError("a drafter that draws on its own tells its law anyway: leave out tells, or use draw=keyed")
        if model.vocab_size < target.vocab_size:
            raise ValueError(
                f"the draft model {model.name} has {model.vocab_size} tokens and {target.name} {target.vocab_size}: "
                "choose one with the target's tokenizer"
            )
        self.target, self.model, self.draw, self.frequent, self.tells = target, model, draw, frequent, tells
        self._outputs = Outputs(model, frequent) if frequent is not None and draw == "keyed" else None
        self._rows = Rows(1)
        self._held: dict[Request, _Held] = {}

    def drawing(self, draw: Draw) -> DraftModelDrafter:
        """The same model, drawing that way."""
        return self if draw == self.draw else DraftModelDrafter(self.target, self.model, draw, self.frequent)

    def telling(self) -> DraftModelDrafter:
        """The same model with rows of its own, drawing with the target's noise and telling what it thinks."""
        made = copy.copy(self.drawing("keyed"))  # which shares the model and its frequent rows
        made.tells, made._rows, made._held = True, Rows(1), {}
        return made

    # -- the drafter's protocol ---------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What its drafts depend on, for JSON."""
        return {"name": self.name, **self.size, "weights": self._weights, "draw": self.draw}

    @property
    def size(self) -> dict[str, int]:
        """What its speed depends on."""
        outputs = self.model.vocab_size if self._outputs is None else len(self._outputs.tokens)
        return {"blocks": self.model.blocks, "width": self.model.width, "outputs": outputs}

    @cached_property
    def _weights(self) -> str:
        """The revision of a model of its own files; else (cut from the target, whose embedding it shares) a hash of its
        blocks."""
        shares = self.model.embed.weight.data_ptr() == self.target.embed.weight.data_ptr()
        if not shares and self.model.fingerprint.revision != "unknown":
            return self.model.fingerprint.revision
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.layers.state_dict().items()):
            digest.update(name.encode())
            digest.update(in_bytes(tensor))
        return digest.hexdigest()[:16]

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        """Nothing is computed before the first proposal."""

    def resume(self, request: Request, features: torch.Tensor | None, before: Request, kept: int) -> None:
        if before not in self._rows:
            return
        self._rows.pass_on(before, request)
        held = self._held[request] = self._held.pop(before)
        if held.shared > kept + 1:  # what follows belongs to the other text
            held.shared, held.drafted = kept + 1, []

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        """The row is compared with the request's tokens when the next proposal is asked for."""

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        if not any(request in self._rows for request in requests):
            return
        self._hold(requests)
        held = [self._held[request] for request in requests]
        cache = self._rows.take(requests)
        cache.select(rows, min(from_position, *(h.shared for h in held)))
        for request, row in zip(requests, rows, strict=True):
            self._held[request] = _Held(held[row].shared, list(held[row].drafted))

    def close(self, request: Request) -> None:
        if request in self._rows:
            self._rows.leave([request])
            del self._held[request]
        if not self._held:  # nor is the memory
            self._rows = Rows(1)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        depths = {r: self._deepest(r, budget) for r, budget in zip(requests, budgets, strict=True)}
        asked = [request for request in requests if depths[request] > 0]
        if not asked:
            return [None] * len(requests)
        self._hold(asked)
        asked = self._rows.order(asked)
        budget_of = dict(zip(requests, budgets, strict=True))
        trees = self._chains(asked, [budget_of[r] for r in asked], [depths[r] for r in asked])
        grown = dict(zip(asked, trees, strict=True))
        return [grown.get(request) for request in requests]

    def _deepest(self, request: Request, budget: Budget) -> int:
        """Most tokens to draft: all that is fed must have a position, the last drafted token is not fed."""
        return min(budget.depth, budget.nodes, request.room, self.model.max_length + 1 - len(request.tokens))

    # -- rows ---------------------------------------------------------------------------------------

    def _hold(self, requests: Sequence[Request]) -> None:
        """A row for each request, an empty one if it has none."""
        new = [request for request in requests if request not in self._rows]
        self._rows.widen(len(self._held) + len(new))
        for request in new:
            self._rows.free()
            self._rows.hold([request])
            self._held[request] = _Held()

    def _crop(self, request: Request) -> None:
        """Forget what the row holds and the request does not; the pending token is to be fed in any case."""
        held, tokens = self._held[request], request.tokens
        for drafted, token in zip(held.drafted, tokens[held.shared : len(tokens) - 1], strict=False):
            if drafted != token:
                break
            held.shared += 1
        held.shared, held.drafted = min(held.shared, len(tokens) - 1), []
        self._rows.take([request]).crop_row(0, held.shared)

    def _feed(self, request: Request, until: int) -> None:
        """The row comes to hold the first `until` tokens of the request."""
        held = self._held[request]
        fed = torch.tensor([request.tokens[held.shared : until]], device=self.model.device)
        cache = self._rows.take([request])
        self.model.hidden(fed, cache)
        cache.commit([range(until - held.shared)])
        held.shared = until

    def _caught_up(self, requests: Sequence[Request]) -> tuple[KVCache, torch.Tensor]:
        """The requests' rows, with everything up to the pending tokens, and the states [B, width] of these."""
        for request in requests:
            self._crop(request)
            if len(requests) > 1 and len(request.tokens) - 1 - self._held[request].shared > FEW:
                self._feed(request, len(request.tokens) - 1)
        device = self.model.device
        cache = self._rows.take(requests)
        lacking = [r.tokens[self._held[r].shared :] for r in requests]
        q = max(map(len, lacking))
        fed = torch.tensor([[*tokens, *[0] * (q - len(tokens))] for tokens in lacking], device=device)
        hidden = self.model.hidden(fed, cache)
        cache.commit([range(len(tokens)) for tokens in lacking])
        ends = torch.tensor([len(tokens) - 1 for tokens in lacking], device=device)
        return cache, hidden[torch.arange(len(requests), device=device), ends]

    # -- growing chains -----------------------------------------------------------------------------

    def _chains(self, requests: Sequence[Request], budgets: Sequence[Budget], depths: Sequence[int]) -> list[DraftTree]:
        cache, states = self._caught_up(requests)
        groups = self._groups(requests)
        fixed = all(isinstance(budget, FixedBudget) for budget in budgets)
        logits = self._logits(states)
        drawn, peak, law = self._draw(groups, logits, 0)  # [B, (token, log q)], [B], [B, V]
        levels, scores, told = [drawn], [peak], [logits.float() if self.tells else law]
        lengths = [1] * len(requests)
        while True:
            depth = len(levels)
            seen = scores[-1] if fixed else scores[-1].cpu()
            going = [
                lengths[i] == depth
                and depth < depths[i]
                and budget.go_on(Growth(seen[i : i + 1], depth, 1, len(requests[i].tokens)))
                for i, budget in enumerate(budgets)
            ]
            if not any(going):
                break
            states = self.model.hidden(levels[-1][:, :1].long(), cache)[:, 0]
            cache.commit([range(int(goes)) for goes in going])  # who has stopped is fed for nothing
            logits = self._logits(states)
            drawn, peak, law = self._draw(groups, logits, depth)
            levels.append(drawn)
            scores.append(scores[-1] + peak)
            told.append(logits.float() if self.tells else law)
            lengths = [n + goes for n, goes in zip(lengths, going, strict=True)]
        packed = torch.cat([torch.stack(levels, 1), torch.stack(scores, 1)[..., None]], dim=-1).cpu()  # [B, depth, 3]
        if not packed.isfinite().all():
            raise ValueError("the draft model gave values that are not finite")
        tells = self.tells or self.draw == "own"
        laws = torch.stack([law for law in told if law is not None], 1) if tells else None
        trees = []
        for i, (request, budget, n) in enumerate(zip(requests, budgets, lengths, strict=True)):
            tokens, logq, score = packed[i, :n].unbind(-1)
            drafted = [int(token) for token in tokens.tolist()]
            self._held[request] = _Held(len(request.tokens), drafted[:-1])
            n = budget.size(Growth(score, n, 1, len(request.tokens)))
            chain = DraftTree.chain(drafted[:n], self.name, logq.tolist()[:n])
            if laws is not None and (self.tells or not request.sampling.greedy):
                chain = replace(chain, q_logits=laws[i, :n])
            trees.append(chain)
        return trees

    # -- drawing ------------------------------------------------------------------------------------

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """[B, V] after normed states [B, width]; -inf for tokens that are not proposed."""
        return self.model.logits(states) if self._outputs is None else self._outputs(states)

    def _groups(self, requests: Sequence[Request]) -> list[_Group]:
        device = self.model.device
        out = []
        for sampling in dict.fromkeys(r.sampling for r in requests):
            places = [i for i, r in enumerate(requests) if r.sampling == sampling]
            mine = [requests[i] for i in places]
            numbers = [places, [r.key for r in mine], [len(r.tokens) for r in mine]]
            out.append(_Group(sampling, *torch.tensor(numbers, device=device)))
        return out

    def _draw(
        self, groups: Sequence[_Group], logits: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """After logits [B, V] of tokens `depth` behind the pending one: drawn tokens and their log-probabilities
        [B, 2], the log-probability [B] of each row's first choice, and where draws are its own the processed logits
        [B, V]. In float64, which holds token ids exactly."""
        b = len(logits)
        drawn = torch.empty(b, 2, dtype=torch.float64, device=logits.device)
        peak = torch.empty(b, dtype=torch.float64, device=logits.device)
        laws = torch.empty(logits.shape, dtype=torch.float32, device=logits.device) if self.draw == "own" else None
        for group in groups:
            sampling, places = group.sampling, group.places
            law = sampling.law(logits if len(groups) == 1 else logits[places])
            total = law.logits.logsumexp(-1)
            if sampling.greedy:
                chosen = law.logits.argmax(-1)
            else:
                stream = OWN if self.draw == "own" else ""
                chosen = law.draw(sampling.seed, group.keys, group.positions + depth, stream)
                if laws is not None:
                    laws[places] = law.full()
            logq = law.logits.gather(-1, chosen[:, None])[:, 0] - total
            drawn[places] = torch.stack([law.ids(chosen).double(), logq.double()], dim=-1)
            peak[places] = logq.double() if sampling.greedy else (law.logits.max(-1).values - total).double()
        return drawn, peak, laws


def drafter_of(folder: str | os.PathLike[str], target: Target, **options: Any) -> DraftModelDrafter:
    """The drafter of a folder that `switchsd train draft` made; `options` are those of `DraftModelDrafter`. Raises
    DraftError."""
    from decoding.draft.model import load_draft, read_draft  # which needs more libraries than drafting does

    return DraftModelDrafter(target, load_draft(folder, target), frequent=read_draft(folder).get("frequent"), **options)
