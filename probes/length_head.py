"""The length head: how far the target will follow a draft of each drafter, as an artifact.

    h_k = P(token k is accepted | the ones before it were) = sigmoid(w_k . state + v_k . features + b_k)

for k = 1, 2, ..., the last hazard standing for all later tokens too. The state is the anchor's, at the head's sites;
the features are those of `probes.surface`. `project` gives w_k . state of all drafters in one small matrix product on
the state's device; the rest is a few dozen host multiplications.

A neural drafter also has a table that corrects both drafters' chances where they speak of the same place.

lengths.safetensors   <drafter>.state [hazards, sites * width], <drafter>.features [hazards, features],
                      <drafter>.bias [hazards]; for each but `copy` also <drafter>.joint [4, 3, 3]; all float32
lengths.json          a LengthConfig
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from activations.sites import parse_sites
from activations.target import Fingerprint, Target
from probes.artifact import AGAIN, ChoiceError, ProbeError
from probes.surface import FEATURES

KIND = "length"
VERSION = 1
WEIGHTS, CONFIG = "lengths.safetensors", "lengths.json"
PARTS = ("state", "features", "bias")
COPY = "copy"
JOINT = (4, 3, 3)
"""Shape of a joint table: cases, depths, (odds of the copy, odds of the drafter, 1)."""


@dataclass(frozen=True)
class LengthConfig:
    """What a length head is, where it came from, and how good it is."""

    sites: tuple[str, ...]
    """Where the anchor's states are read; they stand side by side."""
    width: int
    """Number of entries of one site's state."""
    drafts: Mapping[str, int]
    """Drafter -> the longest draft that is known of it, in tokens."""
    features: tuple[str, ...]
    """Names of the features, in order."""
    kappa: int
    """Shortest suffix match that the copies were fitted on."""
    target: Fingerprint
    """The target whose states were fitted; no other target fits."""
    target_name: str
    """Alias, hub id or folder name of that target."""
    split: Mapping[str, Any]
    """What was fitted, with numbers of texts and rows."""
    metrics: Mapping[str, Any]
    """Results on texts that were not fitted."""
    provenance: Mapping[str, Any]
    """Versions, command line, seed and commit of the training."""
    kind: str = KIND
    """Says of the file that it is a length head's."""
    version: int = VERSION
    """Of the file's format."""

    @classmethod
    def from_dict(cls, values: Any, where: str = CONFIG) -> LengthConfig:
        """Check what a lengths.json says; `where` names the file in messages. Raises ProbeError where it is wrong."""
        if not isinstance(values, Mapping):
            raise ProbeError(f"{where} is not a JSON object: {AGAIN}")
        if values.get("kind") != KIND:
            raise ProbeError(f"{where} is of kind {values.get('kind')!r}, and a length head is wanted: {AGAIN}")
        if values.get("version") != VERSION:
            raise ProbeError(
                f"{where} has format version {values.get('version')!r}; this switchsd reads {VERSION}: "
                "use the switchsd that wrote it, or train again with `switchsd train lengths`"
            )
        wanted = {f.name for f in fields(cls)}
        if set(values) != wanted:
            lacks, unknown = sorted(wanted - set(values)), sorted(set(values) - wanted)
            raise ProbeError(f"{where} lacks {lacks or 'nothing'} and has unknown {unknown or 'nothing'}: {AGAIN}")
        try:
            target = Fingerprint(**values["target"])
            config = cls(
                **{**values, "target": target, "sites": tuple(values["sites"]), "features": tuple(values["features"])}
            )
            parse_sites(list(config.sites), target.blocks)
            if config.features != FEATURES:
                raise ValueError("its features are not the ones that this switchsd computes")
            if not config.drafts or not all(isinstance(n, int) and n > 0 for n in config.drafts.values()):
                raise ValueError(f"drafts is {config.drafts}")
            if not (isinstance(config.kappa, int) and config.kappa > 0 and isinstance(config.width, int)):
                raise ValueError(f"kappa is {config.kappa!r}, width {config.width!r}")
        except (TypeError, ValueError) as error:
            raise ProbeError(f"{where} is damaged ({error}): {AGAIN}") from error
        return config


