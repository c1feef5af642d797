"""Everything that a GPU can show, in one run of under 8 minutes that needs nothing downloaded.

    python -m benchmarks.gpu_check --out gpu.json                  # on a GPU
    python -m benchmarks.gpu_check --device cpu --tiny --out x.json   # the same path with a tiny shape, no claim
    python -m benchmarks.gpu_check --record smollm2                # make the acceptances that are replayed

Imports torch, triton, transformers, safetensors and this project; `imported` in the result lists what came with them.

- matcher: the kernels' results against the index on the host, and their time at 1k to 128k tokens and batch 1 to 64
  beside an n-gram matcher written with torch's unfold (`benchmarks.matcher`).
- steps: every mode on a Llama of the shape of an 8B one with random weights. Its text means nothing, so what each
  step drafts and how much of it is kept is replayed from `acceptance.json`, recorded on a real target: the gate, the
  EAGLE head, the probe, the forward and the choice of tokens run as they would; only the accepted path is imposed.
- peak memory of each part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from activations.target import Target
    from decoding.costs import CostTable
    from decoding.modes import Plan

ACCEPTANCE = Path(__file__).with_name("acceptance.json")
SHAPES: dict[str, dict[str, int]] = {
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
    },
}  # fmt: skip
SECONDS = 440.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape: tests the code, measures nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="parts that would begin later are skipped")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--record", metavar="TARGET", help="record acceptances of a target's own drafters, and end")
    chosen = parser.parse_args()
    if chosen.record:
        record(chosen.record)
        return 0
    before = set(sys.modules)
    import torch

    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here: use --device cpu --tiny to run the code with a tiny shape", file=sys.stderr)
        return 2
    device = torch.device(chosen.device)
    found: dict[str, Any] = {"device": str(device), "tiny": chosen.tiny, "torch": torch.__version__, "skipped": []}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    began = perf_counter()
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("matcher", lambda: matcher(device, chosen.tiny)),
        ("steps", lambda: steps(device, "tiny" if chosen.tiny else "8b", began + chosen.seconds, found["skipped"])),
    ]
    for name, part in parts:
        if perf_counter() - began > chosen.seconds:
            found["skipped"].append(f"{name}: out of time")
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        at = perf_counter()
        try:
            found[name] = part()
        except Exception:  # the other parts are still worth having
            found[name] = {"error": traceback.format_exc()}
        found[f"{name}_seconds"] = round(perf_counter() - at, 1)
        found[f"{name}_peak_mib"] = peak_mib(device)
        save(found, chosen.out)
    if device.type != "cuda":
        found["skipped"].append("matcher times and CUDA kernels: they need a GPU")
    loaded = {m.partition(".")[0] for m in set(sys.modules) - before}
    found["imported"] = sorted(m for m in loaded - sys.stdlib_module_names if not m.startswith("_"))
    save(found, chosen.out)
    for line in found["skipped"]:
        print(f"skipped: {line}", file=sys.stderr)
    print(f"{chosen.out}: {perf_counter() - began:.0f} s")
    wrong = [n for n, _ in parts if isinstance(found.get(n), dict) and "error" in found[n]]
    wrong += ["matcher"] if any(not row["right"] for row in found["matcher"] if isinstance(row, dict)) else []
    for name in wrong:
        print(f"{name} went wrong: see {chosen.out}", file=sys.stderr)
    return 1 if wrong else 0


def save(found: dict[str, Any], out: Path) -> None:
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    scratch.write_text(json.dumps(found, indent=1))
    scratch.replace(out)


def peak_mib(device: Any) -> int:
    """Of the device's memory; on a CPU, of the whole process so far."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated() / 2**20)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


# -- the matcher ---------------------------------------------------------------------------------------


