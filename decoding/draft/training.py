"""Training a draft model by distillation: the blocks cut from a target learn to predict what the whole target predicts.

The text is a capture store's (selection `all`): tokens, and the target's last states, which give its distribution at
every position without running it. The loss is the cross-entropy to that distribution, or the total variation distance
between the two, which is the share of tokens that rejection sampling would refuse, or a mixture.

A share of the batches may be questions instead (`decoding.answers`), whose right answers are learned as they stand: a
draft that knows what its target does not. They are made as they are needed; their held-out side is never learned from.

The output matrix is most of the cost of a small draft. So a batch's loss is taken over a part of the vocabulary: the
most frequent tokens of the text, the next tokens of this batch, and a sample of the others that stands for all of them
(each counts as many times as it was likely to be left out). Validation is over the whole vocabulary.

One shard of a store is in memory at a time.

Sources: distillation for speculative decoding, DistillSpec, arXiv 2310.08461; a sample of the output matrix, Jean et
al. 2014, arXiv 1412.2007.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from activations import attention
from activations.provenance import provenance
from activations.sites import last_site
from activations.store import CaptureStore
from activations.structure import LogitRule
from activations.target import Fingerprint, Target
from decoding.answers import MIX, Question, Questions
from decoding.draft.model import WEIGHTS, DraftError, cut_ordinary, load_weights, read_draft, save_draft, spread
from decoding.training import Document, check_settings, documents, frequent_tokens, keep, learning_rate, padded, restore

BUCKETS = (64, 128, 256, 512)
"""Positions at which the rows of a validation are divided."""
PLAIN = 1024
"""Longest text, in tokens, whose attention is written out on a CPU."""


@dataclass(frozen=True)
class DraftTrainConfig:
    """How a draft model is trained."""

    blocks: int = 2
    """How many of the target's blocks, if they are not named: the first, the last, and evenly spaced ones between."""
    tokens: int = 8_000_000
    """Tokens to train on, repetitions included."""
    minutes: float = 0.0
    """Time to train for, if that comes first, over all resumptions; 0: as long as it takes."""
    batch_tokens: int = 2048
    """Tokens of a batch."""
    accumulate: int = 1
    """Batches in an optimizer step."""
    frequent: int = 4096
    """How many of the text's most frequent tokens are in every batch's part of the vocabulary. The draft proposes no
    others, unless draws of its own are asked for."""
    sampled: int = 1024
    """How many of the others are drawn for a batch."""
    variation: float = 0.0
    """Share of the total variation distance in the loss; the rest is the cross-entropy."""
    prompt_weight: float = 0.3
    """What a position counts whose next token the target did not write; one that it wrote counts 1."""
    precision: str = "bf16"
    """What matrix products are computed in: bf16 or float32. Weights and moments are float32."""
    learning_rate: float = 1e-3
    """Peak; warmed up over 2 % of the run, then a cosine to zero."""
    weight_decay: float = 0.01
    """Of AdamW, on matrices only."""
    clip: float = 1.0
    """Largest gradient norm."""
    questions: int = 0
    """How many different questions there are, the kinds evenly, whose right answers are learned beside the target's
    text; 0: none."""
    question_share: float = 0.5
    """Share of the batches that are questions, if there are any; below 1."""
    validation_documents: int = 24
    """Documents held out from the first shard of every store."""
    checkpoint_seconds: float = 300.0
    """How often the state of the run is saved and the draft validated."""
    seed: int = 0
    """Seed of everything that is random in it."""

    def __post_init__(self) -> None:
        check_settings(self, counts=("blocks", "frequent"), shares=("variation", "prompt_weight"))
        for name in ("sampled", "questions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not 0 <= self.question_share < 1:
            raise ValueError(f"question_share is {self.question_share}; it must be 0 or more and below 1")
        for name in ("minutes", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")


class Student:
    """A cut target in training: float32 blocks and norm between the target's frozen embedding and output rows."""

    def __init__(self, target: Target, blocks: Sequence[int] | int) -> None:
        if target.quantization is not None:
            raise DraftError(f"{target.name} is quantized ({target.quantization}): train a draft of it unquantized")
        self.draft = cut_ordinary(target, blocks)
        self.blocks = spread(blocks, target.blocks) if isinstance(blocks, int) else list(blocks)
        self._folds = self.draft.model.config._attn_implementation == attention.NAME
        self.draft.layers.float().requires_grad_(True)
        self.draft.final_norm.float().requires_grad_(True)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are trained, by name: matrices first."""
        parts = {f"blocks.{k}": block for k, block in enumerate(self.draft.layers)} | {"norm": self.draft.final_norm}
        found = {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}
        return dict(sorted(found.items(), key=lambda named: named[1].dim() <= 1))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed final states [B, T, width] of whole texts [B, T], padded at their ends."""
        if self._folds:  # a CPU's fused kernel is the slower one for texts like these, forwards and backwards
            plain = tokens.device.type == "cpu" and tokens.shape[1] <= PLAIN
            self.draft.model.set_attn_implementation("eager" if plain else "sdpa")
        embedding = self.draft.embed(tokens).float()
        states: torch.Tensor = self.draft.backbone(inputs_embeds=embedding, use_cache=False).last_hidden_state
        return states


# -- the loss ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outputs:
    """Rows of the target's output matrix, and what becomes of a product with them."""

    weight: torch.Tensor
    """[S, width]"""
    bias: torch.Tensor | None
    """[S]"""
    shift: torch.Tensor | None
    """[S], added to logits: the log of how many tokens each row stands for."""
    rule: LogitRule
    """How the target makes logits of the product."""
    tokens: torch.Tensor | None = None
    """[S], whose rows these are; None: all, in order."""

    def columns(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where the rows of tokens [n], which must be among them, stand."""
        if self.tokens is None:
            return tokens
        order = self.tokens.argsort()
        return order[torch.searchsorted(self.tokens[order], tokens)]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Of normed states [n, width], float32 [n, S]; without the shift."""
        product = states.to(self.weight.dtype) @ self.weight.T
        if self.bias is not None:
            product = product + self.bias
        return self.rule(product.float())

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """By how much logits [...] move with the product: [...], or a scalar where it is the same for all."""
        if self.rule.kind == "softcap":
            return 1 - (logits / self.rule.value) ** 2
        return {"times": self.rule.value, "over": 1 / self.rule.value}.get(self.rule.kind, 1.0)


class Divergence(torch.autograd.Function):
    """Weighted sum of each row's divergence from the target's distribution; its gradient is made in the same pass,
    a few rows at a time, so that no matrix of all rows' logits is ever written."""

    ROWS = 64
    """What fits a cache."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor, outputs: Outputs, variation: float
    ) -> torch.Tensor:
        """states [n, width] of the student, normed; `wanted`: those of the target, or columns [n] of the only right
        tokens; weights [n]."""
        gradient = torch.empty_like(states)
        total = torch.zeros((), device=states.device)
        for start in range(0, len(states), Divergence.ROWS):
            part = slice(start, start + Divergence.ROWS)
            loss, logits_gradient = divergence(outputs, states[part], wanted[part], variation)
            total += (loss * weights[part]).sum()
            logits_gradient.mul_(weights[part, None])
            gradient[part] = logits_gradient.to(outputs.weight.dtype) @ outputs.weight
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None


def divergence(
    outputs: Outputs, states: torch.Tensor, wanted: torch.Tensor, variation: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's loss [n], and its gradient with respect to the product [n, S]."""
    logits = outputs.logits(states)
    slope = outputs.slope(logits)
    if outputs.shift is not None:
        logits = logits.add_(outputs.shift)
    if wanted.dim() == 1:
        p = F.one_hot(wanted, logits.shape[-1]).float()
    else:
        target = outputs.logits(wanted)
        p = torch.softmax(target if outputs.shift is None else target.add_(outputs.shift), -1)
    log_q = torch.log_softmax(logits, -1)
    q = log_q.exp()
    loss = -(p * log_q).sum(-1) if variation < 1 else torch.zeros(len(p), device=p.device)
    if variation == 0:
        gradient = q.sub_(p)
    else:
        # d min(p, q) / d logit_j = q_j * ([q_j < p_j] - the mass of q where it is below p)
        below = q * (q < p)
        mass = below.sum(-1, keepdim=True)
        distance = (p - q).clamp_(min=0).sum(-1)
        loss = (1 - variation) * loss + variation * distance
        gradient = (1 - variation) * (q - p) - variation * (below - q * mass)
    return loss, gradient if isinstance(slope, float) and slope == 1.0 else gradient * slope


class Vocabulary:
    """The whole output matrix of a target, and the parts of it that batches are judged on."""

    def __init__(self, target: Target, frequent: torch.Tensor, config: DraftTrainConfig) -> None:
        rule = target.structure.logit_rule
        if rule is None:
            raise DraftError(f"the logits of {target.name} are not its output matrix's product, scaled or soft-capped")
        self.rule: LogitRule = rule
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.weight: torch.Tensor = target.head.weight.detach().to(dtype)
        bias = getattr(target.head, "bias", None)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self.frequent = frequent.to(self.weight.device)
        self.sampled = config.sampled

    @property
    def whole(self) -> Outputs:
        return Outputs(self.weight, self.bias, None, self.rule)

    def part(self, present: torch.Tensor, generator: torch.Generator) -> Outputs:
        """The frequent tokens, those `present` [...], and a sample of the others; the whole if that is all."""
        size, device = len(self.weight), self.weight.device
        rest = torch.ones(size, dtype=torch.bool, device=device)
        rest[self.frequent] = False
        rest[present] = False
        chosen, others = (~rest).nonzero()[:, 0], rest.nonzero()[:, 0]
        if len(others) <= self.sampled:
            return self.whole
        drawn = torch.randperm(len(others), generator=generator)[: self.sampled].to(device)
        tokens = torch.cat([chosen, others[drawn]])
        shift = torch.zeros(len(tokens), device=device)
        if self.sampled:
            shift[len(chosen) :] = math.log(len(others) / self.sampled)
        return Outputs(self.weight[tokens], None if self.bias is None else self.bias[tokens], shift, self.rule, tokens)


def loss_of(
    student: Student,
    target: Target,
    batch: Document,
    vocabulary: Vocabulary,
    config: DraftTrainConfig,
    generator: torch.Generator,
) -> tuple[torch.Tensor, float]:
    """The weighted sum of the losses of a batch's rows (a scalar), and the sum of the weights. Without the target's
    states, what is written is right, and nothing else is learned."""
    weights = batch["written"].float()
    taught = "last" not in batch
    if not taught:
        weights = torch.where(batch["real"] & ~batch["written"], config.prompt_weight, weights)
    weights = weights.flatten()
    counts = weights > 0
    hidden = student.hidden(batch["token"]).flatten(0, 1)[counts]
    outputs = vocabulary.part(batch["pending"][batch["real"]], generator)
    with torch.no_grad():
        if taught:
            wanted = outputs.columns(batch["pending"].flatten()[counts])
        else:
            wanted = target.final_norm(batch["last"].to(target.dtype)).flatten(0, 1)[counts]
    variation = 0.0 if taught else config.variation
    loss: torch.Tensor = Divergence.apply(hidden.float(), wanted, weights[counts], outputs, variation)
    return loss, float(weights.sum())


# -- validation ----------------------------------------------------------------------------------------


def evaluate(
    student: Student, target: Target, docs: list[Document], vocabulary: Vocabulary, config: DraftTrainConfig
) -> dict[str, Any]:
    """Over the whole vocabulary and the tokens that the target wrote: `agreement`, the share of rows whose first
    choice is the target's; `acceptance`, the share that rejection sampling keeps at temperature 1; `cross_entropy` to
    the target's distribution and `divergence`, what of it is the draft's fault; and both shares by position."""
    columns: dict[str, list[torch.Tensor]] = {}
    whole = vocabulary.whole
    with torch.no_grad(), _precision(target, config):
        for batch in padded(docs, config.batch_tokens):
            batch = _moved(batch, target.device)
            counts = batch["written"].flatten()
            hidden = student.hidden(batch["token"]).flatten(0, 1)[counts]
            wanted = target.final_norm(batch["last"].to(target.dtype)).flatten(0, 1)[counts]
            position = torch.arange(batch["token"].shape[1], device=target.device).expand_as(batch["token"])
            columns.setdefault("position", []).append(position.flatten()[counts])
            for h, w in zip(hidden.split(Divergence.ROWS), wanted.split(Divergence.ROWS), strict=True):
                log_q, log_p = whole.logits(h).log_softmax(-1), whole.logits(w).log_softmax(-1)
                p = log_p.exp()
                found = {
                    "agreement": log_q.argmax(-1) == log_p.argmax(-1),
                    "acceptance": torch.minimum(p, log_q.exp()).sum(-1),
                    "cross_entropy": -(p * log_q).sum(-1),
                    "divergence": (p * (log_p - log_q)).sum(-1),
                }
                for name, values in found.items():
                    columns.setdefault(name, []).append(values.float())
    joined = {name: torch.cat(parts) for name, parts in columns.items()}
    position = joined.pop("position")
    record: dict[str, Any] = {name: round(float(values.mean()), 4) for name, values in joined.items()}
    bucket = torch.bucketize(position, torch.tensor(BUCKETS, device=position.device), right=True)
    for name in ("agreement", "acceptance"):
        record[f"{name}_by_position"] = {
            f"{low}-{high}": round(float(joined[name][bucket == k].mean()), 4)
            for k, (low, high) in enumerate(zip((0, *BUCKETS), (*BUCKETS, ""), strict=True))
            if (bucket == k).any()
        }
    return record


# -- questions -----------------------------------------------------------------------------------------

TAUGHT = {kind: levels for kind, levels in MIX.items() if kind not in ("extract", "lookup")}
"""Kinds that a few blocks can learn; reading is left to the target."""
KNOWN = 0.1
"""How often a kind that is known is asked, where one that is not is asked once."""
ASKED = 64
"""Questions that are put into batches together, those of similar length in one."""
VALIDATED = 10
"""Held-out questions of a kind that a validation asks."""


def lesson(target: Target, question: Question) -> Document:
    """A question with its right answer and the stop token, as the target would write it; no states."""
    prompt = target.encode_messages(question.messages)
    answer = [*target.tokenizer(question.answer, add_special_tokens=False)["input_ids"], _stop(target)]
    ids = torch.tensor([*prompt, *answer])
    written = torch.arange(len(ids) - 1) >= len(prompt) - 1
    return {"token": ids[:-1], "pending": ids[1:], "written": written}


def _stop(target: Target) -> int:
    usual = target.tokenizer.eos_token_id
    return int(usual) if usual in target.stop_ids else min(target.stop_ids)


def lessons(
    target: Target, config: DraftTrainConfig, random_: random.Random, known: Mapping[str, float]
) -> Iterator[Document]:
    """Batches of questions without end, in any order. `known`: by kind, the share that the latest validation found
    right; the less, the more are asked."""
    source, kinds = Questions(TAUGHT, config.seed, "train"), list(TAUGHT)
    turns = math.ceil(config.questions / len(kinds))
    while True:
        weights = [KNOWN + (1 - KNOWN) * (1 - known.get(kind, 0.0)) for kind in kinds]
        chosen = random_.choices(range(len(kinds)), weights, k=ASKED)
        asked = [lesson(target, source[which + len(kinds) * random_.randrange(turns)]) for which in chosen]
        ready = list(padded(asked, config.batch_tokens))
        random_.shuffle(ready)
        yield from ready


def mixed(
    texts: Sequence[Document], questions: Iterator[Document], share: float, random_: random.Random
) -> list[Document]:
    """Batches of text with so many of questions between them that these are this share of all, on average."""
    out = []
    for batch in texts:
        while random_.random() < share:
            out.append(next(questions))
        out.append(batch)
    return out


def answer_tokens(target: Target, config: DraftTrainConfig) -> torch.Tensor:
    """int64 [tokens]: those of right answers (increasing ids), of as many questions as show nearly all."""
    source = Questions(TAUGHT, config.seed, "train")
    texts = {source[number].answer for number in range(min(config.questions, 20_000))}
    ids = target.tokenizer(sorted(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor(sorted({_stop(target), *(token for text in ids for token in text)}))


def examine(student: Student, target: Target, vocabulary: Vocabulary, config: DraftTrainConfig) -> dict[str, float]:
    """The share of held-out questions whose whole answer is the student's first choice at every token, by kind."""
    found: dict[str, list[bool]] = {}
    asked = Questions(MIX, config.seed, "held-out")
    with torch.no_grad(), _precision(target, config):
        for number in range(VALIDATED * len(MIX)):
            question = asked[number]
            doc = _moved(lesson(target, question), target.device)
            hidden = student.hidden(doc["token"][None])[0, doc["written"]]
            chosen = vocabulary.whole.logits(hidden).argmax(-1)
            found.setdefault(question.kind, []).append(bool((chosen == doc["pending"][doc["written"]]).all()))
    return {kind: round(sum(right) / len(right), 4) for kind, right in found.items()}


# -- the run -------------------------------------------------------------------------------------------


def train(
    target: Target,
    stores: Sequence[Path],
    folder: Path,
    config: DraftTrainConfig,
    blocks: Sequence[int] | None = None,
    start: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Train a draft model on capture stores (selection `all`) and save it in `folder`; yields a record now and then.

    `blocks`: those of the target that it begins from, by number; by default `config.blocks` of them. `start`: a draft
    of the same target that a new run begins from instead; its frequent tokens stay.
    A store that is given several times counts as often in every pass; one that grows is read further at the next pass.
    The run's state is kept in `folder/run` and is continued when the same command is given again, with more stores,
    rows or minutes as well. Whenever a record of some training is yielded, the draft so far is in `folder` too. A
    KeyboardInterrupt while it trains is passed on once the state is kept. Raises DraftError for stores without the
    states that a draft learns from, and for a run or start of other blocks or another target; ValueError if no text is
    left beside what is held out.
    """
    opened = [CaptureStore.open(s) for s in stores]
    states = {"last": [last_site(target.blocks)]}
    for store in opened:
        if not store.shards:
            raise DraftError(f"{store.folder} has no complete shard yet: wait for its writer, or write more")
        if states["last"][0] not in store.sites:
            raise DraftError(f"a draft learns from {states['last'][0]}, and {store.folder} holds no states of it")
    first = read_draft(start) if start is not None else None
    if first is not None:
        if blocks is not None and list(blocks) != first["blocks"]:
            raise DraftError(f"{start} holds blocks {first['blocks']}, not {list(blocks)}: name those, or none")
        different = target.fingerprint.mismatch(Fingerprint(**first["target"]))
        if different:
            raise DraftError(f"{start} was cut from another target than {target.name} ({'; '.join(different)})")
        blocks = first["blocks"]
    student = Student(target, config.blocks if blocks is None else blocks)
    run = folder / "run"
    run.mkdir(parents=True, exist_ok=True)
    state_file, tensors = run / "state.json", run / "state.safetensors"
    state: dict[str, Any]
    if state_file.is_file():
        state = json.loads(state_file.read_text())
        frequent = load_file(tensors)["frequent"]
    else:
        kept = [] if first is None else [torch.tensor(first.get("frequent", []), dtype=torch.int64)]
        kept += [answer_tokens(target, config)] if config.questions else []
        frequent, coverage = frequent_tokens(opened, config.frequent, torch.cat(kept).unique() if kept else None)
        if start is not None:
            load_weights(student.draft, start / WEIGHTS)
        state = {"rows": 0, "updates": 0, "seconds": 0.0, "coverage": coverage, "blocks": student.blocks}
    if state["blocks"] != student.blocks:
        raise DraftError(
            f"the run in {run} trains blocks {state['blocks']}, not {student.blocks}: name those, or another folder"
        )
    begun = {"rows": state["rows"], "config": asdict(config), "provenance": provenance(seed=config.seed)}
    state["runs"] = [*state.get("runs", []), begun]
    # Another order after each resumption: the run must not begin with the same shards again.
    random_ = random.Random(f"{config.seed}:{state['updates']}")
    generator = torch.Generator().manual_seed(random_.getrandbits(48))
    vocabulary = Vocabulary(target, frequent, config)
    parameters = student.parameters
    matrices = [p for p in parameters.values() if p.dim() > 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    if tensors.is_file():
        restore(load_file(tensors), parameters, optimizer)
    held_out: list[Document] = []
    for path in dict.fromkeys(stores):
        held_out += documents(CaptureStore.open(path), 0, states)[: config.validation_documents]

    known: dict[str, float] = {}

    def validate() -> dict[str, Any]:
        found = evaluate(student, target, held_out, vocabulary, config)
        if config.questions:
            known.update(examine(student, target, vocabulary, config))
            found["answers"] = dict(known)
        return found

    record: dict[str, Any] = validate()
    asked = lessons(target, config, random_, known)

    def save() -> None:
        by_path = dict(zip(stores, opened, strict=True))
        _save(folder, student, target, config.seed, state, record, by_path, stores, frequent)

    if state["updates"] and _saved_updates(folder) != state["updates"]:  # interrupted before that draft was saved
        save()
    yield {"rows": state["rows"], "coverage": round(state["coverage"], 4), **record}
    started = saved = time.monotonic()
    kept = state["updates"]
    losses = weights = 0.0

    def progress() -> float:
        done = state["rows"] / config.tokens
        if config.minutes:
            done = max(done, (state["seconds"] + time.monotonic() - saved) / (60 * config.minutes))
        return min(1.0, done)

    try:
        while progress() < 1:
            opened = [CaptureStore.open(s) for s in stores]  # a store may still grow
            order = [(s, k) for s, store in enumerate(opened) for k in range(len(store.shards))]
            random_.shuffle(order)
            before = state["rows"]
            for which, shard in order:
                docs = documents(opened[which], shard, states)[config.validation_documents if shard == 0 else 0 :]
                ready = list(padded(docs, config.batch_tokens))
                random_.shuffle(ready)
                if config.questions:
                    ready = mixed(ready, asked, config.question_share, random_)
                for group in (ready[k : k + config.accumulate] for k in range(0, len(ready), config.accumulate)):
                    for part in optimizer.param_groups:
                        part["lr"] = learning_rate(config.learning_rate, progress())
                    optimizer.zero_grad()
                    rows = sum(int(batch["real"].sum()) for batch in group)
                    learned = sum(int(batch["real" if "last" in batch else "written"].sum()) for batch in group)
                    for batch in group:
                        batch = _moved(batch, target.device)
                        with _precision(target, config):
                            loss, weight = loss_of(student, target, batch, vocabulary, config, generator)
                        if weight:
                            (loss / learned).backward()
                        losses, weights = losses + float(loss.detach()), weights + weight
                    torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip)
                    optimizer.step()
                    state["rows"] += rows
                    state["updates"] += 1
                ended = progress() >= 1
                now = time.monotonic()
                if ended or now - saved > config.checkpoint_seconds:
                    state["seconds"] += now - saved
                    saved = now
                    record = {
                        "rows": state["rows"],
                        "seconds": round(now - started, 1),
                        "train_loss": round(losses / max(weights, 1e-9), 4),
                        **validate(),
                    }
                    losses = weights = 0.0
                    keep(run, state, parameters, optimizer, frequent=frequent)
                    kept = state["updates"]
                    with (run / "log.jsonl").open("a") as log:
                        log.write(json.dumps(record) + "\n")
                    save()
                    yield record
                    saved = time.monotonic()  # neither the validation nor the caller's time counts
                if ended:
                    break
            if state["rows"] == before:
                raise ValueError(
                    f"there is no text to train on beside the {len(held_out)} documents that are held out: "
                    "write more, or hold out fewer"
                )
    except KeyboardInterrupt:
        if state["updates"] != kept:
            state["seconds"] += time.monotonic() - saved
            keep(run, state, parameters, optimizer, frequent=frequent)
        raise


def _save(
    folder: Path,
    student: Student,
    target: Target,
    seed: int,
    state: dict[str, Any],
    record: dict[str, Any],
    opened: dict[Path, CaptureStore],
    stores: Sequence[Path],
    frequent: torch.Tensor,
) -> None:
    """The draft as it is now, with all that is known of it: `runs` are the settings and commands by the row from which
    they held."""
    text = [
        {
            "store": store.folder.name,
            "times": stores.count(path),
            "written": sum(s["written"] for s in store.shards),
            "contaminated": sum(s.get("contaminated", 0) for s in store.shards),
        }
        for path, store in opened.items()
    ]
    log = folder / "run" / "log.jsonl"
    save_draft(
        folder,
        student.draft,
        student.blocks,
        target,
        frequent=frequent.tolist(),
        runs=state["runs"],
        coverage=state["coverage"],
        updates=state["updates"],
        rows=state["rows"],
        seconds=round(state["seconds"], 1),
        result={k: v for k, v in record.items() if k not in ("rows", "seconds", "train_loss")},
        text=text,
        written_tokens=sum(t["written"] for t in text),
        dropped_as_contaminated=sum(t["contaminated"] for t in text),
        log=[json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else [],
        provenance=provenance(seed=seed),
    )


def _saved_updates(folder: Path) -> int | None:
    """After how many updates the draft in a folder was saved; None where there is none."""
    try:
        return read_draft(folder).get("updates")
    except DraftError:
        return None


def _moved(batch: Document, device: torch.device) -> Document:
    return {name: x.to(device) for name, x in batch.items()}


def _precision(target: Target, config: DraftTrainConfig) -> torch.autocast:
    return torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16")
