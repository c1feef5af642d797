"""Drafting with an EAGLE head: a dynamic tree, grown level by level from the pending token.

Of a head with one block a verified position only leaves a key and a value behind; queries, MLP and logits are
computed for the newest row alone. Features of steps at which another drafter drafted wait until the next proposal
(lazy catch-up), where they are fed in one call.

Source: dynamic trees, EAGLE-2, arXiv 2406.16858.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F

from activations.linear import Product
from activations.target import Target
from decoding.budgets import Budget, Growth, Pace
from decoding.digest import in_bytes
from decoding.eagle.head import ACTIVATIONS, EagleHead, HeadError, HeadWarning, rms_norm
from decoding.eagle.rope import rotate, table
from decoding.request import Request
from decoding.tree import DraftTree

WAITING = 1024
"""Verified rows that wait at most, where no proposal is asked for: their features are larger than their keys."""
CHUNK = 256
"""Rows that pass at once through the lower blocks of a head of several."""


Question = tuple[Literal["go_on", "size"], Growth]
"""What a growing tree asks."""


@dataclass
class _State:
    """What the head remembers of a request."""

    keys: torch.Tensor  # [blocks, Hkv, capacity, D]
    values: torch.Tensor
    fed: int = 0  # rows whose keys are there
    first: int = 0  # the row in slot 0: with a window, older ones are dropped
    waiting: list[torch.Tensor] = field(default_factory=list)  # features of verified positions, not fed yet
    pace: Pace = field(default_factory=Pace)


class _Weights:
    """A block's weights, those that are used together in one matrix."""

    def __init__(self, block: Any) -> None:
        attn, mlp = block.self_attn, block.mlp
        self.q = _product(attn.q_proj)
        self.kv = _product(attn.k_proj, attn.v_proj)
        self.o = _product(attn.o_proj)
        self.gate_up = _product(mlp.gate_proj, mlp.up_proj)
        self.down = _product(mlp.down_proj)
        self.hidden_norm = _weight(block, "hidden_norm")
        self.input_norm = _weight(block, "input_layernorm")
        self.q_norm, self.k_norm = _weight(attn, "q_norm"), _weight(attn, "k_norm")
        self.mlp_norm = block.post_attention_layernorm.weight


def _weight(module: Any, norm: str) -> Any:
    """None where the kind of head has no such norm."""
    return module.get_submodule(norm).weight if hasattr(module, norm) else None


