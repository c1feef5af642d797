"""What a training run or an evaluation found, and how it is written down: evaluation.json and evaluation.md."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from probes.artifact import Probe, ProbeError
from probes.calibration import Reliability
from probes.markdown import markdown
from probes.study import Findings, plain
from probes.sweep import SiteResult
from probes.task import Scopes

VERSION = 1
JSON_FILE, MARKDOWN_FILE = "evaluation.json", "evaluation.md"


@dataclass(frozen=True)
class Chosen:
    """The cell that the selection part chose for one label of the sweep, and its one measurement."""

    label: str
    """span_0, span_1, span_2, or follow_ and the accepted length."""
    site: str
    """The chosen site."""
    estimator: str
    """The chosen estimator."""
    tries: int
    """Cells that it was chosen from."""
    test: Scopes
    """Test part: by scope."""


@dataclass(frozen=True)
class Report:
    """Everything that is told of probes on one store; evaluation.json is this, field by field.

    An interval is {estimate, lower, upper}: 95 %, from a bootstrap over documents; null where it is undefined. A scope
    is `all` (rows) or `match` (rows with a suffix match). `findings` is written flat, beside the other keys.
    """

    label: Mapping[str, Any]
    """name, label, follow_m, match (shortest suffix match) and only_matches (whether other rows are asked, too)."""
    target: str
    """Alias, hub id or folder name of the target."""
    store: str
    """sha256 of the manifest of the store."""
    split: Mapping[str, Any]
    """Groups, documents and rows of each part, the rule, and as `groups_seen` 12 hex digits of sha256 for the name of
    each group that fits or selects."""
    config: Mapping[str, Any]
    """Settings of the run."""
    probes: Mapping[str, Mapping[str, Any]]
    """By name: site, estimator, threshold, threshold_rule, l2."""
    findings: Findings
    """Test part."""
    provenance: Mapping[str, Any]
    """Command line, versions, git commit, seed and time."""
    seconds: float
    """Duration."""
    sites: list[SiteResult] = field(default_factory=list)
    """The sweep, selection part: one cell a label, site and estimator, with `kind` and `block` of the site for heat
    maps. Empty where a finished probe was only measured."""
    chosen: list[Chosen] = field(default_factory=list)
    """Test part: what the sweep chose for each label."""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; `version` is that of the format."""
        own = {name: plain(value) for name, value in vars(self).items() if name != "findings"}
        return {"version": VERSION, **own, "seconds": round(self.seconds, 1), **self.findings.to_dict()}

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write evaluation.json and evaluation.md into a folder, each whole or not at all.

        Raises ProbeError if they cannot be written.
        """
        root = Path(folder)
        values = self.to_dict()
        text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            root.mkdir(parents=True, exist_ok=True)
            for file, content in ((JSON_FILE, text), (MARKDOWN_FILE, markdown(values))):
                scratch = root / f"{file}.tmp"
                scratch.write_text(content, encoding="utf-8")
                os.replace(scratch, root / file)
        except OSError as error:
            advice = "free some space or choose another folder"
            raise ProbeError(f"cannot write the results to {root} ({error}): {advice}") from error
        return root


def read_report(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The values of an evaluation.json. Raises ProbeError, naming the file, if it is none."""
    again = "make it again with `switchsd train probe` or `switchsd evaluate`"
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProbeError(f"cannot read {file} ({error}): {again}") from error
    if not isinstance(values, dict) or values.get("version") != VERSION:
        found = repr(values.get("version")) if isinstance(values, dict) else "none"
        raise ProbeError(f"{file} is no evaluation of format version {VERSION} (found: {found}): {again}")
    wanted = {f.name for f in (*fields(Report), *fields(Findings))} - {"findings"}
    if missing := sorted(wanted - set(values)):
        raise ProbeError(f"{file} lacks {', '.join(missing)}: {again}")
    try:
        markdown(values)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ProbeError(f"{file} is damaged ({error!r}): {again}") from error
    return values


@dataclass(frozen=True)
class TrainResult:
    """A training run: the finished probes, and what is told of them."""

    probes: Mapping[str, Probe]
    """`best`, `serving` (the best block boundary, if one was captured), and the kept sites under their own names."""
    report: Report
    """All numbers."""

    @property
    def target_name(self) -> str:
        return self.report.target

    @property
    def config(self) -> Mapping[str, Any]:
        return self.report.config

    @property
    def sites(self) -> list[SiteResult]:
        """The sweep's cells of the label that the probes predict, in the store's order; selection part."""
        return [s for s in self.report.sites if s.label == self.report.label["name"]]

    @property
    def evaluations(self) -> Mapping[str, Scopes]:
        """Test part: of each probe and baseline on `all` rows and on those with a suffix `match`."""
        return self.report.findings.evaluations

    @property
    def reliability(self) -> Mapping[str, Reliability]:
        """Test part: of each probe on the rows that a gate asks about."""
        return self.report.findings.reliability

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write each probe into a folder of its name below `folder`, and the report beside them."""
        root = Path(folder)
        for name, probe in self.probes.items():
            probe.save_pretrained(root / name)
        return self.report.save(root)
