"""What a training run found, and how it is written down."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from probes.artifact import Probe, ProbeError
from probes.evaluation import Evaluation, Interval, Reliability


@dataclass(frozen=True)
class SiteResult:
    """One site on the selection part. For choosing only: the best of many such numbers is too good."""

    site: str
    """Where the state was read."""
    l2: float
    """The chosen penalty."""
    roc_auc: Interval
    """ROC AUC with its interval."""
    average_precision: float
    """Average precision."""
    f1: float
    """F1 at the threshold that is best for it."""
    iterations: int
    """L-BFGS steps of the chosen fit."""


@dataclass(frozen=True)
class TrainResult:
    """A training run: the table of sites, the finished probes, and their test results beside the baselines'."""

    config: Mapping[str, Any]
    """The TrainConfig."""
    target_name: str
    """Alias, hub id or folder name of the target."""
    store: str
    """sha256 of the manifest of the capture store."""
    split: Mapping[str, Any]
    """Groups, documents and rows of each part, and the rule."""
    sites: list[SiteResult]
    """Every fitted site, in the store's order; selection part."""
    probes: Mapping[str, Probe]
    """`best`, `serving` (the best block boundary, if one was captured), and the kept sites under their own names."""
    evaluations: Mapping[str, Mapping[str, Evaluation]]
    """Test part: of each probe and baseline on `all` rows and on those with a suffix `match`."""
    behind: Mapping[str, Mapping[str, Interval]]
    """Test part: ROC AUC of the best probe minus that of each other score on the same rows."""
    reliability: Mapping[str, Reliability]
    """Test part: of each probe on the rows that a gate asks about."""
    provenance: Mapping[str, Any]
    """Command line, versions, git commit, seed and time."""
    seconds: float
    """Duration."""

    def to_dict(self) -> dict[str, Any]:
        """All of it but the weights, ready for JSON."""
        return {
            "config": dict(self.config),
            "target": self.target_name,
            "store": self.store,
            "split": dict(self.split),
            "sites": [{**vars(s), "roc_auc": s.roc_auc.to_dict()} for s in self.sites],
            "probes": {n: {"site": p.config.site, "threshold": p.config.threshold} for n, p in self.probes.items()},
            "evaluations": {n: {k: e.to_dict() for k, e in found.items()} for n, found in self.evaluations.items()},
            "behind": {n: {k: i.to_dict() for k, i in found.items()} for n, found in self.behind.items()},
            "reliability": {n: asdict(r) for n, r in self.reliability.items()},
            "provenance": dict(self.provenance),
            "seconds": round(self.seconds, 1),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write each probe into a folder of its name below `folder`, and beside them train.json and train.md."""
        root = Path(folder)
        for name, probe in self.probes.items():
            probe.save_pretrained(root / name)
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            for file, content in (("train.json", text), ("train.md", self.markdown())):
                scratch = root / f"{file}.tmp"
                scratch.write_text(content, encoding="utf-8")
                os.replace(scratch, root / file)
        except OSError as error:
            advice = "free some space or choose another folder"
            raise ProbeError(f"cannot write the results to {root} ({error}): {advice}") from error
        return root

    def markdown(self) -> str:
        """The tables of the run."""
        label = self.config["label"] + (f" (m={self.config['follow_m']})" if self.config["label"] == "follow" else "")
        scopes = {"all": "all rows", "match": "rows with a suffix match"}
        lines = [f"# Probes for {self.target_name}, label {label}", "", f"Split: {self.split['rule']}.", ""]
        lines += _table(
            ["part", "groups", "documents", "rows"],
            [[name, *part.values()] for name, part in self.split.items() if isinstance(part, Mapping)],
        )
        lines += ["## Test part", "", "Brackets hold 95 % intervals from a bootstrap over documents.", ""]
        for scope in self.evaluations["best"]:
            found = self.evaluations["best"][scope]
            lines += [f"On {scopes[scope]} ({found.rows} rows, base rate {found.base_rate}):", ""]
            rows = []
            for name, evaluations in self.evaluations.items():
                if scope in evaluations:
                    e, gap = evaluations[scope], self.behind.get(name, {}).get(scope, "")
                    at = [i if i is None else f"{i.estimate:.4f}" for i in (e.f1, e.precision, e.recall)]
                    rows.append([self._name(name), e.roc_auc, gap, e.average_precision, *at])
            lines += _table(["score", "AUC", "best probe's AUC - this", "AP", "F1", "precision", "recall"], rows)
        lines += _table(
            ["probe", "site", "threshold", "chosen by", "calibration error"],
            [
                [name, c.site, f"{c.threshold:.4f}", c.threshold_rule, f"{self.reliability[name].error:.4f}"]
                for name, c in ((name, probe.config) for name, probe in self.probes.items())
            ],
        )
        lines += ["## Sites, on the selection part", "", "These chose the site; they are no result.", ""]
        lines += _table(
            ["site", "AUC", "AP", "F1", "l2"],
            [[s.site, s.roc_auc, f"{s.average_precision:.4f}", f"{s.f1:.4f}", f"{s.l2:g}"] for s in self.sites],
        )
        return "\n".join(lines)

    def _name(self, name: str) -> str:
        """A score's name, with its site if it is a probe."""
        return f"{name} probe ({self.probes[name].config.site})" if name in self.probes else name


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in lines] + [""]
