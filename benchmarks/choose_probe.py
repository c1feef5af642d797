"""Choose the label, the site and the threshold of the switch by what they do to decoding.

    python benchmarks/choose_probe.py STORE [--costs "43,66,73,1.1"] [--out DIR]

Trains a probe for every label on a capture store (selection `anchors`), then replays the texts of the validation
prompts: at each anchor with a suffix match the gate copies or leaves it to the neural side. What a copy would have
brought is in the store (accepted length); what the neural side brings is a constant. Costs are milliseconds of a
plain step, a copy step and a neural step, and the neural side's mean accepted length, from `switchsd profile` and a
trace. The chosen probe is the one with the highest simulated speed at its best threshold.

Also printed, at each threshold: which share of the copy tokens that always-copy gets accepted the gate keeps, and
which share of always-copy's steps with accepted length 0 it avoids.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from activations.store import CaptureStore
from probes.artifact import Probe
from probes.train import TrainConfig, train

LABELS = [("span_0", 1), ("span_1", 1), ("span_2", 1), ("follow", 1), ("follow", 2), ("follow", 3)]


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a step of each kind, and the neural side's accepted length."""

    plain: float
    copy: float
    neural: float
    accepted: float


def replay(rows: dict[str, np.ndarray], copies: np.ndarray, costs: Costs, neural: bool, seed: int = 0) -> dict:
    """Walk the texts; `copies` says where the gate copies if there is a match. Unknown outcomes end a text."""
    rng = np.random.default_rng(seed)
    tokens, milliseconds, copy_steps, steps = 0.0, 0.0, 0, 0
    visited: list[int] = []
    documents = rows["document"]
    for document in np.unique(documents):
        where = np.flatnonzero(documents == document)
        at = 0
        while at < len(where):
            row = where[at]
            if rows["match_length"][row] > 0 and copies[row]:
                if rows["censored"][row]:
                    break
                visited.append(int(row))
                gained, spent = 1 + int(rows["accepted"][row]), costs.copy
                copy_steps += 1
            elif neural:
                whole = int(costs.accepted)
                gained, spent = 1 + whole + int(rng.random() < costs.accepted - whole), costs.neural
            else:
                gained, spent = 1, costs.plain
            steps += 1
            tokens += min(gained, len(where) - at)
            milliseconds += spent
            at += gained
    return {
        "tokens_per_second": 1e3 * tokens / milliseconds,
        "copy_share": copy_steps / max(steps, 1),
        "visited": visited,
    }


def kept_and_avoided(rows: dict[str, np.ndarray], visited: list[int], copies: np.ndarray) -> tuple[float, float]:
    """Of always-copy's steps: share of accepted copy tokens kept, and share of steps with accepted length 0 avoided."""
    accepted = rows["accepted"][visited]
    allowed = copies[visited]
    kept = accepted[allowed].sum() / max(accepted.sum(), 1)
    avoided = 1 - allowed[accepted == 0].mean() if (accepted == 0).any() else 1.0
    return float(kept), float(avoided)


def study(store: CaptureStore, probe: Probe, rows: dict[str, np.ndarray], keep: np.ndarray, costs: Costs) -> dict:
    """The best threshold of a probe, and the gate's numbers along the way."""
    score = probe.score(store.states(probe.config.site)).numpy()[keep]
    always = replay(rows, np.ones(len(score), bool), costs, neural=False)["visited"]
    table = []
    for tau in np.round(np.arange(0.02, 0.99, 0.02), 2):
        copies = score >= tau
        kept, avoided = kept_and_avoided(rows, always, copies)
        speed = np.mean([replay(rows, copies, costs, True, seed)["tokens_per_second"] for seed in range(3)])
        table.append({"tau": float(tau), "tokens_per_second": float(speed), "kept": kept, "avoided": avoided})
    return {"best": max(table, key=lambda t: t["tokens_per_second"]), "table": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--costs", default="43,66,73,1.1", help="plain, copy, neural ms; neural accepted length")
    parser.add_argument("--sites", default="", help="comma-separated patterns; all by default")
    parser.add_argument("--out", type=Path, default=Path("runs/choose_probe"))
    options = parser.parse_args()
    costs = Costs(*(float(x) for x in options.costs.split(",")))
    store = CaptureStore.open(options.store)
    every = store.rows()
    keep = every["split"] == "validation"
    rows = {k: v[keep] for k, v in every.items()}
    n = len(rows["document"])
    for name, copies in (("never", np.zeros(n, bool)), ("always", np.ones(n, bool)), ("oracle", rows["accepted"] > 1)):
        found = np.mean([replay(rows, copies, costs, True, seed)["tokens_per_second"] for seed in range(3)])
        print(f"{name:28} {found:6.2f} tokens/s simulated")
    for least in (8, 12, 16):
        copies = rows["match_length"] >= least
        found = np.mean([replay(rows, copies, costs, True, seed)["tokens_per_second"] for seed in range(3)])
        print(f"match length >= {least:<12} {found:6.2f} tokens/s simulated")
    results = []
    for label, m in LABELS:
        for conditional in (False, True):
            if label == "follow" and not conditional:
                continue
            config = TrainConfig(
                label=label, follow_m=m, conditional=conditional, resamples=200,
                sites=tuple(s for s in options.sites.split(",") if s),
            )  # fmt: skip
            trained = train(store, config)
            for name in ("best", "serving"):
                probe = trained.probes[name]
                found = study(store, probe, rows, keep, costs)
                best = found["best"]
                auc = trained.evaluations[name]["match"].roc_auc
                results.append(
                    {"label": label, "m": m, "conditional": conditional, "name": name, "site": probe.config.site,
                     "auc_on_matches": auc.to_dict(), **found}
                )  # fmt: skip
                what = f"{label}{m if label == 'follow' else ''} {'matches' if conditional else 'all rows'} {name}"
                print(
                    f"{what:28} {probe.config.site:14} AUC {auc}  tau {best['tau']:.2f}  "
                    f"{best['tokens_per_second']:.2f} tokens/s  kept {best['kept']:.2f}  avoided {best['avoided']:.2f}",
                    flush=True,
                )
                probe.config = replace(
                    probe.config, threshold=best["tau"], threshold_rule="highest simulated speed on validation texts"
                )
                folder = options.out / f"{label}{m}{'-matches' if conditional else ''}-{name}"
                probe.save_pretrained(folder)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps({"costs": vars(costs), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
