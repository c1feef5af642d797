"""Make the small model that the tests run: a Qwen3 of a few million parameters that really copies.

    python -m benchmarks.train_small                      # writes activations/weights/small-qwen3
    python -m benchmarks.train_small --steps 300 --out runs/small --run runs/small-state

Its text: the sources of Python's standard library with their docstrings (PSF licence), the train part of the
embedded prompts, tasks of `small_tasks.py`, and runs of random tokens that come again. What cannot be known (the
prompt of a task, the first time a run is seen) has no loss, so that copying is learnt early.

A step's data depend on seed and step alone, and the state is saved every minute: the same command goes on with an
interrupted run, and ends with the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from activations.corpus import load_corpus
from activations.generation import Request, complete
from activations.packaged import SHIPPED, cache_dir
from activations.provenance import provenance
from activations.store import write_json
from activations.target import Target, load_target
from benchmarks.small_tasks import TaskWriter

END = "<|end|>"
SPECIAL = (END, "<|system|>", "<|user|>", "<|assistant|>")
"""The first tokens of the vocabulary; no text holds them."""
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings", "lib2to3"}
"""Folders of the standard library without prose or code to learn from."""
HELD_OUT = 32
"""One file in so many is kept for the held-out loss."""
REPEATED = 64
"""Tokens of the runs that the induction score is measured on."""
FIRST_CONTEXT = 64
"""Tokens of the first steps' rows."""


