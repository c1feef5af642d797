"""What fitting a linear probe costs, on made states with a residual stream's shape.

    python -m benchmarks.fit_probe speed     # one fit of 1,000,000 x 576 against scikit-learn's LogisticRegression
    python -m benchmarks.fit_probe sweep     # 30 blocks x 2 sites on 200,000 rows: how long
    python -m benchmarks.fit_probe stream    # peak memory of a fit from a store on disk (--gib of states)

--rows and --width make it smaller. Each prints one JSON object and exits 1 if a promise is broken: an AUC that
differs by more than 0.001, less than 5 times as fast (speed), more than ten minutes (sweep), or a peak above the
limit, beside which the states are larger (stream; `--limit-mib`). `--quick` leaves the promises about time out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from activations.store import CaptureStore, StoreWriter
from activations.target import Fingerprint
from probes.linear import LinearProbe

WIDTH = 576
HUGE = 3
"""Entries hundreds of times larger than the others, as in a residual stream."""
L2 = 1e-7
"""The penalty; the huge entries make the small ones' weights large, and so it is small."""
Floats = NDArray[np.float32]


class Maker:
    """Makes rows of states [rows, width] and labels [rows] of one law, as many as are asked for."""

    def __init__(self, width: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        falling = np.exp(-np.arange(width) / (width / 4))[:, None]  # few directions carry most of what varies
        self.mix = (draw.normal(size=(width, width)) / width**0.5 * falling).astype(np.float32)
        self.sizes = np.exp(0.5 * draw.normal(size=width)).astype(np.float32)
        self.huge = draw.choice(width, HUGE, replace=False)
        self.direction = draw.normal(size=width).astype(np.float32)
        self.direction[self.huge] = 0
        self.spread: float | None = None

    def rows(self, count: int, seed: int) -> tuple[Floats, NDArray[np.bool_]]:
        """The label is a noisy linear function of the small entries; a tenth of the rows is positive."""
        draw = np.random.default_rng(seed)
        x = np.empty((count, len(self.mix)), dtype=np.float32)
        for start in range(0, count, 50_000):  # no second copy of everything
            part = x[start : start + 50_000]
            latent = draw.standard_normal(part.shape, dtype=np.float32)
            np.matmul(latent, self.mix, out=part)
            part += 0.05 * draw.standard_normal(part.shape, dtype=np.float32)
            part *= self.sizes
            part[:, self.huge] = 300 + 30 * latent[:, : len(self.huge)]
        z = x @ self.direction
        if self.spread is None:
            self.spread = float(z.std())
        y = draw.random(count) < 1 / (1 + np.exp(3.5 - 3 * z / self.spread))
        return x, y


def auc(y: NDArray[np.bool_], score: NDArray[np.floating]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(y, score))


def speed(rows: int, width: int, quick: bool) -> tuple[dict[str, Any], bool]:
    """One fit each on the same rows; AUC on rows of their own.

    scikit-learn gets what it asks its users for: standardised states and its own default penalty (and once more raw
    states, for which it stops at its limit of iterations). Standardising counts as its time.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    maker = Maker(width)
    x, y = maker.rows(rows, 1)
    other, truth = maker.rows(min(rows, 100_000), 2)
    began = time.perf_counter()
    probe = LinearProbe(l2=L2).fit(x, y)
    seconds = time.perf_counter() - began
    found: dict[str, Any] = {
        "rows": rows,
        "width": width,
        "threads": torch.get_num_threads(),
        "ours": {"seconds": seconds, "auc": auc(truth, probe.decision_function(other)), "steps": probe.n_iter_},
    }
    for name, steps, scaled in (("scikit-learn", 1000, True), ("scikit-learn, raw states", 100, False)):
        logistic = LogisticRegression(max_iter=steps)
        model = make_pipeline(StandardScaler(), logistic) if scaled else logistic
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            began = time.perf_counter()
            model.fit(x, y)
            taken = time.perf_counter() - began
        found[name] = {
            "seconds": taken,
            "auc": auc(truth, model.decision_function(other)),
            "steps": int(logistic.n_iter_[0]),
            "times slower": taken / seconds,
        }
    best = found["scikit-learn"]
    ok = found["ours"]["auc"] > best["auc"] - 0.001 and (quick or best["seconds"] > 5 * seconds)
    return found, ok


def sweep(rows: int, width: int, sites: int, quick: bool) -> tuple[dict[str, Any], bool]:
    """A fit at each of `sites` sites; each is made anew, and only the fits count."""
    seconds, values = [], []
    for site in range(sites):
        maker = Maker(width, seed=site)
        x, y = maker.rows(rows, 1)
        other, truth = maker.rows(min(rows, 20_000), 2)
        began = time.perf_counter()
        probe = LinearProbe(l2=L2).fit(x, y)
        seconds.append(time.perf_counter() - began)
        values.append(auc(truth, probe.decision_function(other)))
    found = {"rows": rows, "width": width, "sites": sites, "seconds": sum(seconds), "slowest fit": max(seconds),
             "auc": [min(values), max(values)]}  # fmt: skip
    return found, quick or sum(seconds) <= 600


def write_store(folder: Path, gib: float, width: int, shard_rows: int) -> tuple[int, NDArray[np.bool_]]:
    """A store of one site in bfloat16; its rows and labels."""
    maker, labels = Maker(width), []
    shards = max(1, round(gib * 2**30 / (2 * width * shard_rows)))
    target = Fingerprint("none", width, 1, "none", "none").to_dict()
    with StoreWriter(folder, {"target": target, "config": {}}, ["resid_mid.0"]) as writer:
        for number in range(shards):
            x, y = maker.rows(shard_rows, number)
            document = np.arange(shard_rows) // 100 + number * shard_rows
            writer.write({"document": document}, {"resid_mid.0": torch.from_numpy(x).to(torch.bfloat16)})
            labels.append(y)
    return shards * shard_rows, np.concatenate(labels)


def stream(
    gib: float, width: int, shard_rows: int, limit_mib: float | None, folder: Path | None
) -> tuple[dict[str, Any], bool]:
    """Fit from a store on disk in a process of its own; peak memory beyond what it had before the fit."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        root = Path(scratch) / "store"
        child = os.fork()  # nothing ran here yet, and so there are no threads to lose
        if not child:
            _, made = write_store(root, gib, width, shard_rows)
            np.save(Path(scratch) / "y.npy", made)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit("the store could not be written")
        y = np.load(Path(scratch) / "y.npy")
        store = CaptureStore.open(root)
        before = peak_mib()
        began = time.perf_counter()
        probe = LinearProbe(l2=L2).fit_store(store, "resid_mid.0", y)
        seconds = time.perf_counter() - began
        after = peak_mib()
        some = np.arange(len(y)) >= len(y) - shard_rows
        found = {
            "rows": len(y),
            "width": width,
            "MiB of states in bfloat16": len(y) * width * 2 / 2**20,
            "MiB of states in float32": len(y) * width * 4 / 2**20,
            "MiB before": before,
            "MiB at the peak": after,
            "limit MiB": limit_mib,
            "seconds": seconds,
            "steps": probe.n_iter_,
            "auc of its last rows": auc(y[some], probe.decision_store(store, "resid_mid.0", some)),
        }
        return found, limit_mib is None or after - before <= limit_mib


def peak_mib() -> float:
    """Peak memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "sweep", "stream"))
    parser.add_argument("--rows", type=int, help="rows of states (speed: 1,000,000; sweep: 200,000)")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--sites", type=int, default=60, help="sweep: how many sites")
    parser.add_argument("--gib", type=float, default=10.0, help="stream: GiB of states on disk, in bfloat16")
    parser.add_argument("--shard-rows", type=int, default=50_000, help="stream: rows of a shard")
    parser.add_argument("--limit-mib", type=float, default=512.0, help="stream: most MiB that the fit may add")
    parser.add_argument("--folder", type=Path, help="stream: where the store is written for the time being")
    parser.add_argument("--quick", action="store_true", help="make no promise about time")
    chosen = parser.parse_args(arguments)
    if chosen.what == "speed":
        found, ok = speed(chosen.rows or 1_000_000, chosen.width, chosen.quick)
    elif chosen.what == "sweep":
        found, ok = sweep(chosen.rows or 200_000, chosen.width, chosen.sites, chosen.quick)
    else:
        found, ok = stream(chosen.gib, chosen.width, chosen.shard_rows, chosen.limit_mib, chosen.folder)
    print(json.dumps({"benchmark": chosen.what, **found, "ok": ok}, indent=2))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
