"""Drafting with an EAGLE-3 head: a dynamic tree, grown level by level from the pending token.

The head has one block, so a verified position only leaves a key and a value behind; queries, MLP and logits are
computed for the newest row alone. Features of steps at which another drafter drafted wait until the next proposal
(lazy catch-up), where they are fed in one call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from activations.sites import eagle_sites
from activations.target import Target
from decoding.budgets import Budget
from decoding.eagle.head import EagleHead, HeadError, rms_norm, rotary
from decoding.request import Request
from decoding.tree import DraftTree


@dataclass
class _State:
    """What the head remembers of a request."""

    keys: torch.Tensor  # [Hkv, capacity, D]
    values: torch.Tensor
    fed: int = 0  # rows whose keys are there
    waiting: list[torch.Tensor] = field(default_factory=list)  # features of verified positions, not fed yet


class EagleDrafter:
    """Proposes trees from an EAGLE-3 head.

    `top_k` children are considered for each of `top_k` beams at every level; the tree keeps the best nodes by
    cumulative log-probability.
    """

    name = "eagle"

    def __init__(self, target: Target, head: EagleHead, top_k: int = 4, sites: Sequence[str] | None = None) -> None:
        config = head.config
        if config.feature_width != 3 * target.width or config.hidden_size != target.width:
            raise HeadError(
                f"the head is for states of width {config.feature_width // 3}, the target's are {target.width}: "
                "use the head that was trained for this target"
            )
        self.sites = tuple(sites or eagle_sites(target.blocks))
        self.config, self.top_k, self.embed = config, top_k, target.embed
        head = head.to(device=target.device, dtype=target.dtype)
        block = head.midlayer
        attn, mlp = block.self_attn, block.mlp
        self._fc = head.fc.weight
        self._q = attn.q_proj.weight
        self._kv = torch.cat([attn.k_proj.weight, attn.v_proj.weight])
        self._o = attn.o_proj.weight
        self._gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self._down = mlp.down_proj.weight
        self._head, self._tokens = head.lm_head.weight, head.draft_tokens
        self._norms = [n.weight for n in (block.input_layernorm, block.hidden_norm, block.post_attention_layernorm)]
        self._norm = head.norm.weight
        self._cos, self._sin = self._table(1024)
        self._states: dict[Request, _State] = {}

    # -- the drafter's protocol ---------------------------------------------------------------------

    def start(self, request: Request, features: torch.Tensor | None) -> None:
        config, like = self.config, self._fc
        longest = self._stretch(request)
        shape = (config.num_key_value_heads, longest, config.per_head)
        self._states[request] = _State(like.new_zeros(shape), like.new_zeros(shape))
        self.observe(request, features)

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
        self._stretch(request)
        self.observe(request, features)

    def observe(self, request: Request, features: torch.Tensor | None) -> None:
        assert features is not None
        self._states[request].waiting.append(features)

    def select(self, requests: Sequence[Request], rows: Sequence[int], from_position: int) -> None:
        old = [self._states[r] for r in requests]
        for request, row in zip(requests, rows, strict=True):
            source = old[row]
            self._states[request] = _State(source.keys.clone(), source.values.clone(), source.fed, list(source.waiting))

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
        for weight in (self._fc, self._q, self._gate_up, self._head):
            digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return {
            "name": self.name,
            "weights": digest.hexdigest()[:16],
            "top_k": self.top_k,
            "sites": list(self.sites),
            **asdict(self.config),
        }

    # -- growing one tree ---------------------------------------------------------------------------

    def _grow(self, request: Request, budget: Budget) -> DraftTree:
        state = self._states[request]
        output = self._catch_up(request, state)  # [1, width]
        base = state.fed  # slots from here on hold the tree's keys
        deepest = min(budget.depth, request.room)
        k = self.top_k
        logp, index = self._choices(output)  # [1, k]
        cumulative = [logp[0]]
        single = [logp[0]]
        tokens = [self._tokens[index[0]]]
        parents = [torch.full_like(index[0], -1)]
        beams = torch.arange(k, device=index.device)  # node numbers of the level's beams
        hidden = output.expand(k, -1)
        beam_tokens, beam_scores = tokens[0], cumulative[0]
        visible = torch.empty(k, 0, dtype=torch.bool, device=index.device)  # [k, tree slots so far]
        eye = torch.eye(k, dtype=torch.bool, device=index.device)
        count, depth = k, 1
        while depth < deepest and budget.go_on(beam_scores, depth):
            visible = torch.cat([visible, eye], dim=1)
            output = self._rows(state, hidden, beam_tokens, base, (depth - 1) * k, visible)
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
            hidden, visible = output[above], visible[above]
            count += k * k
            depth += 1
        return self._prune(budget, *(torch.cat(x) for x in (tokens, parents, single, cumulative)))

    def _prune(
        self, budget: Budget, tokens: torch.Tensor, parents: torch.Tensor, single: torch.Tensor, scores: torch.Tensor
    ) -> DraftTree:
        """The best nodes. A child never scores above its parent, and a stable sort puts the parent first."""
        size = budget.size(scores)
        best = scores.sort(descending=True, stable=True).indices[:size].sort().values
        place = torch.full((len(tokens) + 1,), -1, device=tokens.device)  # the last entry serves parent -1
        place[best] = torch.arange(len(best), device=tokens.device)
        kept = torch.stack([tokens[best], place[parents[best]]])
        listed = kept.tolist()
        return DraftTree(
            listed[0],
            listed[1],
            [self.name] * len(best),
            single[best].tolist(),
            candidates=(tokens, scores, parents),
        )

    def _choices(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and draft ids [n, k] of the best next tokens after rows [n, width]."""
        logits = F.linear(rms_norm(output, self._norm, self.config.rms_norm_eps), self._head).float()
        best, index = logits.topk(self.top_k, dim=-1)
        return best - logits.logsumexp(-1, keepdim=True), index

    def _catch_up(self, request: Request, state: _State) -> torch.Tensor:
        """Feed all waiting features; the output [1, width] of the newest row."""
        features = state.waiting[0] if len(state.waiting) == 1 else torch.cat(state.waiting)
        state.waiting.clear()
        end = state.fed + len(features)
        ids = torch.tensor(request.tokens[state.fed + 1 : end + 1], device=features.device)
        hidden = F.linear(features, self._fc)
        x = self._enter(hidden, ids)
        self._store(state, x, state.fed, torch.arange(state.fed, end, device=ids.device))
        state.fed = end
        return self._finish(state, x[-1:], hidden[-1:], end, end - 1, None)

    def _rows(
        self, state: _State, hidden: torch.Tensor, tokens: torch.Tensor, base: int, offset: int, visible: torch.Tensor
    ) -> torch.Tensor:
        """Outputs [k, width] of one level's beams; their keys go to the slots base + offset and on."""
        k = len(tokens)
        position = base + offset // k  # all beams of a level stand at one position
        x = self._enter(hidden, tokens)
        self._store(state, x, base + offset, torch.full((k,), position, device=tokens.device))
        committed = torch.ones(k, base, dtype=torch.bool, device=tokens.device)
        return self._finish(state, x, hidden, base + offset + k, position, torch.cat([committed, visible], dim=1))

    def _enter(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        embedding = self.embed(tokens)
        return torch.cat([rms_norm(embedding, self._norms[0], eps), rms_norm(hidden, self._norms[1], eps)], dim=-1)

    def _store(self, state: _State, x: torch.Tensor, slot: int, positions: torch.Tensor) -> None:
        config = self.config
        end = slot + len(x)
        if end > state.keys.shape[1]:
            more = max(end, 2 * state.keys.shape[1]) - state.keys.shape[1]
            state.keys, state.values = (F.pad(t, (0, 0, 0, more)) for t in (state.keys, state.values))
        k, v = F.linear(x, self._kv).view(len(x), 2, config.num_key_value_heads, config.per_head).unbind(1)
        state.keys[:, slot:end] = self._rotate(k, positions).transpose(0, 1)
        state.values[:, slot:end] = v.transpose(0, 1)

    def _finish(
        self, state: _State, x: torch.Tensor, hidden: torch.Tensor, end: int, position: int, mask: torch.Tensor | None
    ) -> torch.Tensor:
        config, n = self.config, len(x)
        at = torch.full((n,), position, device=x.device)
        q = self._rotate(F.linear(x, self._q).view(n, config.num_attention_heads, config.per_head), at)
        groups = config.num_attention_heads // config.num_key_value_heads
        # Groups folded into query rows: each key head is read once for all of its query heads.
        q = q.view(n, -1, groups, config.per_head).permute(1, 2, 0, 3).reshape(1, -1, groups * n, config.per_head)
        fold = mask.repeat(groups, 1)[None, None] if mask is not None else None
        out = F.scaled_dot_product_attention(q, state.keys[None, :, :end], state.values[None, :, :end], attn_mask=fold)
        out = out.view(-1, groups, n, config.per_head).permute(2, 0, 1, 3).reshape(n, -1)
        hidden = hidden + F.linear(out, self._o)
        gate, up = F.linear(rms_norm(hidden, self._norms[2], config.rms_norm_eps), self._gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self._down)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self._cos[positions], self._sin[positions]
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin

    def _table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(length, device=self._fc.device)
        cos, sin = rotary(positions, self.config.per_head, self.config.rope_theta)
        return cos.to(self._fc.dtype), sin.to(self._fc.dtype)