def matcher(device: Any, tiny: bool) -> list[dict[str, Any]]:
    """Rows with `right`: whether the device's matches are those of the index on the host, on contexts of odd lengths;
    on a GPU, `benchmarks.matcher`'s rows with microseconds too."""
    import torch

    from activations.matching import DeviceMatcher, MatchConfig, SuffixIndex

    rows = []
    draw = torch.Generator().manual_seed(0)
    for kappa, size in ((1, 7), (2, 129), (5, 1023 if tiny else 20_001)):
        config = MatchConfig(kappa=kappa)
        texts = [torch.randint(3, (length,), generator=draw) for length in (size, size // 2 + 1, 1)]
        device_matcher = DeviceMatcher(len(texts), size, config, device)
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True).to(device)
        device_matcher.append(padded, torch.tensor([len(t) for t in texts], device=device))
        found = device_matcher.find()
        expected = []
        for text in texts:
            index = SuffixIndex(config, text.tolist())
            expected.append(index.candidates(index.find()))
        rows.append({"kappa": kappa, "tokens": size, "right": found.candidates() == expected})
    if device.type == "cuda":
        from benchmarks.matcher import gpu_rows

        rows += gpu_rows()
    return rows


# -- steps ---------------------------------------------------------------------------------------------


def steps(device: Any, shape: str, deadline: float, skipped: list[str]) -> dict[str, Any]:
    """Milliseconds of a step and of what it is made of, for each mode and batch."""
    from decoding.costs import measure

    tiny = shape == "tiny"
    began = perf_counter()
    target = random_target(device, SHAPES[shape])
    head, probe = random_eagle(target), RandomProbe(target)
    loaded = perf_counter() - began
    costs = measure(target, [head], probe, budget_seconds=1.0 if tiny else 30.0)
    acceptance = json.loads(ACCEPTANCE.read_text())
    rows = []
    for batch in (1, 2) if tiny else (1, 8):
        for mode, recorded in {"ar": [[]], **acceptance["modes"]}.items():
            if perf_counter() > deadline:
                skipped.append(f"steps of {mode} at batch {batch}: out of time")
                continue
            rows.append(run_mode(target, head, probe, costs, mode, recorded, batch, 12 if tiny else 64))
    return {
        "shape": SHAPES[shape],
        "dtype": str(target.dtype).removeprefix("torch."),
        "load_seconds": round(loaded, 1),
        "replayed": acceptance["made"],
        "costs": {"widths": costs.widths, "contexts": costs.contexts, "verify_ms": costs.verify_ms,
                  "draft_ms": costs.draft_ms, "probe_ms": costs.probe_ms, "match_ms": costs.match_ms},
        "modes": rows,
    }  # fmt: skip


def run_mode(
    target: Target,
    head: Any,
    probe: Any,
    costs: CostTable,
    mode: str,
    recorded: list[list[Any]],
    batch: int,
    count: int,
) -> dict[str, Any]:
    """Medians over `count` steps of `batch` requests, after a warm-up of as many prompts."""
    import torch

    from decoding.engine import Engine
    from decoding.request import Request
    from decoding.trace import Trace

    context = min(512, target.max_length // 4)
    draw = torch.Generator().manual_seed(1)
    times: list[float] = []
    trace = Trace()
    for warm in (True, False):
        trace, times = Trace(), []
        engine = Engine(target, replayed_plan(head, probe, recorded), batch, trace, mode)
        try:
            for number in range(batch):
                ids = torch.randint(target.vocab_size, (context,), generator=draw).tolist()
                engine.admit(Request(number, ids, max_new_tokens=target.max_length - context - 32))
            for _ in range(4 if warm else count):
                synchronize(target)
                began = perf_counter()
                engine.verify(engine.draft())
                synchronize(target)
                times.append((perf_counter() - began) * 1e3)
        finally:
            engine.close()
    records = list(trace)
    model = [costs.verify(1 + max(len(r.tokens) for r in step), context) for step in chunks(records, batch)]
    draft = [max(r.draft_ms for r in step) for step in chunks(records, batch)]
    medians = {"step_ms": times, "draft_ms": draft}
    if batch == 1:  # the cost table knows forwards of one request
        rest = [t - m - d for t, m, d in zip(times, model, draft, strict=True)]
        medians |= {"forward_alone_ms": model, "rest_ms": rest}
    return {
        "mode": mode,
        "batch": batch,
        "steps": len(times),
        "tokens_per_step": round(sum(len(r.accepted) + 1 for r in records) / len(records), 3),
        **{name: round(statistics.median(values), 3) for name, values in medians.items()},
        "peak_mib": peak_mib(target.device),
    }


def chunks(records: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (records[i : i + size] for i in range(0, len(records), size))


def synchronize(target: Target) -> None:
    import torch

    if target.device.type == "cuda":
        torch.cuda.synchronize()


class NoTokenizer:
    """A vocabulary without words: the replay has no text."""

    eos_token_id = None
    chat_template = None

    def get_vocab(self) -> dict[str, int]:
        return {}


def random_target(device: Any, shape: dict[str, int]) -> Target:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from activations import attention
    from activations.target import Target

    config = LlamaConfig(**shape, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.manual_seed(0)
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.set_attn_implementation(attention.NAME)
    tokenizer: Any = NoTokenizer()
    target = Target(model, tokenizer, f"random-llama-{shape['hidden_size']}", None)
    target.speed_up()
    return target


def random_eagle(target: Target) -> Any:
    """An EAGLE-3 head of the target's shape, with random weights and a draft vocabulary of a quarter."""
    import torch

    from decoding.eagle.drafter import EagleDrafter
    from decoding.eagle.head import EagleHead, HeadConfig

    c = target.config
    size = target.vocab_size // 4
    config = HeadConfig(
        hidden_size=target.width, intermediate_size=c.intermediate_size, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, vocab_size=target.vocab_size, draft_vocab_size=size,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device(target.device):
        head = EagleHead(config)
        head.set_vocabulary(torch.arange(0, 4 * size, 4))
    return EagleDrafter(target, head.eval().requires_grad_(False))


class RandomProbe:
    """A linear probe in the middle of the target."""

    def __init__(self, target: Target) -> None:
        import torch

        self._weight = torch.randn(target.width, device=target.device)
        self.config: Any = _ProbeConfig((f"resid_mid.{target.blocks // 2}",))

    def score(self, state: Any) -> Any:
        return (state.float() @ self._weight).sigmoid()


class _ProbeConfig:
    threshold, kappa = 0.5, 5

    def __init__(self, sites: tuple[str, ...]) -> None:
        self.sites = sites

    def to_dict(self) -> dict[str, Any]:
        return {"sites": list(self.sites)}


def replayed_plan(head: Any, probe: Any, recorded: list[list[Any]]) -> Plan:
    """A plan whose gate says what the recorded steps say, and whose verifier keeps as much as they kept.

    A recorded step is [[drafter, nodes, depth] ..., kept].
    """
    from decoding.budgets import FixedBudget
    from decoding.drafters import CopyDrafter
    from decoding.gates import Decision
    from decoding.modes import Plan
    from decoding.tree import DraftTree
    from decoding.verifier import Verdict, Verifier

    recorded_steps = cycle([step for request in recorded for step in request] or [[0]])
    kept: list[int] = []  # of the steps under way, in the order of their requests

    class Gate:
        def choose(self, situation: Any) -> Decision:
            *drafts, accepted = next(recorded_steps)
            kept.append(accepted)
            return Decision(tuple((name, FixedBudget(nodes, depth)) for name, nodes, depth in drafts), "replayed")

        def observe(self, record: Any) -> None: ...

    class Copy(CopyDrafter):
        """Looks for matches as ever, and proposes a trie of the recorded size whatever it finds."""

        def propose(self, requests: Any, budgets: Any) -> list[DraftTree | None]:
            super().propose(requests, budgets)
            trees: list[DraftTree | None] = []
            for budget in budgets:
                depth = min(budget.depth, budget.nodes)
                parents = [*range(-1, depth - 1), *[-1] * (budget.nodes - depth)]
                n = len(parents)
                trees.append(DraftTree(list(range(n)), parents, [self.name] * n, [0.0] * n))
            return trees

    class Accept(Verifier):
        def accept(self, trees: Any, logits: Any, requests: Any, intent: Any = None) -> list[Verdict]:
            verdicts = super().accept(trees, logits, requests, intent)
            if not kept:  # a prompt's end
                return verdicts
            wanted = [kept.pop(0) for _ in requests]
            return [Verdict(path(t, n), v.pending, v.intent) for t, n, v in zip(trees, wanted, verdicts, strict=True)]

    def path(tree: DraftTree, depth: int) -> list[int]:
        """The first path of that depth, or of the deepest there is."""
        if not len(tree):
            return []
        goal = min(depth, max(tree.depths))
        node = next((i for i, d in enumerate(tree.depths) if d == goal), None)
        return list(tree.ancestors[node]) if node is not None else []

    names = {name for request in recorded for step in request for name, *_ in step[:-1]}
    drafters = (*([Copy()] if "copy" in names else []), *([head] if "eagle" in names else []))
    return Plan(Gate(), drafters, probe if len(names) > 1 else None, verifier=Accept())


# -- recording -----------------------------------------------------------------------------------------


def record(name: str, prompts: int = 8, max_new_tokens: int = 48) -> None:
    """Write acceptance.json: what the modes draft and keep on embedded held-out prompts."""
    from activations.corpus import load_corpus, spread
    from switchsd import load

    decoder = load(name)
    chosen = spread(load_corpus("validation"), prompts)
    modes: dict[str, list[list[Any]]] = {}
    for mode in ("copy", "eagle", "switchsd"):
        modes[mode] = []
        for prompt in chosen:
            decoder.generate(list(prompt.messages), mode=mode, max_new_tokens=max_new_tokens)
            modes[mode].append([as_step(r) for r in decoder.trace])
    made = {"target": name, "prompts": prompts, "max_new_tokens": max_new_tokens, "dtype": str(decoder.target.dtype)}
    ACCEPTANCE.write_text(json.dumps({"made": made, "modes": modes}, separators=(",", ":")) + "\n")
    print(f"{ACCEPTANCE}: {sum(len(r) for m in modes.values() for r in m)} steps")


def as_step(record: Any) -> list[Any]:
    """[[drafter, nodes, depth] ..., kept] of a step."""
    depths: list[int] = []
    for parent in record.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    parts = []
    for drafter in dict.fromkeys(record.source):
        own = [d for d, s in zip(depths, record.source, strict=True) if s == drafter]
        parts.append([drafter, len(own), max(own)])
    return [*parts, len(record.accepted)]


if __name__ == "__main__":
    sys.exit(main())
