"""How good finished probes are on text that nothing about them was chosen on.

    switchsd capture STORE --prompts question.jsonl --limit 80 --sites resid_mid.20,resid_post.18 --kappa 1
    python benchmarks/evaluate_probe.py STORE PROBE [PROBE ...]

A probe's rows are those it was trained for (all anchors, or those with a suffix match of its own kappa); beside its
AUC stand that of the match length alone, on the same rows, and their paired difference.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import numpy as np

from activations.store import CaptureStore
from probes.artifact import Probe
from probes.evaluation import auc_difference, evaluate
from probes.rows import Label, labels_of


def report(store: CaptureStore, name: str) -> dict[str, Any]:
    probe = Probe.from_pretrained(name)
    config, rows = probe.config, store.rows()
    captured = store.manifest["config"]["labels"]["kappa"]
    if captured > config.kappa:
        raise SystemExit(
            f"the store knows matches of {captured} tokens and more only, {name} copies from {config.kappa}"
        )
    y = labels_of(rows, cast(Label, config.label), int(config.label_settings["follow_m"]))
    score = probe.score(store.states(config.site)).numpy()
    out: dict[str, Any] = {"probe": name, "site": config.site, "label": config.label, "kappa": config.kappa}
    scopes = {"all rows": y >= 0, "rows with a suffix match": (y >= 0) & (rows["match_length"] >= config.kappa)}
    for scope, kept in scopes.items():
        if scope == "all rows" and config.label == "follow":
            continue  # without a match there is nothing to follow
        documents = rows["document"][kept]
        mine = evaluate(y[kept], score[kept], documents, threshold=config.threshold)
        length = evaluate(y[kept], np.minimum(rows["match_length"][kept], 32).astype(float), documents)
        out[scope] = {
            **mine.to_dict(),
            "match_length_auc": length.roc_auc.to_dict(),
            "over_match_length": auc_difference(mine, length).to_dict(),
        }
        print(f"{name} ({config.label} at {config.site}, kappa {config.kappa}), {scope}: {mine.rows} rows")
        print(
            f"  base rate {mine.base_rate:.3f}, AUC {mine.roc_auc:.3f}, average precision {mine.average_precision:.3f}"
        )
        print(f"  match length alone {length.roc_auc:.3f}, difference {auc_difference(mine, length):.3f}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("probe", nargs="+", help="a folder, or the name of a shipped probe")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    given = parser.parse_args()
    store = CaptureStore.open(given.store)
    found = [report(store, name) for name in given.probe]
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