def _product(*linears: Any) -> Product:
    """Linear maps of one input side by side."""
    weights = [linear.weight.detach() for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(linear.bias is None for linear in linears):
        return Product(weight)
    return Product(
        weight, torch.cat([weight.new_zeros(len(m.weight)) if m.bias is None else m.bias.detach() for m in linears])
    )


class EagleDrafter:
    """Proposes trees from an EAGLE head of any kind.

    `top_k` children are considered for each of `top_k` beams at every level; the tree keeps the best nodes by
    cumulative log-probability.
    """

    name = "eagle"

    def __init__(
        self,
        target: Target,
        head: EagleHead,
        top_k: int = 4,
        sites: Sequence[str] | None = None,
        window: int | None = None,
    ) -> None:
        """`sites` and `window` (rows that a row sees, 0 = all) are the head's own where they are not given.

        Raises HeadError for a head that does not fit the target.
        """
        config = head.config
        if config.target_width != target.width:
            raise HeadError(
                f"the head is for states of width {config.target_width}, the target's are {target.width}: "
                "use the head that was trained for this target"
            )
        if config.vocab_size != target.vocab_size:
            raise HeadError(
                f"the head is for a vocabulary of {config.vocab_size}, the target has {target.vocab_size}: "
                "use the head that was trained for this target"
            )
        if config.hidden_size != target.width and not config.own_embedding:
            raise HeadError(
                f"the head is {config.hidden_size} wide and the target {target.width}, and its files hold no embedding "
                "(embed_tokens.weight) of its own width: it cannot be used without one"
            )
        if not config.own_head and config.hidden_size != target.width:
            raise HeadError(
                f"the head is {config.hidden_size} wide, has no output matrix, and the target's takes {target.width}: "
                "its files lack lm_head.weight"
            )
        self.sites = tuple(sites or config.sites(target.blocks))
        if len(self.sites) != (config.features or 1):
            raise HeadError(f"the head reads {config.features or 1} states of the target, not {len(self.sites)}")
        self.config, self.top_k = config, min(top_k, config.draft_vocab_size)
        self.window = config.window if window is None else window
        self._target = target
        head = head.to(device=target.device, dtype=target.dtype)
        same = config.own_embedding and _equal(head.embed_tokens.weight, target.embed.weight)
        self.embed = head.embed_tokens if config.own_embedding and not same else target.embed
        self._blocks = [_Weights(block) for block in head.blocks]
        # The head itself is not kept: what is joined above is not needed twice.
        self._fc = _product(head.fc) if config.eagle == 1 or config.features else None
        self._head, self._tokens = _product(head.lm_head) if config.own_head else None, head.draft_tokens
        self._input_norm = _weight(head, "input_norm")
        norms: Any = head.fc_norm if config.fc_norm else ()
        self._state_norms = [norm.weight for norm in norms]
        self._norm = head.norm.weight if config.last_norm else None
        self._act = ACTIVATIONS[config.hidden_act]
        self._angles, self._factor = head.angles, head.rope_factor
        self._like = torch.empty(0, dtype=target.dtype, device=target.device)
        self._cos, self._sin = self._table(1024)
        self._states: dict[Request, _State] = {}
        self._warned = False

    # -- the drafter's protocol ---------------------------------------------------------------------

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        config, longest = self.config, self._stretch(request)
        slots = min(longest, 2 * self.window + 128) if self.window else longest
        shape = (config.num_hidden_layers, config.num_key_value_heads, slots, config.per_head)
        self._states[request] = _State(self._like.new_zeros(shape), self._like.new_zeros(shape))
        self._wait(request, features)

    def _stretch(self, request: Request) -> int:
        """Rows that the request may come to, the tables of positions being that long."""
        longest = len(request.tokens) + request.max_new_tokens + 64  # no row of a tree stands behind this position
        if longest > len(self._cos):
            self._cos, self._sin = self._table(2 * longest)
        return longest

    def resume(self, request: Request, features: torch.Tensor | None, before: Request, kept: int) -> None:
        state = self._states[request] = self._states.pop(before)
        waiting = torch.cat(state.waiting)[: max(kept - state.fed, 0)] if state.waiting else None
        state.waiting = [] if waiting is None or not len(waiting) else [waiting]
        state.fed = min(state.fed, kept)
        state.first = min(state.first, state.fed)  # what a window has dropped since then stays dropped
        state.pace = Pace()
        self._stretch(request)
        self._wait(request, features)

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        assert features is not None
        state = self._states[request]
        state.pace = state.pace.after(len(features))
        self._wait(request, features)

    def _wait(self, request: Request, features: torch.Tensor | None) -> None:
        """Features that the next proposal will feed."""
        assert features is not None
        state = self._states[request]
        state.waiting.append(features)
        if sum(map(len, state.waiting)) > WAITING:
            whole = torch.cat(state.waiting)
            state.waiting = [whole[-1:].clone()]
            self._feed(request, state, whole[:-1])

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        old = [self._states[r] for r in requests]
        for request, row in zip(requests, rows, strict=True):
            s = old[row]
            self._states[request] = _State(s.keys.clone(), s.values.clone(), s.fed, s.first, list(s.waiting), s.pace)

    def close(self, request: Request) -> None:
        self._states.pop(request, None)

    def propose(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree | None]:
        return [
            self._grow(request, budget) if request.room > 0 else None
            for request, budget in zip(requests, budgets, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        """What its drafts depend on, for JSON."""
        digest = hashlib.sha256()
        first = self._blocks[0]
        for product in (self._fc, first.q, first.gate_up, self._head):
            if product is not None:
                digest.update(in_bytes(product.dense))
        return {
            **self.config.to_dict(),
            "name": self.name,
            "weights": digest.hexdigest()[:16],
            "top_k": self.top_k,
            "window": self.window,
            "sites": list(self.sites),
        }

    def forced(self, request: Request, chain: Sequence[int]) -> list[int]:
        """The head's first choices after the pending token, and after each token of `chain` as if it had drafted it.

        What the self-check asks; leaves nothing behind.
        """
        state = self._states[request]
        output = self._catch_up(request, state)
        chosen = [self._choices(output)[1][0, 0]]
        base = state.fed
        for depth, token in enumerate(chain):
            visible = torch.ones(1, depth + 1, dtype=torch.bool, device=output.device)
            ids = torch.tensor([token], device=output.device)
            output = self._rows(state, self._carried(output), ids, base, depth, visible)
            chosen.append(self._choices(output)[1][0, 0])
        return [int(t) for t in self._tokens[torch.stack(chosen)].tolist()]

    # -- growing one tree ---------------------------------------------------------------------------

    def _grow(self, request: Request, budget: Budget) -> DraftTree:
        growing = self.growing(request, budget.depth)
        answer: int | None = None
        try:
            while True:
                question, growth = growing.send(answer)
                answer = budget.go_on(growth) if question == "go_on" else budget.size(growth)
        except StopIteration as end:
            tree: DraftTree = end.value
            return tree

    def growing(self, request: Request, depth: int) -> Generator[Question, int | None, DraftTree]:
        """Grows one tree, of `depth` levels at most, and asks on the way: whether to go on to another level, and at
        the end how many nodes to keep, as a budget answers it. Raises HeadError if the head gives values that are not
        finite."""
        state = self._states[request]
        output = self._catch_up(request, state)  # [1, width]
        base = state.fed  # slots from here on hold the tree's keys
        deepest, length, pace = min(depth, request.room), len(request.tokens), state.pace.value
        k = self.top_k
        logp, index = self._choices(output)  # [1, k]
        cumulative = [logp[0]]
        single = [logp[0]]
        tokens = [self._tokens[index[0]]]
        parents = [torch.full_like(index[0], -1)]
        beams = torch.arange(k, device=index.device)  # node numbers of the level's beams
        hidden = self._carried(output).expand(k, -1)
        beam_tokens, beam_scores = tokens[0], cumulative[0]
        visible = torch.empty(k, 0, dtype=torch.bool, device=index.device)  # [k, tree slots so far]
        eye = torch.eye(k, dtype=torch.bool, device=index.device)
        count, depth = k, 1
        while depth < deepest and (yield "go_on", Growth(cumulative[-1], depth, k, length, pace)):
            visible = torch.cat([visible, eye], dim=1)
            output = self._rows(state, hidden, beam_tokens, base, depth - 1, visible)
            logp, index = self._choices(output)  # [k, k]
            scores = (beam_scores[:, None] + logp).flatten()
            tokens.append(self._tokens[index.flatten()])
            single.append(logp.flatten())
            cumulative.append(scores)
            parents.append(beams.repeat_interleave(k))
            beam_scores, best = scores.topk(k)
            beams = count + best
            beam_tokens = tokens[-1][best]
            above = best // k
            hidden, visible = self._carried(output)[above], visible[above]
            count += k * k
            depth += 1
        scores = torch.cat(cumulative)
        size = yield "size", Growth(scores, depth, k, length, pace)
        assert size is not None
        return self._prune(size, torch.cat(tokens), torch.cat(parents), torch.cat(single), scores)

    def _prune(
        self, size: int, tokens: torch.Tensor, parents: torch.Tensor, single: torch.Tensor, scores: torch.Tensor
    ) -> DraftTree:
        """The best nodes. A child never scores above its parent, and a stable sort puts the parent first."""
        best = scores.sort(descending=True, stable=True).indices[:size].sort().values
        place = torch.full((len(tokens) + 1,), -1, device=tokens.device)  # the last entry serves parent -1
        place[best] = torch.arange(len(best), device=tokens.device)
        kept = torch.stack([tokens[best], place[parents[best]]])
        listed = kept.tolist()
        logq = single[best].tolist()
        if math.isnan(sum(logq)):
            raise HeadError("the EAGLE head gave values that are not finite")
        return DraftTree(
            listed[0],
            listed[1],
            [self.name] * len(best),
            logq,
            candidates=(tokens, scores, parents),
        )

    def _choices(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and draft ids [n, k] of the best next tokens after rows [n, width]."""
        if self._norm is not None:
            output = rms_norm(output, self._norm, self.config.rms_norm_eps)
        logits = (self._head(output) if self._head is not None else self._target.logits(output)).float()
        best, index = logits.topk(self.top_k, dim=-1)
        return best - logits.logsumexp(-1, keepdim=True), index

    def _carried(self, output: torch.Tensor) -> torch.Tensor:
        """What the next row starts from, given rows' outputs."""
        if self.config.norm_output and self._norm is not None:
            return rms_norm(output, self._norm, self.config.rms_norm_eps)
        return output

    # -- rows through the blocks --------------------------------------------------------------------

    def _catch_up(self, request: Request, state: _State) -> torch.Tensor:
        """Feed all waiting features; the output [1, width] of the newest row."""
        features = state.waiting[0] if len(state.waiting) == 1 else torch.cat(state.waiting)
        state.waiting.clear()
        output = self._feed(request, state, features)
        longest = self.config.max_position_embeddings
        if longest and state.fed > longest and not self._warned:
            self._warned = True
            warnings.warn(
                f"the text is longer than the {longest} tokens that the EAGLE head was trained for: it goes on, and "
                "fewer of its drafts will be accepted",
                HeadWarning,
                stacklevel=2,
            )
        return output

    def _feed(self, request: Request, state: _State, features: torch.Tensor) -> torch.Tensor:
        """Keys and values of verified rows are kept; the output [1, width] of the last of them."""
        end, blocks = state.fed + len(features), self._blocks
        if self.window:
            if len(blocks) == 1 and len(features) >= self.window:  # nothing is left that the older ones could tell
                features = features[-self.window :]
                state.first = state.fed = end - self.window
            self._drop_old(state, len(features))
        base, n = state.fed, len(features)
        ids = torch.tensor(request.tokens[base + 1 : end + 1], device=features.device)
        x, residual = self._enter(self._combined(features), ids)
        cos, sin = self._cos[base:end], self._sin[base:end]
        state.fed = end
        for number, block in enumerate(blocks):
            if number:
                x = rms_norm(residual, block.input_norm, self.config.rms_norm_eps)
            self._store(state, number, x, base - state.first, cos, sin)
            if number == len(blocks) - 1:
                lowest = max(0, end - self.window - state.first) if self.window else 0
                return self._finish(
                    state, number, x[-1:], residual[-1:], lowest, end - state.first, cos[-1:], sin[-1:], None
                )
            parts = []
            for a in range(0, n, CHUNK):
                b = min(a + CHUNK, n)
                rows = torch.arange(base + a, base + b, device=ids.device)[:, None]
                seen = torch.arange(state.first, base + b, device=ids.device)
                mask = seen <= rows
                if self.window:
                    mask &= seen > rows - self.window
                last = base + b - state.first
                parts.append(self._finish(state, number, x[a:b], residual[a:b], 0, last, cos[a:b], sin[a:b], mask))
            residual = torch.cat(parts)
        raise AssertionError("a head has a block")

    def _rows(
        self, state: _State, hidden: torch.Tensor, tokens: torch.Tensor, base: int, level: int, visible: torch.Tensor
    ) -> torch.Tensor:
        """Outputs [k, width] of one level's beams, all at position base + level; `visible` [k, (level + 1) * k] are the
        tree's rows so far. Their keys go to the slots behind the committed ones."""
        k = len(tokens)
        position, committed = base + level, base - state.first
        slot = committed + level * k
        cos, sin = self._cos[position : position + 1], self._sin[position : position + 1]
        lowest = 0
        if self.window:
            old = max(0, position + 1 - self.window - base)  # levels of the tree that are out of sight
            lowest = min(max(0, position + 1 - self.window - state.first), committed) + old * k
            visible = visible[:, old * k :]
        mask = torch.cat([visible.new_ones(k, max(0, committed - lowest)), visible], dim=1)
        x, residual = self._enter(hidden, tokens)
        for number, block in enumerate(self._blocks):
            if number:
                x = rms_norm(residual, block.input_norm, self.config.rms_norm_eps)
            self._store(state, number, x, slot, cos, sin)
            residual = self._finish(state, number, x, residual, lowest, slot + k, cos, sin, mask)
        return residual

    def _combined(self, states: torch.Tensor) -> torch.Tensor:
        """What rows start from, given what was read of the target."""
        if not self.config.features:
            normed: torch.Tensor = self._target.final_norm(states)
            return normed
        assert self._fc is not None
        eps = self.config.rms_norm_eps
        if self._input_norm is not None:
            states = rms_norm(states, self._input_norm, eps)
        if self._state_norms:
            parts = states.chunk(len(self._state_norms), dim=-1)
            states = torch.cat([rms_norm(p, w, eps) for p, w in zip(parts, self._state_norms, strict=True)], dim=-1)
        return self._fc(states)

    def _enter(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first block's attention reads, and what its result is added to."""
        eps, block = self.config.rms_norm_eps, self._blocks[0]
        embedding = self.embed(tokens)
        if self.config.eagle == 1:
            assert self._fc is not None
            hidden = self._fc(torch.cat([embedding, hidden], dim=-1))
            return (hidden if block.input_norm is None else rms_norm(hidden, block.input_norm, eps)), hidden
        normed = rms_norm(hidden, block.hidden_norm, eps)
        x = torch.cat([rms_norm(embedding, block.input_norm, eps), normed], dim=-1)
        return x, normed if self.config.norm_before_residual else hidden

    def _store(
        self, state: _State, number: int, x: torch.Tensor, slot: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Keys and values of rows [n, width] go to the slots from `slot` on."""
        config, block = self.config, self._blocks[number]
        end = slot + len(x)
        if end > state.keys.shape[2]:
            more = max(end, 2 * state.keys.shape[2]) - state.keys.shape[2]
            state.keys, state.values = (F.pad(t, (0, 0, 0, more)) for t in (state.keys, state.values))
        kv = block.kv(x).view(len(x), 2, config.num_key_value_heads, config.per_head)
        k, v = kv.unbind(1)
        if block.k_norm is not None:
            k = rms_norm(k, block.k_norm, config.rms_norm_eps)
        state.keys[number, :, slot:end] = rotate(k, cos, sin).transpose(0, 1)
        state.values[number, :, slot:end] = v.transpose(0, 1)

    def _finish(
        self,
        state: _State,
        number: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        lowest: int,
        end: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """The block's output [n, width]: its rows attend to the slots from `lowest` to before `end`."""
        config, block, n = self.config, self._blocks[number], len(x)
        heads, keys, dim = config.num_attention_heads, config.num_key_value_heads, config.per_head
        q = block.q(x).view(n, heads, dim)
        if block.q_norm is not None:
            q = rms_norm(q, block.q_norm, config.rms_norm_eps)
        q = rotate(q, cos, sin)
        groups = heads // keys
        # Groups folded into query rows: each key head is read once for all of its query heads.
        q = q.view(n, keys, groups, dim).permute(1, 2, 0, 3).reshape(1, keys, groups * n, dim)
        fold = mask.repeat(groups, 1)[None, None] if mask is not None else None
        k, v = state.keys[number, None, :, lowest:end], state.values[number, None, :, lowest:end]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=fold)
        out = out.view(keys, groups, n, dim).permute(2, 0, 1, 3).reshape(n, heads * dim)
        hidden = residual + block.o(out)
        inner = rms_norm(hidden, block.mlp_norm, config.rms_norm_eps)
        gate, up = block.gate_up(inner).chunk(2, dim=-1)
        return hidden + block.down(self._act(gate) * up)

    def _drop_old(self, state: _State, more: int) -> None:
        """Move the rows that are still in sight to the front, where `more` would not fit behind them."""
        held = state.fed - state.first
        if held + more <= state.keys.shape[2] or held <= self.window:
            return
        for kept in (state.keys, state.values):
            kept[:, :, : self.window] = kept[:, :, held - self.window : held].clone()
        state.first = state.fed - self.window

    def _table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [length, 1, D]."""
        positions = torch.arange(length, device=self._like.device)
        cos, sin = table(positions, self._angles, self._factor)
        return cos.to(self._like.dtype), sin.to(self._like.dtype)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The head's copy of the target's embedding need not be kept twice."""
    return b.device.type != "meta" and a.shape == b.shape and torch.equal(a, b.to(a))