@dataclass(frozen=True)
class SmallConfig:
    """The model and its training."""

    vocabulary: int = 2048
    """Tokens of the byte-level BPE, the special ones included."""
    width: int = 192
    """Width of the residual stream."""
    blocks: int = 4
    """Blocks."""
    heads: int = 4
    """Query heads; half as many key-value heads."""
    mlp: int = 512
    """Width inside the MLP."""
    max_length: int = 1024
    """Longest text, in tokens, and the context of the last steps."""
    context: int = 256
    """Context of most steps, in tokens."""
    first_steps: int = 200
    """Steps on nothing but random tokens that come again, in a context of FIRST_CONTEXT: copying is learnt here."""
    long_share: float = 0.15
    """Share of the steps with the long context."""
    steps: int = 1500
    """Updates."""
    batch_tokens: int = 4096
    """Tokens of an update."""
    text_share: float = 0.3
    """Share of rows that are text."""
    random_share: float = 0.3
    """Share of rows that are random tokens which come again; the others are tasks."""
    learning_rate: float = 0.01
    """Of the matrices (Muon)."""
    vector_rate: float = 0.004
    """Of embeddings and norms (AdamW)."""
    warmup: int = 40
    """Steps until the full rate; it then falls along a cosine to a hundredth."""
    report_every: int = 100
    """Steps between two reports."""
    checkpoint_seconds: float = 60.0
    """How often the state of the run is saved."""
    seed: int = 0
    """Decides the initial weights and every step's data."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "blocks", "heads", "mlp", "context", "steps", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.width % self.heads or self.heads % 2 or self.width // self.heads % 2:
            raise ValueError(f"{self.heads} heads do not fit width {self.width}: use an even number that divides it")
        if not self.context <= self.max_length <= self.batch_tokens:
            raise ValueError(
                f"context is {self.context}, max_length {self.max_length} and batch_tokens {self.batch_tokens}; "
                "none may be below the one before it"
            )
        if min(self.text_share, self.random_share) < 0 or self.text_share + self.random_share > 1:
            raise ValueError(
                f"text_share is {self.text_share} and random_share {self.random_share}; "
                "both are shares, at most 1 together"
            )
        if not 0 <= self.first_steps <= self.steps:
            raise ValueError(f"first_steps is {self.first_steps}; it must lie in [0, {self.steps}], the steps")
        if not 0 <= self.long_share <= 1:
            raise ValueError(f"long_share is {self.long_share}; a share lies in [0, 1]")


# -- text ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """What is read."""

    train: str
    held_out: str
    files: int
    sha256: str


def read_text(folder: Path) -> Text:
    """All Python files of a folder, in the order of their names, one in HELD_OUT kept apart; and the prompts."""
    parts: dict[bool, list[str]] = {True: [], False: []}
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder)
        if LEFT_OUT.intersection(name.parts):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        digest.update(f"{name.as_posix()}\0{text}\0".encode())
        held = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % HELD_OUT == 0
        parts[held].append(text)
    files = len(parts[True]) + len(parts[False])
    parts[False] += [m["content"] + "\n" for prompt in load_corpus("train") for m in prompt.messages]
    return Text("\n".join(parts[False]), "\n".join(parts[True]), files, digest.hexdigest())


def make_tokenizer(text: str, size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token, with a chat template and END to stop at."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    raw.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=END, pad_token=END, additional_special_tokens=list(SPECIAL[1:])
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# -- data ------------------------------------------------------------------------------------------------


class Batches:
    """Rows of tokens with weights of the loss; step n's are the same in every run."""

    def __init__(self, config: SmallConfig, text: Text, tokenizer: PreTrainedTokenizerFast) -> None:
        self.config = config
        self._encode = tokenizer.backend_tokenizer.encode
        self.train, self.held_out = (
            np.asarray(self._encode(t).ids, dtype=np.int64) for t in (text.train, text.held_out)
        )
        self.size = tokenizer.backend_tokenizer.get_vocab_size()
        self.tasks = TaskWriter(text.train)

    def length(self, step: int) -> int:
        """Context of this step."""
        if step < self.config.first_steps:
            return min(FIRST_CONTEXT, self.config.context)
        late = step >= self.config.steps * (1 - self.config.long_share)
        return self.config.max_length if late else self.config.context

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [rows, T + 1] and weights of the predictions of the last T float32 [rows, T]."""
        rng = random.Random(f"{self.config.seed}:{step}")
        length = self.length(step)
        row = self._loop if step < self.config.first_steps else self._row
        rows = [row(rng, length + 1) for _ in range(self.config.batch_tokens // length)]
        ids, learnt = (torch.tensor([row[part] for row in rows]) for part in (0, 1))
        return ids, learnt[:, 1:].float()

    def _loop(self, rng: random.Random, length: int) -> tuple[list[int], list[bool]]:
        """One run of random tokens, again and again."""
        run = self.random_tokens(rng, rng.randint(3, length // 2))
        ids = run * math.ceil(length / len(run))
        return ids[:length], [place > len(run) for place in range(length)]

    def _row(self, rng: random.Random, length: int) -> tuple[list[int], list[bool]]:
        draw = rng.random()
        if draw < self.config.text_share:
            first = rng.randrange(len(self.train) - length)
            return self.train[first : first + length].tolist(), [True] * length
        pieces = self._repeats if draw < self.config.text_share + self.config.random_share else self._documents
        ids: list[int] = []
        learnt: list[bool] = []
        for piece, known in pieces(rng, length):
            ids += piece
            learnt += [known] * len(piece)
            if len(ids) >= length:
                break
        return ids[:length], learnt[:length]

    def _repeats(self, rng: random.Random, length: int) -> Iterator[tuple[list[int], bool]]:
        """Random tokens that come again, at once or behind others: all but the first of them can then be known. Most
        runs are short, which is where copying is learnt first."""
        longest = math.log(min(160, length // 3))
        while True:
            run = self.random_tokens(rng, round(math.exp(rng.uniform(math.log(2), longest))))
            yield run, False
            for _ in range(rng.randint(1, 4)):
                if rng.random() < 0.5:
                    yield self.random_tokens(rng, rng.randint(1, len(run))), False
                first = rng.randrange(len(run) // 2) if rng.random() < 0.3 else 0
                yield run[first : first + 1], False
                yield run[first + 1 :], True

    def _documents(self, rng: random.Random, length: int) -> Iterator[tuple[list[int], bool]]:
        """Tasks as conversations, and now and then a passage that text quotes."""
        while True:
            if rng.random() < 0.15:
                quoted = self._ids(f'"{self.tasks.text(rng)}"\n')
                for known in (False, True):
                    yield self._ids(self.tasks.passage(rng) + "\n"), True
                    yield quoted, known
            else:
                task = self.tasks.task(rng)
                yield self._ids(chat(task.prompt)), False
                yield self._ids(f"{task.answer}{END}"), True
                yield self._ids("\n"), False

    def random_tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(len(SPECIAL), self.size) for _ in range(count)]

    def _ids(self, text: str) -> list[int]:
        return list(self._encode(text).ids)


def chat(prompt: str) -> str:
    """One user turn as TEMPLATE writes it, with the opening of the answer."""
    return f"<|user|>\n{prompt}{END}\n<|assistant|>\n"


# -- measures --------------------------------------------------------------------------------------------


def induction(model: Qwen3ForCausalLM, size: int, rows: int = 32, length: int = REPEATED) -> dict[str, float]:
    """Random tokens [rows, length] twice in a row: loss of the second time less that of the first, in nats, and the
    share of the second time's tokens that are the model's first choice (its first one cannot be known)."""
    generator = torch.Generator().manual_seed(1)
    once = torch.randint(len(SPECIAL), size, (rows, length), generator=generator)
    loss, right = _losses(model, torch.cat([once, once], dim=1))
    first, second = loss[:, : length - 1].mean(), loss[:, length - 1 :].mean()
    return {
        "score": round(float(second - first), 4),
        "first_loss": round(float(first), 4),
        "second_loss": round(float(second), 4),
        "second_top1": round(float(right[:, length - 1 :].float().mean()), 4),
    }


def text_loss(model: Qwen3ForCausalLM, held_out: np.ndarray, length: int, tokens: int = 16_384) -> float:
    """Nats a token, over windows of `length` tokens spread evenly over the held-out text."""
    rows = max(min(tokens, len(held_out) - 1) // length, 1)
    starts = np.linspace(0, len(held_out) - length - 1, rows).astype(int)
    windows = torch.from_numpy(np.stack([held_out[s : s + length + 1] for s in starts]))
    return round(float(_losses(model, windows)[0].mean()), 4)


def _losses(model: Qwen3ForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and whether the first choice is right, both [rows, T - 1], of the tokens from the second on."""
    losses, right = [], []
    with torch.no_grad():
        for part in ids.split(8):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(part[:, :-1], use_cache=False).logits
            losses.append(F.cross_entropy(logits.float().transpose(1, 2), part[:, 1:], reduction="none"))
            right.append(logits.argmax(-1) == part[:, 1:])
    return torch.cat(losses), torch.cat(right)


