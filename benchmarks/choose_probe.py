"""Choose match length, label, site and threshold of the switch by what they do to decoding.

    switchsd capture runs/store --batch 64 --max-new-tokens 160
    python benchmarks/choose_probe.py runs/store --out runs/probes

The embedded prompts' texts are labelled again for each kappa: at every anchor with a suffix match the copy drafter's
own trie is built, so that the accepted length and the number of nodes are those that decoding would see. A probe is
trained for every label, and the validation texts are replayed: the gate copies or leaves the step to the neural
side, whose accepted length is a constant. Costs are milliseconds, linear in the width of the verifying forward, from
`switchsd profile`. The probe with the highest simulated speed at its best threshold is kept.

Printed as well: which share of the copy tokens that always-copy gets accepted the gate keeps, and which share of
always-copy's steps with accepted length 0 it avoids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from activations.corpus import load_corpus, prompts_hash
from activations.labels import LabelConfig, follow_rows
from activations.store import CaptureStore
from decoding.budgets import FixedBudget
from decoding.drafters import CopyDrafter
from decoding.request import Request
from probes.reading import states_at
from probes.train import TrainConfig, train

LABELS = [("span_0", 1), ("span_2", 1), ("follow", 1), ("follow", 2), ("follow", 3)]
Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Costs:
    """A verifying forward of w tokens takes base + slope * (w - 1) milliseconds; a neural step drafts first."""

    base: float
    slope: float
    draft: float
    nodes: int
    accepted: float

    def copy(self, nodes: int) -> float:
        return self.base + self.slope * nodes

    @property
    def neural(self) -> float:
        return self.draft + self.base + self.slope * self.nodes


class Relabelled:
    """A capture store whose rows are labelled for another kappa; the states are the store's."""

    def __init__(
        self, store: CaptureStore, kappa: int, nodes: int, depth: int, encode: Callable[..., list[int]]
    ) -> None:
        labels = {**store.manifest["config"]["labels"], "kappa": kappa, "depth": depth}
        self.store = store
        self.manifest = {**store.manifest, "config": {**store.manifest["config"], "labels": labels}}
        self.sites = store.sites
        old, prompts = store.rows(), load_corpus()
        if store.manifest.get("prompts") != prompts_hash(prompts):  # documents are numbers of prompts
            raise SystemExit(
                f"{store.folder} was not captured from the whole embedded corpus as it is now: do so first"
            )
        config = LabelConfig(kappa=kappa, depth=depth)
        parts = []
        for number in np.unique(old["document"]):
            mine = old["document"] == number
            prompt = encode(prompts[number].messages)
            ids = prompt + old["pending"][mine].tolist()
            rows = follow_rows(ids, len(prompt), config, stopped=bool(old["span_0"][mine][-1] >= 0))
            rows["accepted"], rows["nodes"] = _as_decoded(ids, len(prompt), config, nodes)
            parts.append({**{k: v[mine] for k, v in old.items()}, **rows})
        self._rows = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}

    def rows(self) -> Rows:
        return self._rows

    def states(self, site: str) -> torch.Tensor:
        return self.store.states(site)


