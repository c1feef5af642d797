"""Replays gates over a log of both drafters: which gate gives the most tokens per millisecond, and what could be had.

switchsd capture STORE --kappa 1 --sites ...           (texts of the embedded prompts)
python -m benchmarks.replay log LOG --store STORE --suite gsm8k.jsonl --suite humaneval.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from activations.corpus import load_corpus, read_prompts, spread
from activations.generation import Request as Answer
from activations.generation import complete
from activations.matching.match import MatchConfig
from activations.sites import eagle_sites
from activations.store import CaptureStore
from activations.target import Target, load_target
from decoding.budgets import FixedBudget, PricedBudget
from decoding.costs import CostTable, get_costs
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.formats import load_head
from decoding.gates import COPY, Always, BanditGate, Choice, MatchLengthGate, Never, ProbeGate
from decoding.length_gate import LengthGate
from decoding.lengths import stored_texts
from decoding.modes import WIDEST_COPY, WIDEST_TREE
from decoding.replay import EAGLE, Walk, options, oracle, replay, speedup
from decoding.replay_log import LoggedText, log_text, read_log
from probes.artifact import Probe
from probes.length_head import LengthHead
from switchsd.artifacts import shipped

SITES = (
    "resid_mid.12", "resid_mid.16", "resid_mid.18", "resid_mid.20", "resid_mid.22", "resid_mid.24", "resid_mid.27",
    "resid_post.14", "resid_post.19", "resid_post.24", "resid_post.26", "resid_post.29",
)  # fmt: skip
AHEAD = 24
"""Tokens written beyond the logged ones, so that it is known how far drafts are followed."""


Text = tuple[str, list[int], int, bool]
"""Key, ids, prompt length, and whether it stopped."""


def embedded_texts(store: CaptureStore, target: Target, split: str, count: int) -> Iterator[Text]:
    """Evenly spread texts of a split of a store of the embedded prompts."""
    texts = [t for t in stored_texts(store, load_corpus(), target.encode_messages) if t.split == split]
    for i in np.linspace(0, len(texts) - 1, min(count, len(texts))).round().astype(int).tolist():
        yield f"{split}-{i:04}", texts[i].ids, texts[i].prompt, texts[i].stopped


def written_texts(target: Target, file: Path, count: int, limit: int, rows: int) -> Iterator[Text]:
    prompts = read_prompts(file)
    prompts = spread(prompts, min(count, len(prompts)))
    requests = (Answer(i, target.encode_messages(p.messages), limit + AHEAD) for i, p in enumerate(prompts))
    for done in complete(target, requests, rows=rows):
        prompt = done.request.prompt
        yield f"{file.stem}-{done.request.number:04}", [*prompt, *done.tokens], len(prompt), done.stopped


def log(given: argparse.Namespace) -> None:
    target = load_target(given.target)
    head = given.head or shipped("eagle", given.target)
    drafter = EagleDrafter(target, load_head(head, target.vocab_size), sites=eagle_sites(target.blocks))
    store = CaptureStore.open(given.store)
    counts = (("validation", given.validation), ("train", given.train))
    sources = {split: embedded_texts(store, target, split, count) for split, count in counts}
    sources |= {f.stem: written_texts(target, f, given.limit, given.max_new_tokens, 16) for f in given.suite}
    given.log.mkdir(parents=True, exist_ok=True)
    for source, texts in sources.items():
        if source not in ("train", "validation") and len(list(given.log.glob(f"{source}-*"))) >= given.limit:
            continue
        for key, ids, prompt, stopped in texts:
            file = given.log / f"{key}.safetensors"
            if file.is_file() or len(ids) - prompt < 3:
                continue
            log_text(
                target, drafter, ids, prompt, key=key, source=source, stopped=stopped,
                limit=given.max_new_tokens, depth=given.depth, sites=SITES,
            ).save(file)  # fmt: skip
            print(key, flush=True)


MATCH = MatchConfig(kappa=1)
LENGTHS = (1, 2, 3, 4, 5, 8)
NODES = (8, 12, 20, 31)
FASTER = CostTable(
    {}, [1, 8, 16, 32, 64], [256], [[32.0, 38.0, 44.0, 57.0, 83.0]], {EAGLE: [2.0 * i for i in range(1, 9)]}, 0.0, 0.0
)
GPU = CostTable({}, [1, 64], [256], [[20.0, 20.0]], {EAGLE: [20 / 9 * i for i in range(1, 9)]}, 0.0, 0.0)


def gates(given: argparse.Namespace) -> None:
    texts = [t for t in read_log(given.log) if t.source != "train"]
    if given.source:
        texts = [t for t in texts if t.source in given.source.split(",")]
    heads = {folder.name: LengthHead.from_pretrained(folder) for folder in given.head}
    probe = Probe.from_pretrained(given.probe)
    mine = CostTable.load(given.costs) if given.costs else get_costs(load_target(given.target))
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, costs in {"here": mine, "faster": FASTER, "gpu": GPU}.items():
        table[name] = _study(texts, costs, heads, probe)
        print(f"\n{name}: {len(texts)} texts, {sum(t.steps for t in texts)} tokens")
        print(f"{'':26}  x ar   x eagle  x match (95 %)           steady  share   share*  t/step copy  both  empty")
        for gate, row in table[name].items():
            low, high = row["low"], row["high"]
            print(
                f"{gate:26} {row['ar']:6.3f} {row['eagle']:7.3f}  {row['match']:.4f} [{low:.4f}, {high:.4f}] "
                f"{row['steady']:7.4f} {row['share']:6.2f} {row['share_all']:7.2f} {row['tokens']:7.2f} "
                f"{row['copies']:5.2f} {row['both']:5.2f} {row['empty']:6.2f}",
                flush=True,
            )
    if given.out:
        given.out.write_text(json.dumps(table, indent=1) + "\n")


def _study(
    texts: list[LoggedText], costs: CostTable, heads: dict[str, LengthHead], probe: Probe
) -> dict[str, dict[str, float]]:
    """Every gate on one cost table: rates over plain decoding, the head at every step, and the best match gate."""
    priced = Choice(EAGLE, PricedBudget.of(costs, EAGLE, *WIDEST_TREE))
    fixed = Choice(EAGLE, FixedBudget(7, 3))
    found: dict[str, Walk] = {
        "never": replay(texts, Never, costs, MATCH),
        "always, 7 nodes": replay(texts, lambda: Always(fixed), costs, MATCH),
        "always, priced": replay(texts, lambda: Always(priced), costs, MATCH),
    }
    tuned: dict[str, Walk] = {}
    for length, nodes in itertools.product(LENGTHS, NODES):
        copy = Choice(COPY, FixedBudget(nodes, 20))
        tuned[f"match >= {length}, {nodes} nodes"] = replay(
            texts, partial(MatchLengthGate, copy, priced, length), costs, MATCH
        )
    best = max(tuned, key=lambda k: tuned[k].rate)
    nodes = int(best.split()[-2])
    copy = Choice(COPY, FixedBudget(nodes, 20))
    eagle = max(("always, 7 nodes", "always, priced"), key=lambda k: found[k].rate)
    for name in dict.fromkeys((f"match >= 5, {nodes} nodes", f"match >= 1, {nodes} nodes", best)):
        found[name] = tuned[name]
    tau = probe.config.threshold
    found["probe threshold"] = replay(texts, lambda: ProbeGate(copy, priced, tau), costs, MATCH, probe=probe)
    found["bandit"] = replay(texts, lambda: BanditGate(copy, priced), costs, MATCH)
    wide = Choice(COPY, FixedBudget(WIDEST_COPY, 20))
    for name, head in heads.items():
        found[f"cost, {name}"] = replay(texts, partial(LengthGate, costs, head, wide, priced), costs, MATCH, head)
    one = [options(t, MATCH, [copy.budget], [priced.budget]) for t in texts]
    sizes = [FixedBudget(n, n) for n in (1, 2, 3, 5, 7, 11, 15, 20)]
    trees = [priced.budget, *(FixedBudget(n, d) for n, d in ((1, 1), (2, 2), (4, 2), (7, 3), (15, 4)))]
    many = [options(t, MATCH, sizes, trees) for t in texts]
    found["step oracle"] = oracle(texts, one, costs)
    found["path oracle"] = oracle(texts, one, costs, path=True)
    found["step oracle, all sizes"] = oracle(texts, many, costs)
    found["path oracle, all sizes"] = oracle(texts, many, costs, path=True)
    base = found[best]
    table = {}
    for name, walked in found.items():
        ratio = speedup(walked, base)
        gain = walked.rate - base.rate
        table[name + (" (best)" if name == best else "")] = {
            "ar": walked.rate / found["never"].rate, "eagle": walked.rate / found[eagle].rate,
            "match": ratio.estimate, "low": ratio.lower, "high": ratio.upper, "steady": walked.steady / base.steady,
            "share": gain / (found["step oracle"].rate - base.rate),
            "share_all": gain / (found["step oracle, all sizes"].rate - base.rate),
            "tokens": sum(walked.tokens) / walked.steps, "copies": walked.copies / walked.steps,
            "both": walked.merged / walked.steps, "empty": walked.empty / walked.steps, "wasted_ms": walked.wasted,
        }  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("log", help="log both drafters over the target's own texts; resumes")
    made.add_argument("log", type=Path)
    made.add_argument("--store", type=Path, required=True, help="capture store of the embedded prompts")
    made.add_argument("--suite", type=Path, action="append", default=[], help="more prompts, never reported ones")
    made.add_argument("--limit", type=int, default=30, help="prompts of each suite")
    made.add_argument("--train", type=int, default=100)
    made.add_argument("--validation", type=int, default=60)
    made.add_argument("--max-new-tokens", type=int, default=96)
    made.add_argument("--depth", type=int, default=4)
    made.add_argument("--target", default="smollm2")
    made.add_argument("--head", type=Path)
    made.set_defaults(run=log)
    shown = commands.add_parser("gates", help="replay gates over a log")
    shown.add_argument("log", type=Path)
    shown.add_argument("--head", type=Path, action="append", default=[], help="length heads, shown by folder name")
    shown.add_argument("--probe", default="smollm2/best")
    shown.add_argument("--costs", type=Path, help="this computer's cost table; measured or cached by default")
    shown.add_argument("--source", default="", help="comma-separated sources of the log; all but train by default")
    shown.add_argument("--target", default="smollm2")
    shown.add_argument("--out", type=Path, help="also write the tables as JSON")
    shown.set_defaults(run=gates)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
