"""Sweeps: one setting at several values, as columns of the same run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from activations.sampling import Sampling
from decoding.columns import Column, ModeColumn
from decoding.modes import ModeSettings
from decoding.suite import CONTEXT, at
from decoding.summary import OVERALL


@dataclass(frozen=True)
class Sweep:
    """A setting and its values, as they were written."""

    setting: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """From `kappa=1,2,3,5`. Raises ValueError."""
        setting, _, values = text.partition("=")
        parts = tuple(v.strip() for v in values.split(",") if v.strip())
        known = sorted({f.name for c in (ModeSettings, Sampling) for f in fields(c)} | {CONTEXT})
        if setting not in known:
            raise ValueError(f"sweep over {setting!r}: choose one of {', '.join(known)}, as in kappa=1,2,3,5")
        if len(parts) < 2 or len(set(parts)) < len(parts):
            raise ValueError(f"sweep {text!r}: name at least two different values, as in kappa=1,2,3,5")
        found = cls(setting, parts)
        if setting == CONTEXT and not all(v.isdigit() and int(v) > 0 for v in parts):
            raise ValueError(f"sweep {text!r}: a context is a number of tokens, as in context=1024,2048")
        return found

    @property
    def lengths(self) -> list[int]:
        return [int(v) for v in self.values]

    def expand(self, columns: Mapping[str, Column], make: Callable[[str], Column]) -> dict[str, Column]:
        """Each mode that the setting touches, at each value (`copy/kappa=3`); the other columns stay single."""
        if self.setting == CONTEXT:
            return dict(columns)
        out: dict[str, Column] = {}
        for name, column in columns.items():
            named = any(part.startswith(f"{self.setting}=") for part in name.split("/")[1:])
            if not isinstance(column, ModeColumn) or named:
                out[name] = column
                continue
            varied = {f"{name}/{self.setting}={value}": value for value in self.values}
            made = {new: make(new) for new in varied}
            alike = len({repr(c.describe()) for c in made.values()}) == 1
            out |= {name: column} if alike else made
        return out


def points(sweep: Sweep, summary: Sequence[Mapping[str, Any]], columns: Mapping[str, Column]) -> dict[str, Any]:
    """The overall records along the sweep: by mode and value. A column that the setting does not touch has the same
    numbers at every value."""
    found = []
    for value in sweep.values:
        for name in columns:
            parts = name.split("/")
            own = next((p.partition("=")[2] for p in parts[1:] if p.startswith(f"{sweep.setting}=")), None)
            if own in sweep.values and own != value:
                continue
            group = at(int(value)) if sweep.setting == CONTEXT else OVERALL
            record = next((r for r in summary if r["group"] == group and r["mode"] == name), None)
            if record is not None:
                shown = [p for p in parts if p != f"{sweep.setting}={value}"]
                found.append({**record, "column": name, "mode": "/".join(shown), "value": value})
    return {"setting": sweep.setting, "points": found}
