"""Training an EAGLE-3 head from a capture store, with training-time test.

The head is unrolled as it will be used: step 0 sees the target's features at every position; step k sees its own
output of step k-1 and attends to the keys of step 0 up to its root and to its own chain. Later steps are unrolled
from a random share of the roots only: their keys at step 0 are all that ties them to the other positions, so the
gradient stays unbiased, at a third of the cost. The loss is the cross-entropy to the target's distribution over
the draft vocabulary, weighted 0.8^k.

The head starts from the target: its last block, final norm and output rows, with `fc` passing the highest feature;
or from another head.

One shard of a store is in memory at a time, however many documents there are. Several processes share the batches of
every optimizer step (`decoding.eagle.workers`).

Source: training-time test, EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from activations.provenance import provenance
from activations.sites import last_site
from activations.store import CaptureStore, write_json
from activations.target import Target
from decoding.eagle.formats import load_head
from decoding.eagle.growth import grown
from decoding.eagle.head import EagleHead, HeadConfig, HeadError
from decoding.eagle.workers import Workers
from decoding.training import Document, check_settings, frequent_tokens, keep, learning_rate, padded, restore
from decoding.training import documents as whole_texts


@dataclass(frozen=True)
class EagleTrainConfig:
    """How a head is trained."""

    draft_vocabulary: int = 8192
    """The most frequent tokens of the training text."""
    tokens: int = 3_000_000
    """Tokens to train on, repetitions included."""
    batch_tokens: int = 2048
    """Tokens of a batch."""
    accumulate: int = 1
    """Batches of each process in an optimizer step."""
    precision: str = "bf16"
    """What matrix products are computed in: bf16 or float32. Weights and moments are float32."""
    steps: int = 6
    """Unrolled draft steps (training-time test)."""
    unrolled_share: float = 0.3
    """Share of the positions from which steps after the first are unrolled."""
    decay: float = 0.8
    """Step k's loss is weighted by decay to the power of k."""
    learning_rate: float = 1e-3
    """Peak; warmed up over 2 % of the run, then a cosine to zero."""
    clip: float = 0.5
    """Largest gradient norm."""
    validation_documents: int = 48
    """Documents held out (from the first shard of the first store)."""
    checkpoint_seconds: float = 120.0
    """How often the state of the run is saved."""
    seed: int = 0
    """Seed of everything that is random in it."""

    def __post_init__(self) -> None:
        check_settings(self, counts=("draft_vocabulary", "steps"), shares=("unrolled_share", "decay"))


@dataclass
class Batch:
    """Padded documents: B of them, T rows."""

    features: torch.Tensor
    """[B, T, 3 * width]: states at the head's sites, side by side."""
    pending: torch.Tensor
    """[B, T]: the token after each row's token."""
    last: torch.Tensor
    """[B, T, width]: the last `resid_post`."""
    written: torch.Tensor
    """[B, T]: whether the pending token is the target's own."""

    def to(self, device: torch.device, exact: bool) -> Batch:
        """On the device; the states in float32 where `exact`."""
        features = self.features.float() if exact else self.features
        return Batch(*(x.to(device) for x in (features, self.pending, self.last, self.written)))


