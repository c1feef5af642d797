"""Which neural tree pays: replays the head's trees over the target's own answers to the validation prompts.

At every position of every answer the head grows one large tree; any smaller tree is a part of it. A policy is then
walked over the answers: each step accepts what its part of the tree holds of the answer, and costs what the cost
table says. Prints tokens per step and simulated speed over `ar` for fixed trees of all sizes and for priced ones.

    python benchmarks/choose_tree.py [--head FOLDER] [--limit 40] [--suite gsm8k.jsonl]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from activations.cache import KVCache
from activations.corpus import load_corpus, read_prompts, spread
from activations.generation import Request as Answer
from activations.generation import complete
from activations.sites import eagle_sites
from activations.target import Target, load_target
from decoding.budgets import Budget, FixedBudget, Growth, PricedBudget
from decoding.costs import CostTable, get_costs
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.formats import load_head
from decoding.request import Request
from switchsd.artifacts import shipped

DEPTH = 5


@dataclass
class Grown:
    """The whole tree of one position."""

    scores: torch.Tensor  # [n] cumulative log-probabilities
    depths: torch.Tensor  # [n], 1 = first drafted
    followed: torch.Tensor  # [n] the target wrote the whole path to the node
    length: int  # tokens of the text there, the pending one included


def grow(drafter: EagleDrafter, target: Target, prompt: list[int], answer: list[int]) -> list[Grown]:
    """The trees of all positions of an answer at which a step may begin."""
    ids = [*prompt, *answer]
    with target.read(drafter.sites) as reader:
        target.hidden(torch.tensor([ids[:-1]], device=target.device), KVCache(1, capacity=len(ids)))
        features = torch.cat([reader.states[s][0] for s in target.sites(drafter.sites)], dim=-1)
    request = Request(0, prompt, max_new_tokens=len(answer) + DEPTH + 1, tokens=ids[: len(prompt) + 1])
    drafter.start(request, features[: len(prompt)])
    out = []
    for end in range(len(prompt) + 1, len(ids)):
        [tree] = drafter.propose([request], [FixedBudget(10**6, DEPTH)])
        assert tree is not None and tree.candidates is not None
        tokens, scores, parents = (x.tolist() for x in tree.candidates)
        depths, followed = [0] * len(tokens), [False] * len(tokens)
        for i, parent in enumerate(parents):
            depths[i] = 1 + (depths[parent] if parent >= 0 else 0)
            place = end + depths[i] - 1
            on_path = parent < 0 or followed[parent]
            followed[i] = on_path and place < len(ids) and tokens[i] == ids[place]
        out.append(Grown(torch.tensor(scores), torch.tensor(depths), torch.tensor(followed), end))
        request.tokens.append(ids[end])
        drafter.observe(request, features[end - 1 : end])
    drafter.close(request)
    return out


def step(grown: Grown, budget: Budget, top_k: int) -> tuple[int, int, int]:
    """Accepted tokens, nodes and levels of the tree that a budget makes of a whole one."""
    depth = 1
    while depth < DEPTH:
        level = grown.scores[grown.depths == depth]
        if not budget.go_on(Growth(level, depth, top_k, grown.length)):
            break
        depth += 1
    inside = grown.depths <= depth
    scores = grown.scores[inside]
    kept = scores.sort(descending=True, stable=True).indices[: budget.size(Growth(scores, depth, top_k, grown.length))]
    return int(grown.followed[inside][kept].sum()), len(kept), depth


def replay(
    answers: list[tuple[int, list[Grown]]], budget: Budget, costs: CostTable, top_k: int
) -> tuple[float, float, float]:
    """Tokens per step, nodes per step, and speed over `ar`."""
    tokens = steps = nodes = 0
    time = alone = 0.0
    for prompt, trees in answers:
        at = 0
        while at < len(trees):
            accepted, size, levels = step(trees[at], budget, top_k)
            context = prompt + at
            time += costs.draft("eagle", levels) + costs.verify(1 + size, context)
            gained = min(accepted + 1, len(trees) - at)
            alone += gained * costs.verify(1, context)
            tokens, steps, nodes, at = tokens + gained, steps + 1, nodes + size, at + gained
    return tokens / steps, nodes / steps, alone / time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, default=shipped("eagle", "smollm2"))
    parser.add_argument("--suite", type=Path, action="append", default=[], help="more prompts, never reported ones")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each source, evenly spread")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    given = parser.parse_args()
    target = load_target("smollm2")
    drafter = EagleDrafter(target, load_head(given.head, target.vocab_size), sites=eagle_sites(target.blocks))
    costs = get_costs(target, [drafter])
    prompts = []
    for source in (load_corpus("validation"), *map(read_prompts, given.suite)):
        prompts += spread(source, min(given.limit, len(source)))
    requests = (Answer(i, target.encode_messages(p.messages), given.max_new_tokens) for i, p in enumerate(prompts))
    answers = []
    for done in complete(target, requests, rows=24):
        answers.append((len(done.request.prompt), grow(drafter, target, done.request.prompt, done.tokens)))
        print(f"\r{len(answers)} of {len(prompts)} answers", end="", flush=True)
    print()
    table = []
    budgets: list[Budget] = [
        FixedBudget(n, d) for d in range(1, DEPTH + 1) for n in (1, 2, 3, 4, 5, 7, 9, 11, 15) if n >= d
    ]
    budgets += [PricedBudget.of(costs, "eagle", n, d) for d in range(2, DEPTH + 1) for n in (5, 7, 9, 11, 15)]
    for budget in budgets:
        per_step, nodes, speed = replay(answers, budget, costs, drafter.top_k)
        table.append((speed, per_step, nodes, budget))
    table.sort(key=lambda line: -line[0])
    for speed, per_step, nodes, budget in table:
        print(f"{speed:.3f} x ar  {per_step:.2f} tokens per step  {nodes:4.1f} nodes  {budget}")
    if given.out:
        lines = [{"over_ar": s, "tokens_per_step": t, "nodes": n, "budget": repr(b)} for s, t, n, b in table]
        given.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