def exact_answers(target: Target, writer: TaskWriter, count: int = 64, seed: int = 1) -> dict[str, float]:
    """By kind of task, the share of `count` greedy answers that are right to the last character."""
    rng = random.Random(f"answers:{seed}")
    tasks = [writer.task(rng, kind) for kind in writer.kinds for _ in range(count)]
    requests = [
        # a right answer has ended by then, however its first word is split
        Request(number, target.encode(task.prompt), len(target.tokenizer(task.answer)["input_ids"]) + 8)
        for number, task in enumerate(tasks)
    ]
    right = Counter(
        tasks[done.request.number].kind
        for done in complete(target, requests, rows=64)
        if target.decode(done.tokens) == tasks[done.request.number].answer
    )
    return {kind: round(right[kind] / count, 4) for kind in writer.kinds}


# -- training --------------------------------------------------------------------------------------------


def make_model(config: SmallConfig) -> Qwen3ForCausalLM:
    """Weights to start from: random, but for two things without which copying is not learnt in minutes. Embeddings,
    which also are the output matrix, have length 1, as no token can be likely with the usual short ones; and one
    head begins by looking one token back."""
    torch.manual_seed(config.seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocabulary,
            hidden_size=config.width,
            intermediate_size=config.mlp,
            num_hidden_layers=config.blocks,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads // 2,
            head_dim=config.width // config.heads,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=SPECIAL.index(END),
            pad_token_id=SPECIAL.index(END),
        )
    )
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=config.width**-0.5)
    _look_back(model)
    return model


