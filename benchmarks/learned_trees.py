"""Learning to Draft by exact replay: what the policies gain over fixed and priced trees, and what each part of their
training is worth.

python -m benchmarks.learned_trees log LOG --suite gsm8k.jsonl --suite humaneval.jsonl
python -m benchmarks.learned_trees train LOG --out FOLDER
python -m benchmarks.learned_trees ablations LOG --runs RUNS --out OUT
python -m benchmarks.learned_trees replay LOG --policy FOLDER --out OUT
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from activations.corpus import Prompt, load_corpus, read_prompts, spread
from activations.sites import eagle_sites
from activations.target import Target, load_target
from decoding.budgets import Budget, FixedBudget, PricedBudget
from decoding.costs import CostTable, get_costs
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.formats import load_head
from decoding.ltd.budget import LearnedBudget
from decoding.ltd.grid import Rate, grid, oracle, replay
from decoding.ltd.outcomes import Clock, Outcomes
from decoding.ltd.training import Ground, LTDConfig, make_log, train_on
from decoding.policies.policy import PolicyArtifact
from decoding.replay_log import read_log
from switchsd.artifacts import shipped

DEFAULT = FixedBudget(12, 4)
"""What the modes draft where nothing else is asked for, before it is priced."""
VARIANTS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "reward: ratio": {"reward": "ratio"},
    "reward: tokens": {"reward": "tokens"},
    "reward: negative time": {"reward": "time"},
    "rewards not centred": {"centred": False},
    "observation: ranked": {"observation": "ranked"},
    "observation: paper": {"observation": "paper"},
    "asked at each third level": {"every": 3},
}


def parts(name: str, head: Path | None) -> tuple[Target, EagleDrafter]:
    target = load_target(name)
    folder = head or shipped("eagle", name)
    return target, EagleDrafter(target, load_head(folder, target.vocab_size), sites=eagle_sites(target.blocks))


def table_of(given: argparse.Namespace) -> CostTable:
    if given.costs:
        return CostTable.load(given.costs)
    target, drafter = parts(given.target, given.head)
    return get_costs(target, [drafter])


def log(given: argparse.Namespace) -> None:
    target, drafter = parts(given.target, given.head)
    prompts: dict[str, list[Prompt]] = {}
    for split, count in (("train", given.train), ("validation", given.validation)):
        if count:
            prompts[split] = spread(load_corpus(split), count)
    for file in given.suite:
        read = read_prompts(file)
        prompts[file.stem] = spread(read, min(given.limit, len(read)))
    config = LTDConfig(max_new_tokens=given.max_new_tokens, depth=given.depth)
    for record in make_log(target, drafter, prompts, given.log, config):
        print(f"{record['texts']} of {record['of']} texts, {record['seconds']:.0f} s", flush=True)


def train(given: argparse.Namespace) -> None:
    target, drafter = parts(given.target, given.head)
    costs = CostTable.load(given.costs) if given.costs else get_costs(target, [drafter])
    texts, config = read_log(given.log, states=False), LTDConfig(seed=given.seed)
    for record in train_on(texts, costs, given.out, config, target.fingerprint.to_dict(), drafter.describe()):
        if "iteration" not in record or record["iteration"] % 10 == 0:
            print(record, flush=True)


# -- ablations ------------------------------------------------------------------------------------------


def ablations(given: argparse.Namespace) -> None:
    """Every variant is a run of its own, which goes on where it was interrupted."""
    texts, costs = read_log(given.log, states=False), table_of(given)
    rows: list[dict[str, Any]] = []
    base = LTDConfig(seed=given.seed)
    for name, changed in VARIANTS.items():
        if given.only and name not in given.only:
            continue
        folder = given.runs / name.replace(": ", "-").replace(" ", "-")
        record = _run(folder, texts, costs, replace(base, **changed))
        if not rows:
            rows += _references(Ground.of(texts, costs, "eagle", base))
        named = {row["name"]: row for row in record["stages"]}
        if name == "as shipped":
            rows += [{**named[part], "name": part} for part in ("size only", "depth only", "independent")]
        rows.append({**record["stages"][-1], "name": name if name != "as shipped" else "co-trained"})
        print(markdown(rows), flush=True)
    if given.out:
        given.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(markdown(rows))


def _run(folder: Path, texts: Any, costs: CostTable, config: LTDConfig) -> dict[str, Any]:
    """The record of a finished run."""
    nobody = {"architecture": "none", "width": 0, "blocks": 0, "vocabulary": "", "revision": None}
    if not (folder / "policy.json").is_file():
        for record in train_on(texts, costs, folder, config, nobody, {"name": "eagle"}):
            if "iteration" not in record:
                print(folder.name, record, flush=True)
    return dict(json.loads((folder / "policy.json").read_text())["record"])


def _references(ground: Ground) -> Iterator[dict[str, Any]]:
    """Fixed and priced trees, and hindsight, on the reported texts."""
    outcomes, clock, fixed = ground.outcomes, ground.clock, ground.fixed
    sizes = list(range(1, max(ground.sizes) + 1))
    rates: dict[str, Rate] = {f"best fixed tree ({fixed.nodes} nodes, depth {fixed.depth})": fixed.rate}
    rates[f"{DEFAULT.nodes} nodes, depth {DEFAULT.depth}"] = replay(outcomes, clock, DEFAULT)
    rates["best in hindsight"] = oracle(outcomes, clock, sizes)
    for name, rate in rates.items():
        yield _row(name, rate.of(ground.reported), fixed.rate.of(ground.reported))


def _row(name: str, rate: Rate, base: Rate) -> dict[str, Any]:
    ratio, low, high = rate.over(base)
    return {
        "name": name, "reported": rate.per_second, "over_fixed": ratio, "interval": [low, high],
        "tokens_per_step": rate.per_step,
    }  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| | tokens/s | × best fixed | tokens per step |", "| --- | --- | --- | --- |"]
    for row in rows:
        low, high = row["interval"]
        ratio = f"{row['over_fixed']:.3f} [{low:.3f}, {high:.3f}]"
        lines.append(f"| {row['name']} | {row['reported']:.1f} | {ratio} | {row['tokens_per_step']:.2f} |")
    return "\n".join(lines) + "\n"


# -- a policy on another log ----------------------------------------------------------------------------


def replayed(given: argparse.Namespace) -> None:
    """A policy beside the best fixed tree of its training, the priced tree, and this log's own best fixed tree."""
    artifact = PolicyArtifact.load(given.policy)
    budget, costs = LearnedBudget.of(artifact), table_of(given)
    outcomes = Outcomes.of(read_log(given.log, states=False), budget.depth)
    clock = Clock.of(costs, "eagle", outcomes, artifact.record["costs"]["overhead"])
    fixed = FixedBudget(artifact.settings["fixed_nodes"], artifact.settings["fixed_depth"])
    budgets: dict[str, Budget] = {
        f"fixed, {fixed.nodes} nodes, depth {fixed.depth}": fixed,
        f"fixed, {DEFAULT.nodes} nodes, depth {DEFAULT.depth}": DEFAULT,
        "priced": PricedBudget.of(costs, "eagle", DEFAULT.nodes, DEFAULT.depth),
        "learned": budget,
    }
    rates = {name: replay(outcomes, clock, b) for name, b in budgets.items()}
    own = max(grid(outcomes, clock, range(1, 33)), key=lambda f: f.rate.per_second)
    rates[f"best fixed here: {own.nodes} nodes, depth {own.depth}"] = own.rate
    rates["best in hindsight"] = oracle(outcomes, clock, list(range(1, budget.nodes + 1)))
    base = next(iter(rates.values()))
    rows = [_row(name, rate, base) for name, rate in rates.items()]
    print(markdown(rows))
    sources = sorted(set(outcomes.sources))
    table: dict[str, dict[str, list[float]]] = {}
    for source in sources:
        mine = [i for i, s in enumerate(outcomes.sources) if s == source]
        table[source] = {name: list(rate.of(mine).over(base.of(mine))) for name, rate in rates.items()}
        found = ", ".join(f"{name} {ratio:.3f}" for name, (ratio, _, _) in table[source].items())
        print(f"{source} ({len(mine)}): {found}")
    if given.out:
        given.out.with_suffix(".json").write_text(json.dumps({"all": rows, "sources": table}, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(markdown(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", type=Path, help="EAGLE head; the shipped one by default")
    parser.add_argument("--costs", type=Path, help="this computer's cost table; measured or cached by default")
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("log", help="log whole trees over the target's own answers; resumes")
    made.add_argument("log", type=Path)
    made.add_argument("--suite", type=Path, action="append", default=[], help="more prompts")
    made.add_argument("--limit", type=int, default=80, help="prompts of each suite")
    made.add_argument("--train", type=int, default=240)
    made.add_argument("--validation", type=int, default=120)
    made.add_argument("--max-new-tokens", type=int, default=128)
    made.add_argument("--depth", type=int, default=6)
    made.set_defaults(run=log)
    fit = commands.add_parser("train", help="train the policies on a log; resumes")
    fit.add_argument("log", type=Path)
    fit.add_argument("--out", type=Path, required=True, help="folder of the run, and of the policies in the end")
    fit.add_argument("--seed", type=int, default=0)
    fit.set_defaults(run=train)
    run = commands.add_parser("ablations", help="train every variant on a log, and replay it on texts kept for that")
    run.add_argument("log", type=Path)
    run.add_argument("--runs", type=Path, required=True, help="folder of the runs; they resume")
    run.add_argument("--only", action="append", choices=list(VARIANTS), help="some of the variants")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--out", type=Path, help="write the table here, as .md and .json")
    run.set_defaults(run=ablations)
    one = commands.add_parser("replay", help="a trained policy on another log, by source")
    one.add_argument("log", type=Path)
    one.add_argument("--policy", type=Path, required=True)
    one.add_argument("--out", type=Path, help="write the table here, as .md and .json")
    one.set_defaults(run=replayed)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