class LengthHead:
    """A length head that is ready to judge."""

    def __init__(self, config: LengthConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.tensors = {k: v.detach().to("cpu", torch.float32).contiguous() for k, v in tensors.items()}
        _check(self.tensors, config, "the length head")
        self._weight = torch.cat([self.tensors[f"{name}.state"] for name in config.drafts]).T.contiguous()
        self._host: dict[str, tuple[int, list[list[float]], list[float]]] = {}
        start = 0
        for name in config.drafts:
            features, bias = self.tensors[f"{name}.features"].tolist(), self.tensors[f"{name}.bias"].tolist()
            self._host[name] = (start, features, bias)
            start += len(bias)

    @torch.no_grad()
    def project(self, state: torch.Tensor) -> torch.Tensor:
        """[..., hazards of all drafters] in float32 on the device of states [..., sites * width].

        Raises ProbeError for states of another width.
        """
        if state.shape[-1:] != (len(self._weight),):
            sites = ", ".join(self.config.sites)
            raise ProbeError(f"this length head reads {len(self._weight)} entries ({sites}), got {tuple(state.shape)}")
        if state.device != self._weight.device:
            self._weight = self._weight.to(state.device)
        return state.float() @ self._weight

    @property
    def digest(self) -> str:
        """Names the weights."""
        found = hashlib.sha256()
        for name in sorted(self.tensors):
            found.update(name.encode() + self.tensors[name].numpy().tobytes())
        return found.hexdigest()[:16]

    def knows(self, drafter: str) -> bool:
        """Whether the drafts of this drafter were fitted."""
        return drafter in self.config.drafts

    def columns(self, drafter: str) -> tuple[int, int]:
        """Where the drafter's hazards begin and end in what `project` gives."""
        start, _, bias = self._host[drafter]
        return start, start + len(bias)

    def joint(self, drafter: str) -> list[list[list[float]]]:
        """The table of a neural drafter that corrects its chances and the copy's where they meet."""
        table: list[list[list[float]]] = self.tensors[f"{drafter}.joint"].tolist()
        return table

    def hazards(
        self, drafter: str, readings: Sequence[float], features: Sequence[float], shift: float = 0.0
    ) -> list[float]:
        """Log-odds of each hazard, from what `project` gave for one anchor and the features [FEATURES]; `shift` is
        added to all of them."""
        start, weights, bias = self._host[drafter]
        return [
            readings[start + k] + b + shift + sum(v * x for v, x in zip(weights[k], features, strict=True))
            for k, b in enumerate(bias)
        ]

    def chances(self, drafter: str, hazards: Sequence[float]) -> list[float]:
        """P(at least k tokens are accepted) for k = 1 .. the drafter's longest draft."""
        out, alive, hazard = [], 1.0, 0.0
        for k in range(self.config.drafts[drafter]):
            if k < len(hazards):
                hazard = 1 / (1 + math.exp(-max(min(hazards[k], 30.0), -30.0)))
            alive *= hazard
            out.append(alive)
        return out

    def check_target(self, target: Fingerprint, name: str = "this target") -> None:
        """Raise ChoiceError unless the head was fitted on this target."""
        differences = self.config.target.mismatch(target)
        if differences:
            raise ChoiceError(
                f"the length head was trained on {self.config.target_name} and does not fit {name}; they differ in "
                f"{'; '.join(differences)}. Train one with `switchsd train lengths`."
            )

    # -- files --------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write the artifact; a reader never meets new weights beside an old config."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        (root / CONFIG).unlink(missing_ok=True)
        save_file(self.tensors, root / WEIGHTS)
        scratch = root / f".{CONFIG}.{os.getpid()}"
        scratch.write_text(json.dumps(asdict(self.config), indent=1) + "\n", encoding="utf-8")
        scratch.replace(root / CONFIG)
        return root

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], target: Target | None = None) -> LengthHead:
        """Read an artifact; with `target`, it must fit.

        Raises ChoiceError where there is none and for another target, ProbeError for a damaged one.
        """
        root = Path(folder)
        if not root.is_dir():
            raise ChoiceError(f"no length head at {root}: name a folder, or train one with `switchsd train lengths`")
        try:
            values = json.loads((root / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ProbeError(f"cannot read {root / CONFIG} ({error}): {AGAIN}") from error
        config = LengthConfig.from_dict(values, str(root / CONFIG))
        try:
            tensors = load_file(root / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise ProbeError(f"cannot read {root / WEIGHTS} ({error}): {AGAIN}") from error
        _check(tensors, config, str(root / WEIGHTS))
        head = cls(config, tensors)
        if target is not None:
            head.check_target(target.fingerprint, target.name)
        return head


def _check(tensors: Mapping[str, torch.Tensor], config: LengthConfig, where: str) -> None:
    """Names, shapes and finite values."""
    expected = {f"{name}.{part}" for name in config.drafts for part in PARTS}
    expected |= {f"{name}.joint" for name in config.drafts if name != COPY}
    if set(tensors) != expected:
        raise ProbeError(f"{where} has tensors {sorted(tensors)}, expected {sorted(expected)}: {AGAIN}")
    for name, longest in config.drafts.items():
        hazards = tensors[f"{name}.bias"].numel()
        if not 1 <= hazards <= longest:
            raise ProbeError(f"{where}: {name} has {hazards} hazards for drafts of {longest} tokens: {AGAIN}")
        shapes: dict[str, tuple[int, ...]] = {
            "state": (hazards, config.width * len(config.sites)),
            "features": (hazards, len(config.features)),
            "bias": (hazards,),
        }
        if name != COPY:
            shapes["joint"] = JOINT
        for part, shape in shapes.items():
            found = tensors[f"{name}.{part}"]
            if tuple(found.shape) != shape:
                raise ProbeError(
                    f"{where}: {name}.{part} has shape {list(found.shape)}, expected {list(shape)}: {AGAIN}"
                )
            if not torch.isfinite(found).all():
                raise ProbeError(f"{where}: {name}.{part} has values that are not finite: {AGAIN}")