def _as_decoded(ids: list[int], prompt: int, config: LabelConfig, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """At each anchor: how many tokens of the copy drafter's trie the text follows, and the trie's nodes."""
    drafter = CopyDrafter(config.match)
    request = Request(0, ids[:prompt], max_new_tokens=10**6, tokens=ids[: prompt + 1])
    drafter.start(request, None)
    found = []
    for end in range(prompt + 1, len(ids) + 1):
        if end > prompt + 1:
            request.tokens.append(ids[end - 1])
            drafter.observe(request, None)
        [tree] = drafter.propose([request], [FixedBudget(nodes, config.depth)])
        node, accepted = -1, 0
        while tree is not None and end + accepted < len(ids):
            child = tree.children.get((node, ids[end + accepted]))
            if child is None:
                break
            node, accepted = child, accepted + 1
        found.append((accepted, 0 if tree is None else len(tree)))
    return np.array([a for a, _ in found], np.int32), np.array([n for _, n in found], np.int32)


def replay(rows: Rows, copies: np.ndarray, costs: Costs, neural: bool = True, seed: int = 0) -> dict[str, Any]:
    """Walk the texts; `copies` says where the gate copies if there is a match."""
    rng = np.random.default_rng(seed)
    tokens, milliseconds, visited = 0.0, 0.0, []
    starts = np.flatnonzero(np.diff(rows["document"], prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(rows["document"])], strict=True):
        at = start
        while at < end:
            if rows["nodes"][at] and copies[at]:
                visited.append(at)
                gained, spent = 1 + int(rows["accepted"][at]), costs.copy(int(rows["nodes"][at]))
            elif neural:
                whole = int(costs.accepted)
                gained, spent = 1 + whole + int(rng.random() < costs.accepted - whole), costs.neural
            else:
                gained, spent = 1, costs.base
            tokens += min(gained, end - at)
            milliseconds += spent
            at += gained
    return {"tokens_per_second": 1e3 * tokens / milliseconds, "visited": visited}


def speed(rows: Rows, copies: np.ndarray, costs: Costs) -> float:
    return float(np.mean([replay(rows, copies, costs, seed=seed)["tokens_per_second"] for seed in range(3)]))


def study(rows: Rows, score: np.ndarray, costs: Costs) -> dict[str, Any]:
    """The best threshold of a score, and the gate's numbers along the way."""
    always = np.array(replay(rows, np.ones(len(score), bool), costs, neural=False)["visited"])
    accepted = rows["accepted"][always]
    table = []
    for tau in np.round(np.arange(0.02, 0.99, 0.03), 2):
        copies = score >= tau
        allowed = copies[always]
        table.append(
            {
                "tau": float(tau),
                "tokens_per_second": speed(rows, copies, costs),
                "kept": float(accepted[allowed].sum() / max(accepted.sum(), 1)),
                "avoided": float(1 - allowed[accepted == 0].mean()) if (accepted == 0).any() else 1.0,
            }
        )
    return {"best": max(table, key=lambda t: t["tokens_per_second"]), "table": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--kappa", default="1,2,3,5")
    parser.add_argument("--nodes", type=int, default=20, help="most nodes of the copy trie")
    parser.add_argument("--depth", type=int, default=20, help="most tokens of a candidate")
    parser.add_argument("--costs", default="43,0.78,10,15,1.1", help="base, slope, draft ms; neural nodes, accepted")
    parser.add_argument("--sites", default="", help="comma-separated patterns; all by default")
    parser.add_argument("--out", type=Path, default=Path("runs/choose_probe"))
    options = parser.parse_args()
    base, slope, draft, nodes, accepted = (float(x) for x in options.costs.split(","))
    costs = Costs(base, slope, draft, int(nodes), accepted)
    opened = CaptureStore.open(options.store)
    from activations.target import load_target

    encode = load_target(opened.manifest["target_name"]).encode
    results: list[dict[str, Any]] = []
    for kappa in (int(k) for k in options.kappa.split(",")):
        store = Relabelled(opened, kappa, options.nodes, options.depth, encode)
        keep = store.rows()["split"] == "validation"
        rows = {k: v[keep] for k, v in store.rows().items()}
        gain = (1 + rows["accepted"]) / (base + slope * rows["nodes"]) > (1 + accepted) / costs.neural
        visited = replay(rows, np.ones(len(gain), bool), costs, neural=False)["visited"]
        empty = float((rows["accepted"][visited] == 0).mean())
        lines = {f"match length >= {n}": speed(rows, rows["match_length"] >= n, costs) for n in (kappa, 4, 8)}
        lines |= {"never": speed(rows, gain & False, costs), "oracle": speed(rows, gain, costs)}
        print(f"\nkappa {kappa}: always-copy takes {len(visited)} steps, {empty:.1%} of them empty")
        print("; ".join(f"{name} {value:.2f}" for name, value in lines.items()), "tokens/s simulated", flush=True)
        for label, m in LABELS:
            config = TrainConfig(
                label=label, follow_m=m, conditional=label == "follow", match=kappa, resamples=200,
                sites=tuple(s for s in options.sites.split(",") if s),
            )  # fmt: skip
            trained = train(store, config)
            for name in ("best", "serving"):
                probe = trained.probes[name]
                found = study(rows, probe.score(states_at(store, probe.config.site, len(keep))).numpy()[keep], costs)
                best, auc = found["best"], trained.evaluations[name]["match"].roc_auc
                what = f"{label}{m if label == 'follow' else ''} {name}"
                print(
                    f"{what:16} {probe.config.site:14} AUC {auc}  tau {best['tau']:.2f}  "
                    f"{best['tokens_per_second']:.2f} tokens/s  kept {best['kept']:.2f}  avoided {best['avoided']:.2f}",
                    flush=True,
                )
                rule = "highest simulated speed on the validation texts"
                probe.config = replace(probe.config, threshold=best["tau"], threshold_rule=rule)
                folder = f"kappa{kappa}-{label}{m}-{name}"
                probe.save_pretrained(options.out / folder)
                results.append(
                    {"folder": folder, "kappa": kappa, "site": probe.config.site, "auc": auc.to_dict(),
                     "baselines": lines, "empty": empty, **found}
                )  # fmt: skip
            trained.save(options.out / f"kappa{kappa}-{label}{m}")
    options.out.mkdir(parents=True, exist_ok=True)
    record = {"costs": asdict(costs), "results": results}
    (options.out / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in ("best", "serving"):
        top = max((r for r in results if r["folder"].endswith(name)), key=lambda r: r["best"]["tokens_per_second"])
        print(f"{name}: {top['folder']} at {top['site']}, {top['best']['tokens_per_second']:.2f} tokens/s simulated")


if __name__ == "__main__":
    main()