def initial_head(target: Target, tokens: torch.Tensor) -> EagleHead:
    """A head with the draft vocabulary `tokens` [draft vocabulary], whose block, norm and output rows are copies of the
    target's last ones.

    Where that block is not of the head's own kind, the parts that have no counterpart keep their random start. After
    a norm of its own (Gemma, OLMo 2), a branch is of another size than without: such a branch starts at zero.
    """
    config, width, block = target.config, target.width, target.layers[-1]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get((getattr(config, "layer_types", None) or ["full_attention"])[-1], rope)
    head = EagleHead(
        HeadConfig(
            hidden_size=width,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * width,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=int(getattr(config, "head_dim", 0) or 0),
            vocab_size=target.vocab_size,
            draft_vocab_size=len(tokens),
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", 10000.0),
            target_hidden_size=width,
        )
    )
    parts = dict(block.named_modules())
    with torch.no_grad():
        head.fc.weight.normal_(0, 0.01)
        head.fc.weight[:, 2 * width :] += torch.eye(width)
        mid = head.midlayer
        attn, mlp = mid.self_attn, mid.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(attn, name).weight
            weight.normal_(0, 0.02)
            _copy(parts.get(f"self_attn.{name}"), weight[:, width:])
        _copy(parts.get("self_attn.o_proj"), attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy(parts.get(f"mlp.{name}"), getattr(mlp, name).weight)
        before_mlp = "pre_feedforward_layernorm"
        if before_mlp in parts or "input_layernorm" not in parts:
            attn.o_proj.weight.zero_()
            mlp.down_proj.weight.zero_()
        else:
            before_mlp = "post_attention_layernorm"
        _copy_norm(parts.get("input_layernorm"), mid.hidden_norm.weight)
        _copy_norm(parts.get(before_mlp), mid.post_attention_layernorm.weight)
        _copy_norm(target.final_norm, head.norm.weight)
        head.lm_head.weight.copy_(target.head.weight[tokens])
    head.set_vocabulary(tokens)
    return head


def _copy(linear: Any, weight: torch.Tensor) -> None:
    """Into a weight, or a slice of one, where there is a linear of its shape."""
    if linear is not None and linear.weight.shape == weight.shape:
        weight.copy_(linear.weight)


def _copy_norm(norm: Any, weight: torch.Tensor) -> None:
    """What a norm multiplies by: Gemma's is one more than its weight."""
    if norm is None or not hasattr(norm, "weight"):
        return
    weight.copy_(norm(torch.ones_like(norm.weight)) if "RMS" in type(norm).__name__ else norm.weight)


def documents(store: CaptureStore, shard: int, sites: Sequence[str]) -> list[Document]:
    """The documents of a shard as tensors; `sites` are the head's and the last one."""
    return whole_texts(store, shard, {"features": sites[:-1], "last": sites[-1:]})


def batches(docs: list[Document], budget: int) -> Iterator[Batch]:
    """Documents of similar length together, at most `budget` rows a batch."""
    for batch in padded(docs, budget):
        yield Batch(**{field.name: batch[field.name] for field in fields(Batch)})


def unroll(
    head: EagleHead, target: Target, batch: Batch, steps: int, share: float, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per step: draft logits [n, draft], target logits over the draft vocabulary [n, draft], of the rows that count.

    The third tensor says which of those rows' next tokens are in the draft vocabulary (only they enter the loss).
    """
    b, t = batch.pending.shape
    device, width = batch.pending.device, head.config.hidden_size
    groups = head.config.num_attention_heads // head.config.num_key_value_heads
    with torch.no_grad():
        normed = target.final_norm(batch.last)
        rows = target.head.weight[head.draft_tokens]
        embedding = target.embed(batch.pending)
        if batch.features.dtype == torch.float32:
            embedding = embedding.float()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """q [B, m, H, D], k and v [B, n, Hkv, D] -> [B, m, H * D]."""
        k, v = (x.transpose(1, 2).repeat_interleave(groups, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2).flatten(2)

    def outcome(output: torch.Tensor, root: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows with root r at this step are judged by the target at r + 1 + step."""
        at = root + 1 + step
        inside = at < t
        at = at.clamp(max=t - 1)
        counts = inside & batch.written.gather(1, at)
        known = head.t2d[batch.pending.gather(1, at)]
        target_logits = normed.gather(1, at[..., None].expand(-1, -1, normed.shape[-1]))[counts] @ rows.T
        return head.logits(output[counts]), target_logits, known[counts]

    position = torch.arange(t, device=device).expand(b, t)
    hidden = head.combine(batch.features)
    q, key0, value0 = head.project(hidden, embedding, position)
    output = head.finish(hidden, attend(q, key0, value0, None))
    results = [outcome(output, position, 0)]
    if steps == 1:
        return results

    # Roots of the later steps: the same number in each document, among the rows whose next tokens are written.
    count = max(1, int(share * t))
    weight = torch.zeros(b, t)
    weight[:, :-1] = batch.written[:, 1:].float()  # on the host, where the generator is
    root = torch.multinomial(weight + 1e-6, count, generator=generator).sort(dim=1).values.to(device)
    seen = position[:, None, :] <= root[..., None]  # [B, m, T]
    own = torch.eye(count, dtype=torch.bool, device=device).expand(b, count, count)
    keys, values, masks = [key0], [value0], [seen]
    hidden = head.carry(output).gather(1, root[..., None].expand(-1, -1, width))
    for step in range(1, steps):
        at = (root + step).clamp(max=t - 1)
        entering = embedding.gather(1, at[..., None].expand(-1, -1, embedding.shape[-1]))
        q, k, v = head.project(hidden, entering, root + step)
        keys.append(k)
        values.append(v)
        masks.append(own)
        mask = torch.cat(masks, dim=2)[:, None]
        output = head.finish(hidden, attend(q, torch.cat(keys, 1), torch.cat(values, 1), mask))
        hidden = head.carry(output)
        results.append(outcome(output, root, step))
    return results


def loss_of(results: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], decay: float) -> torch.Tensor:
    """Weighted mean over the steps of the soft cross-entropy in nats, a scalar; `results` as `unroll` gives them."""
    total, weights = torch.zeros((), device=results[0][0].device), 0.0
    for step, (draft, wanted, known) in enumerate(results):
        if known.any():
            p = wanted[known].float().softmax(-1)
            total = total - decay**step * (p * draft[known].float().log_softmax(-1)).sum(-1).mean()
            weights += decay**step
    return total / max(weights, 1e-9)


def evaluate(head: EagleHead, target: Target, docs: list[Document], config: EagleTrainConfig) -> dict[str, object]:
    """Loss, and per step the share of rows at which the head's first choice is the target's.

    Rows whose next token is not in the draft vocabulary are misses.
    """
    generator = torch.Generator().manual_seed(config.seed)
    hits = np.zeros(config.steps)
    rows = np.zeros(config.steps)
    losses = []
    with torch.no_grad(), _precision(target, config):
        for batch in batches(docs, config.batch_tokens):
            batch = batch.to(target.device, config.precision == "float32")
            results = unroll(head, target, batch, config.steps, 0.5, generator)
            losses.append(float(loss_of(results, config.decay)))
            for step, (draft, wanted, known) in enumerate(results):
                hits[step] += int(((draft.argmax(-1) == wanted.argmax(-1)) & known).sum())
                rows[step] += len(known)
    return {"loss": float(np.mean(losses)), "agreement": (hits / np.maximum(rows, 1)).round(4).tolist()}


def train(
    target: Target,
    stores: Sequence[Path],
    folder: Path,
    config: EagleTrainConfig,
    start: Path | None = None,
    workers: Workers | None = None,
) -> Iterator[dict[str, object]]:
    """Train a head on capture stores (selection `all`) and save it in `folder`; yields a record now and then.

    A store that is given several times counts as often in every pass. The run's state is kept in `folder/run` and is
    continued when the same command is given again, with more stores or rows as well. With `start` a new run begins
    from that head, and from the target otherwise. Of several processes only the first one yields and writes.
    Raises HeadError for a run of another head, and for stores without the states that it reads; ValueError if no text
    is left beside what is held out.
    """
    workers = workers or Workers()
    opened = [CaptureStore.open(s) for s in stores]
    run = folder / "run"
    run.mkdir(parents=True, exist_ok=True)
    state_file, tensors = run / "state.json", run / "state.safetensors"
    first = load_head(start, target.vocab_size) if start is not None else None
    if first is not None:
        first.check_trainable()
    if state_file.is_file():
        state = json.loads(state_file.read_text())
        tokens = load_file(tensors)["draft_tokens"]
    else:
        kept = first.draft_tokens if first is not None else None
        tokens, coverage = frequent_tokens(opened, config.draft_vocabulary, kept)
        state = {"rows": 0, "updates": 0, "seconds": 0.0, "coverage": coverage}
    # Another order after each resumption: the run must not begin with the same shards again.
    random_ = random.Random(f"{config.seed}:{state['updates']}")
    generator = torch.Generator().manual_seed(random_.getrandbits(48) + workers.rank)
    if first is not None:
        head = grown(first, target, tokens) if len(tokens) > len(first.draft_tokens) else first
        head.train().requires_grad_(True)
    else:
        head = initial_head(target, tokens)
    head.to(target.device)
    if state.setdefault("head", head.config.to_dict()) != head.config.to_dict():
        raise HeadError(f"the run in {run} began from another head: begin from the same one, or choose another folder")
    sites = [*head.config.sites(target.blocks), last_site(target.blocks)]
    for store in opened:
        lacks = [site for site in sites if site not in store.sites]
        if lacks:
            raise HeadError(f"the head reads {', '.join(lacks)}, and {store.folder} holds no states of it")
    optimizer = torch.optim.AdamW(head.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    weights = {f"head.{name}": p for name, p in head.named_parameters()}
    if tensors.is_file():
        restore(load_file(tensors), weights, optimizer)
    held_out = documents(opened[0], 0, sites)[: config.validation_documents]
    started, saved, losses = time.monotonic(), time.monotonic(), []
    workers.agree(head.parameters())  # all have read the state before the first one writes it
    if workers.leads:
        yield {"rows": state["rows"], "coverage": state["coverage"], **evaluate(head, target, held_out, config)}
    while state["rows"] < config.tokens:
        opened = [CaptureStore.open(s) for s in stores]  # a store may still grow
        order = [(s, k) for s, store in enumerate(opened) for k in range(len(store.shards))]
        random_.shuffle(order)
        before = state["rows"]
        for which, shard in order:
            docs = documents(opened[which], shard, sites)
            if (stores[which], shard) == (stores[0], 0):
                docs = docs[config.validation_documents :]
            ready = list(batches(docs, config.batch_tokens))
            random_.shuffle(ready)
            size = workers.count * config.accumulate
            for group in (ready[k : k + size] for k in range(0, len(ready), size)):
                for part in optimizer.param_groups:
                    part["lr"] = learning_rate(config.learning_rate, min(1.0, state["rows"] / config.tokens))
                optimizer.zero_grad()
                for batch in workers.share(group):
                    batch = batch.to(target.device, config.precision == "float32")
                    with _precision(target, config):
                        loss = loss_of(
                            unroll(head, target, batch, config.steps, config.unrolled_share, generator), config.decay
                        )
                    if loss.requires_grad:  # else no row of it counts
                        (loss / len(group)).backward()
                    losses.append(float(loss.detach()))
                workers.add_gradients(head.parameters())
                torch.nn.utils.clip_grad_norm_(head.parameters(), config.clip)
                optimizer.step()
                state["rows"] += sum(int(batch.pending.numel()) for batch in group)
                state["updates"] += 1
            now = time.monotonic()
            if workers.leads and (now - saved > config.checkpoint_seconds or state["rows"] >= config.tokens):
                state["seconds"] += now - saved
                saved = now
                record = {
                    "rows": state["rows"],
                    "seconds": round(now - started, 1),
                    "train_loss": float(np.mean(losses)),
                    **evaluate(head, target, held_out, config),
                }
                losses = []
                keep(run, state, weights, optimizer, draft_tokens=tokens)
                with (run / "log.jsonl").open("a") as log:
                    log.write(json.dumps(record) + "\n")
                yield record
            if state["rows"] >= config.tokens:
                break
        if state["rows"] == before:
            raise ValueError(
                f"there is no text to train on beside the {config.validation_documents} documents that are held out: "
                "write more, or hold out fewer"
            )
    workers.wait()
    if not workers.leads:
        return
    text = [
        {
            "store": store.folder.name,
            "times": stores.count(path),
            "written": sum(s["written"] for s in store.shards),
            "contaminated": sum(s.get("contaminated", 0) for s in store.shards),
        }
        for path, store in dict(zip(stores, opened, strict=True)).items()
    ]
    head.save(folder, switchsd={"target": target.fingerprint.to_dict(), "sites": sites[:-1], "config": asdict(config)})
    write_json(
        folder / "training.json",
        {
            "config": asdict(config),
            "coverage": state["coverage"],
            "updates": state["updates"],
            "result": evaluate(head, target, held_out, config),
            "text": text,
            "written_tokens": sum(t["written"] for t in text),
            "dropped_as_contaminated": sum(t["contaminated"] for t in text),
            "log": [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()],
            "provenance": provenance(seed=config.seed),
        },
    )


def _precision(target: Target, config: EagleTrainConfig) -> torch.autocast:
    return torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16")