@torch.no_grad()
def _look_back(model: Qwen3ForCausalLM) -> None:
    """Let the first head's queries and keys come from an entry that all embeddings share, as vectors that the rotary
    embedding brings into line one token apart."""
    config, attention = model.config, model.model.layers[0].self_attn
    half = config.head_dim // 2
    angles = model.model.rotary_emb.inv_freq[: max(half // 4, 1)]  # the fast ones: slow ones blur neighbours
    real, imaginary = slice(0, len(angles)), slice(half, half + len(angles))
    model.model.embed_tokens.weight[:, 0] = 4 * config.hidden_size**-0.5
    attention.q_proj.weight[: config.head_dim] *= 0.3
    attention.k_proj.weight[: config.head_dim] *= 0.3
    attention.q_proj.weight[real, 0], attention.q_proj.weight[imaginary, 0] = 0.2 * angles.cos(), -0.2 * angles.sin()
    attention.k_proj.weight[real, 0], attention.k_proj.weight[imaginary, 0] = 0.2, 0.0


def make_optimizers(model: Qwen3ForCausalLM, config: SmallConfig) -> list[torch.optim.Optimizer]:
    inside = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is q for q in inside)]
    return [
        torch.optim.Muon(inside, lr=config.learning_rate, weight_decay=0.05),
        torch.optim.AdamW(others, lr=config.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(config: SmallConfig, step: int) -> float:
    """The learning rate's factor."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2


def train(config: SmallConfig, text: Text, run: Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast, list[Any]]:
    """The model, its tokenizer and the log; goes on with what `run` holds."""
    run.mkdir(parents=True, exist_ok=True)
    state_file, tensors, log_file = run / "state.json", run / "state.safetensors", run / "log.jsonl"
    what = json.loads(json.dumps({"config": asdict(config), "text": text.sha256}))
    state: dict[str, Any] = {**what, "step": 0, "seconds": 0.0, "losses": []}
    if state_file.is_file():
        state = json.loads(state_file.read_text())
        if {key: state[key] for key in what} != what:
            raise SystemExit(f"{run} holds a run of other settings or another text: remove it, or name another --run")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(run / "tokenizer")
    else:
        tokenizer = make_tokenizer(text.train, config.vocabulary)
        tokenizer.save_pretrained(run / "tokenizer")
        log_file.unlink(missing_ok=True)
    batches, model = Batches(config, text, tokenizer), make_model(config)
    optimizers = make_optimizers(model, config)
    if state["step"]:
        _restore(model, optimizers, load_file(tensors))
    saved = time.monotonic()
    for step in range(state["step"], config.steps):
        for optimizer, full in zip(optimizers, (config.learning_rate, config.vector_rate), strict=True):
            optimizer.param_groups[0]["lr"] = full * rate(config, step)
        state["losses"].append(_update(model, optimizers, *batches(step)))
        state["step"] = step + 1
        last = step + 1 == config.steps
        now = time.monotonic()
        if (step + 1) % config.report_every == 0 or last:
            record = {
                "step": step + 1,
                "seconds": round(state["seconds"] + now - saved),
                "train_loss": round(float(np.mean(state["losses"])), 4),
                "text_loss": text_loss(model, batches.held_out, config.context),
                "induction": induction(model, batches.size),
            }
            state["losses"] = []  # those since the last report
            with log_file.open("a") as log:
                log.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)
        if now - saved > config.checkpoint_seconds or last:
            state["seconds"] += now - saved
            saved = now
            _keep(run, state, model, optimizers)
    # A run that was cut after a report wrote that one again.
    records = {record["step"]: record for record in map(json.loads, log_file.read_text().splitlines())}
    return model.eval(), tokenizer, [records[step] for step in sorted(records)]


def _update(
    model: Qwen3ForCausalLM, optimizers: Sequence[torch.optim.Optimizer], ids: torch.Tensor, weights: torch.Tensor
) -> float:
    """One step; the mean loss of what is learnt."""
    learnt = weights.flatten() > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[learnt])
    loss = F.cross_entropy(logits.float(), ids[:, 1:].flatten()[learnt])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _keep(run: Path, state: dict[str, Any], model: Qwen3ForCausalLM, optimizers: Sequence[Any]) -> None:
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{index}.{name}": value for name, value in moments.items()}
    save_file(tensors, run / "state.safetensors.tmp")
    (run / "state.safetensors.tmp").replace(run / "state.safetensors")
    write_json(run / "state.json", state)


def _restore(model: Qwen3ForCausalLM, optimizers: Sequence[Any], tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for number, optimizer in enumerate(optimizers):
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith(f"optimizer.{number}."):
                index, key = name.split(".")[2:]
                moments.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})


def export(
    out: Path, config: SmallConfig, text: Text, model: Qwen3ForCausalLM, tokenizer: Any, log: list[Any]
) -> dict[str, Any]:
    """Write the finished model as a folder that any reader of transformers models takes; what it can do, measured
    on the written file."""
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    target = load_target(out, device="cpu")
    batches = Batches(config, text, tokenizer)
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_bytes": (out / "model.safetensors").stat().st_size,
        "induction": induction(target.model, batches.size, rows=64),
        "text_loss": text_loss(target.model, batches.held_out, config.context),
        "text_loss_long": text_loss(target.model, batches.held_out, config.max_length),
        "exact_answers": exact_answers(target, TaskWriter(text.held_out)),
    }
    write_json(
        out / "training.json",
        {
            "config": asdict(config),
            "text": {
                "source": "Python standard library",
                "licence": "PSF-2.0",
                "files": text.files,
                "characters": len(text.train) + len(text.held_out),
                "sha256": text.sha256,
                "and": "the train part of the embedded prompts, the tasks of benchmarks/small_tasks.py, random tokens",
            },
            "result": result,
            "log": log,
            "provenance": provenance(seed=config.seed),
        },
    )
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED["small-qwen3"])
    parser.add_argument("--run", type=Path, default=cache_dir() / "train" / "small", help="state of the training")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of .py files")
    for field in fields(SmallConfig):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default)
    values = vars(parser.parse_args(argv))
    out, run, folder = (values.pop(name) for name in ("out", "run", "text"))
    try:
        config = SmallConfig(**values)
    except ValueError as error:
        parser.error(str(error))
    text = read_text(folder)
    print(json.dumps(export(out, config, text, *train(config, text, run)), indent=1))


if __name__ == "__main__":
    main()
