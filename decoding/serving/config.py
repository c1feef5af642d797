"""What an engine is told about the switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from activations.matching import MatchConfig

if TYPE_CHECKING:
    from probes.artifact import ProbeConfig

KEY = "switchsd"
"""Where vLLM's `additional_config` holds it."""


@dataclass(frozen=True)
class SwitchConfig:
    """Which probe gates copying, and how."""

    probe: str
    """Folder, short name or hub id of a probe whose site is a block boundary."""
    tau: float | None = None
    """Copy intent from which a copy is drafted; by default the probe's own threshold."""
    kappa: int | None = None
    """Shortest suffix match that is copied from; by default the one that the probe was chosen for."""

    def __post_init__(self) -> None:
        if not isinstance(self.probe, str) or not self.probe:
            raise ValueError(f"probe is {self.probe!r}; name a folder, a shipped probe or a hub id")
        if self.tau is not None and not (type(self.tau) in (int, float) and 0 <= self.tau <= 1):
            raise ValueError(f"tau is {self.tau!r}; a threshold of a probability lies in [0, 1]")
        if self.kappa is not None and not (type(self.kappa) is int and 1 <= self.kappa <= MatchConfig.max_length):
            raise ValueError(f"kappa is {self.kappa!r}; it must be a number from 1 to {MatchConfig.max_length}")

    @classmethod
    def of(cls, additional: Any) -> SwitchConfig | None:
        """What vLLM's `additional_config` says; None where it does not speak of the switch. Raises ValueError."""
        values = additional.get(KEY) if isinstance(additional, Mapping) else None
        if values is None:
            return None
        known = [f.name for f in fields(cls)]
        if not isinstance(values, Mapping) or set(values) - set(known) or "probe" not in values:
            raise ValueError(
                f"additional_config.{KEY} is {values!r}; it needs 'probe' and takes {', '.join(known[1:])}"
            )
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"additional_config.{KEY}: {error}") from error

    def rule(self, probe: ProbeConfig) -> tuple[float, int]:
        """tau and kappa; what is not said is the probe's."""
        return probe.threshold if self.tau is None else self.tau, self.kappa or probe.kappa

    def to_additional(self) -> dict[str, Any]:
        """The same as `additional_config`."""
        return {KEY: {name: value for name, value in asdict(self).items() if value is not None}}
