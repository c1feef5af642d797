"""The switch inside vLLM beside vLLM's own ways of drafting, in one run.

    python -m benchmarks.serving acceptance --suite question.jsonl --out runs/serving     tokens a step, K = 3, 5 and 8
    python -m benchmarks.serving throughput --suite question.jsonl --out runs/serving     tokens a second, of 1, 4, 16
    python -m benchmarks.serving overhead   --suite question.jsonl --out runs/serving     a gate that never copies

Engines run in processes of their own (`--vllm-python`: a Python that has vllm and switchsd). Columns: none; ngram and
suffix as vLLM has them; eagle3 with this project's head; switchsd, the same with the switch; match-4, the switch with
tau 0 and kappa 4, which is what engines without a probe do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from activations import packaged
from activations.chat_template import ChatTemplate
from decoding.peers.process import Batch, Peer
from decoding.peers.start import VLLM, vllm_command
from decoding.suite import SuitePrompt, load_suite
from decoding.summary import HEAVY, OVERALL, Row, ratio
from switchsd.artifacts import shipped

DEPTHS = (3, 5, 8)
CONCURRENCY = {1: 3, 4: 8, 16: 24}
"""Requests at a time, and prompts of a round."""
SWITCHED = {"switchsd": {}, "match-4": {"tau": 0.0, "kappa": 4}, "never": {"tau": 1.0}}
"""What these columns tell the switch beside its probe."""
HEAD = ("eagle3", *SWITCHED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("acceptance", "throughput", "overhead"))
    parser.add_argument("--suite", action="append", default=[], help="file of prompts; by default the embedded ones")
    parser.add_argument("--out", type=Path, required=True, help="folder; a run goes on from there")
    parser.add_argument("--limit", type=int, default=96, help="prompts of a suite, 0 for all")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="", help="folder of the EAGLE-3 head; by default the shipped one")
    parser.add_argument("--probe", default="smollm2/serving")
    parser.add_argument("--dtype", default="", help="by default float32 for acceptance, else bfloat16")
    parser.add_argument("--columns", default="", help="by default all that belong to the measurement")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", default=sys.executable)
    options = parser.parse_args()
    options.head = options.head or str(shipped("eagle", options.target))
    options.out.mkdir(parents=True, exist_ok=True)
    {"acceptance": acceptance, "throughput": throughput, "overhead": overhead}[options.what](options)


def settings(column: str, depth: int, options: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    speculative: dict[str, Any] | None = {"method": column, "num_speculative_tokens": depth}
    if column == "none":
        speculative = None
    elif column in HEAD:
        speculative = {"method": "eagle3", "model": options.head, "num_speculative_tokens": depth}
    model = str(packaged.folder(options.target)) if options.target in packaged.ALIASES else options.target
    return {
        "model": model, "dtype": options.dtype, "max_model_len": 4096, "max_num_seqs": max(CONCURRENCY),
        "enable_prefix_caching": False, "disable_log_stats": False, "speculative_config": speculative,
        # compiling changes the clock and not the text: where only steps are counted, engines start faster without
        "enforce_eager": options.what == "acceptance",
        "additional_config": {"switchsd": {"probe": options.probe, **SWITCHED[column]}} if column in SWITCHED else {},
    }  # fmt: skip


def engine(column: str, depth: int, options: Any) -> Peer:
    given = settings(column, depth, options)
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    log = options.out / f"{column}-{depth}.log"
    return Peer(column, vllm_command(options.vllm_python, given), given, VLLM | threads, log)


def load(options: Any) -> tuple[list[SuitePrompt], list[list[int]]]:
    """The prompts, and their token ids."""
    model = settings("none", 0, options)["model"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = ChatTemplate(tokenizer)
    suite = load_suite(options.suite, options.limit)
    texts = [template.render(prompt.messages) for prompt in suite]
    return suite, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


# -- tokens per step --------------------------------------------------------------------------------


def acceptance(options: Any) -> None:
    options.dtype = options.dtype or "float32"
    columns = (options.columns or "eagle3,ngram,suffix,match-4,switchsd").split(",")
    runs = [("none", 0), *((c, int(d)) for d in options.depths.split(",") for c in columns)]
    suite, prompts = load(options)
    file = options.out / "rows.jsonl"
    rows = [Row.from_dict(json.loads(line)) for line in file.read_text().splitlines()] if file.is_file() else []
    for column, depth in runs:
        name, key = f"{column}@{depth}", settings_hash(column, depth, options)
        if {r.key for r in rows if (r.mode, r.settings) == (name, key)} >= {p.key for p in suite}:
            continue
        peer = engine(column, depth, options)
        batch = peer.ask_all(prompts, options.tokens)
        peer.close()
        rows = [r for r in rows if r.mode != name]
        rows += [
            Row(
                p.key, p.group, p.copy_heavy, name, key, len(ids), a.tokens, a.decoded, a.steps,
                a.first_token_seconds, a.decode_seconds,
            )
            for p, ids, a in zip(suite, prompts, batch.answers, strict=True)
        ]  # fmt: skip
        with file.open("w") as out:
            out.writelines(json.dumps(row.to_dict()) + "\n" for row in rows)
        told = {k: v for k, v in batch.counters.items() if "spec_decode" in k or k.startswith("switchsd")}
        print(f"{name}: {sum(r.decoded for r in rows if r.mode == name)} tokens", told, flush=True)
    wanted = {p.key: i for i, p in enumerate(suite)}
    found = {
        f"{c}@{d}": sorted((r for r in rows if r.mode == f"{c}@{d}" and r.key in wanted), key=lambda r: wanted[r.key])
        for c, d in runs
    }
    report(found, [int(d) for d in options.depths.split(",")], columns, options.out / "acceptance")


def settings_hash(column: str, depth: int, options: Any) -> str:
    told = {**settings(column, depth, options), "tokens": options.tokens}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def report(found: dict[str, list[Row]], depths: Sequence[int], columns: Sequence[str], stem: Path) -> None:
    """Tokens per step by group, their ratio to eagle3's, and whose texts are those of the target alone."""
    plain = {r.key: r.tokens for r in found["none@0"]}
    groups = {r.group: [s.key for s in found["none@0"] if s.group == r.group] for r in found["none@0"]}
    groups[HEAVY] = [r.key for r in found["none@0"] if r.copy_heavy]
    groups["where nothing loops"] = [r.key for r in found["none@0"] if not r.looped]
    groups[OVERALL] = list(plain)
    table, lines = [], []
    for depth in depths:
        lines += ["", f"K = {depth}, tokens per step (accepted + 1), and x eagle3", ""]
        lines += [f"| group (prompts) | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
        for group, keys in groups.items():
            cells = []
            for column in columns:
                mine = [step_clock(r) for r in found[f"{column}@{depth}"] if r.key in keys]
                base = [step_clock(r) for r in found[f"eagle3@{depth}"] if r.key in keys]
                steps = sum(r.steps for r in mine)
                per_step, times = sum(r.decoded for r in mine) / max(steps, 1), ratio(mine, base)
                table.append(
                    {"K": depth, "group": group, "column": column, "prompts": len(keys), "steps": steps,
                     "tokens_per_step": per_step, "over_eagle3": times.to_dict()}
                )  # fmt: skip
                cells.append(f"{per_step:.3f}" if column == "eagle3" else f"{per_step:.3f}, {times:.3f}")
            lines.append(f"| {group} ({len(keys)}) | {' | '.join(cells)} |")
    same = {name: sum(r.tokens == plain[r.key] for r in mine) for name, mine in found.items()}
    lines += ["", f"Texts that are the target's own, of {len(plain)}: {same}"]
    save(stem, {"table": table, "same_texts": same, "prompts": len(plain)}, lines)


def step_clock(row: Row) -> Row:
    """Its speed is tokens per step."""
    return replace(row, decode_seconds=float(row.steps))


# -- the clock --------------------------------------------------------------------------------------


def throughput(options: Any) -> None:
    """Every engine alive, asked in turns; a round asks all the same prompts."""
    options.dtype = options.dtype or "bfloat16"
    columns = (options.columns or "none,ngram,suffix,eagle3,switchsd").split(",")
    depth = int(options.depths.split(",")[-1]) if options.depths != ",".join(map(str, DEPTHS)) else 5
    rounds = in_turns(columns, depth, CONCURRENCY, options)
    table = []
    lines = [f"K = {depth}, tokens per second, and x none", "", f"| requests at a time | {' | '.join(columns)} |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for concurrency in CONCURRENCY:
        cells = []
        for column in columns:
            mine, base = (as_rows(rounds[name, concurrency]) for name in (column, columns[0]))
            speed, times = sum(r.decoded for r in mine) / sum(r.decode_seconds for r in mine), ratio(mine, base)
            table.append(
                {"concurrency": concurrency, "column": column, "rounds": len(mine), "tokens_per_second": speed,
                 f"over_{columns[0]}": times.to_dict()}
            )  # fmt: skip
            cells.append(f"{speed:.1f}, {times:.2f}")
        lines.append(f"| {concurrency} | {' | '.join(cells)} |")
    save(options.out / "throughput", {"K": depth, "table": table}, lines)


def overhead(options: Any) -> None:
    """A step of the gate that never copies, over a step without it."""
    options.dtype = options.dtype or "bfloat16"
    depth = int(options.depths.split(",")[-1]) if options.depths != ",".join(map(str, DEPTHS)) else 5
    sizes = {1: 3, 16: 16}
    rounds = in_turns(["eagle3", "never"], depth, sizes, options)
    table, lines = [], [f"K = {depth}: a step with a gate that never copies, over a step of eagle3", ""]
    for concurrency in sizes:
        base, mine = (as_rows(rounds[name, concurrency], steps=True) for name in ("eagle3", "never"))
        times = ratio(base, mine)  # steps a second, the other way round: seconds a step
        table.append({"concurrency": concurrency, "rounds": len(mine), "step_over_eagle3": times.to_dict()})
        lines.append(f"- {concurrency} at a time: {times:.4f} ({len(mine)} rounds)")
    save(options.out / "overhead", {"K": depth, "table": table}, lines)


def in_turns(
    columns: Sequence[str], depth: int, sizes: dict[int, int], options: Any
) -> dict[tuple[str, int], list[Batch]]:
    _, prompts = load(options)
    warm = max(sizes)  # the first prompts
    order = random.Random(0).sample(range(warm, len(prompts)), len(prompts) - warm)
    if options.what == "throughput" and (needed := options.rounds * sum(sizes.values())) > len(order):
        # suffix decoding remembers whole answers: no prompt may come twice
        sys.exit(f"{options.rounds} rounds need {needed + warm} prompts, and there are {len(prompts)}: raise --limit")
    waiting = cycle(order)
    peers = {column: engine(column, depth, options) for column in columns}
    for column, peer in peers.items():  # a warm-up of each shape
        for concurrency in sizes:
            peer.ask_all(prompts[:concurrency], 8, concurrency=concurrency)
        print(f"{column} is ready", flush=True)
    rounds: dict[tuple[str, int], list[Batch]] = {}
    for number in range(options.rounds):
        for concurrency, size in sizes.items():
            chosen = [next(waiting) for _ in range(size)]
            turn = list(peers)[number % len(peers) :] + list(peers)[: number % len(peers)]
            for column in turn:
                batch = peers[column].ask_all([prompts[i] for i in chosen], options.tokens, concurrency=concurrency)
                rounds.setdefault((column, concurrency), []).append(batch)
        print(f"round {number + 1} of {options.rounds}", flush=True)
    for peer in peers.values():
        peer.close()
    return rounds


def as_rows(batches: Sequence[Batch], steps: bool = False) -> list[Row]:
    """A round as a row: its tokens, or its engine's steps, over its seconds."""
    return [
        Row(str(i), "", False, "", "", 0, [], b.forwards if steps else sum(len(a.tokens) for a in b.answers),
            b.forwards, 0.0, b.seconds)
        for i, b in enumerate(batches)
    ]  # fmt: skip


def save(stem: Path, result: dict[str, Any], lines: Sequence[str]) -> None:
    text = "\n".join(lines).strip() + "\n"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
