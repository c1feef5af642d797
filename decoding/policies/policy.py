"""Policies: small networks that decide while tokens are drafted and verified, and the folder that keeps them.

    policy.safetensors   per network `<name>.layers.<k>.weight` [out, in] and `.bias` [out], and `<name>.mean` and
                         `<name>.scale` [features], by which its input is standardised; all float32
    policy.json          what the networks decide, their shapes, the target and the drafter that they were trained for,
                         the settings that they are used with, and how they were made; with a checksum of the weights

Torch is all that is needed to use one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from activations.target import Fingerprint

if TYPE_CHECKING:
    from activations.target import Target
    from decoding.drafters import Drafter

VERSION = 1
WEIGHTS, CONFIG = "policy.safetensors", "policy.json"
NETWORKS = {"ltd": ("depth", "size"), "cospec": ("arbitration",)}
"""Kinds of policies, and the networks of which a policy of that kind has one or more."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}
LAYERS: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu"}


class PolicyError(ValueError):
    """A policy that cannot be trained, read, or used here. The message says what to do."""


class Policy(nn.Module):
    """A multilayer perceptron from observations to one logit an action.

    logits = W_k f(... f(W_0 (x - mean) / scale + b_0) ...) + b_k, all float32; the standardisation is folded into the
    first layer, so that a call is one product a layer.
    """

    mean: torch.Tensor
    """[features]"""
    scale: torch.Tensor
    """[features]"""

    def __init__(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        activation: str = "tanh",
        mean: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """layers: weights [out, in] and biases [out], in order; `activation` (tanh or relu) stands between them.
        mean, scale: of the inputs [features]; 0 and 1 by default.

        Raises PolicyError for tensors that do not fit together, or are not finite.
        """
        super().__init__()
        if activation not in ACTIVATIONS:
            raise PolicyError(f"activation is {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
        if not layers:
            raise PolicyError("a policy needs a layer: give the weight and the bias of one or more")
        self.activation = activation
        features = layers[0][0].shape[-1] if layers[0][0].dim() else 0
        self.depth = len(layers)
        for number, (weight, bias) in enumerate(layers):
            self.register_buffer(f"weight_{number}", _plain(weight))
            self.register_buffer(f"bias_{number}", _plain(bias))
        self.register_buffer("mean", _plain(torch.zeros(features) if mean is None else mean))
        self.register_buffer("scale", _plain(torch.ones(features) if scale is None else scale))
        self._check()
        self._function = ACTIVATIONS[activation]
        self._fold()

    @classmethod
    def of(
        cls, modules: Iterable[nn.Module], mean: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> Policy:
        """The policy that a sequence of Linear layers with one kind of activation between them computes, with a mean
        and a scale [features] of its inputs. Raises PolicyError for other modules."""
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        between: list[str] = []
        for module in modules:
            if isinstance(module, nn.Linear) and len(layers) == len(between):
                bias = torch.zeros(module.out_features) if module.bias is None else module.bias
                layers.append((module.weight, bias))
            elif type(module) in LAYERS and len(layers) == len(between) + 1:
                between.append(LAYERS[type(module)])
            else:
                raise PolicyError(
                    f"{type(module).__name__} cannot be part {len(layers) + len(between)} of a policy: it is made of "
                    "Linear layers with Tanh or ReLU between them"
                )
        if len(set(between)) > 1 or len(between) != max(len(layers) - 1, 0):
            raise PolicyError(
                f"a policy of {len(layers)} layers has one kind of activation, once between any two, and not "
                f"{between}: change the network"
            )
        return cls(layers, between[0] if between else "tanh", mean, scale)

    @property
    def features(self) -> int:
        """Entries of an observation."""
        return int(self._layer(0)[0].shape[1])

    @property
    def hidden(self) -> tuple[int, ...]:
        """Units of the hidden layers."""
        return tuple(int(self._layer(k)[1].numel()) for k in range(self.depth - 1))

    @property
    def actions(self) -> int:
        return int(self._layer(self.depth - 1)[1].numel())

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weights [out, in] and biases [out] in order, for standardised inputs."""
        return [self._layer(k) for k in range(self.depth)]

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Logits [..., actions] of float32 observations [..., features] on the policy's device; no gradient."""
        with torch.no_grad():
            for weight, bias in self._folded:
                observations = self._function(F.linear(observations, weight, bias))
            return F.linear(observations, *self._last)

    def describe(self) -> dict[str, Any]:
        """Its shape, for JSON."""
        return {
            "features": self.features,
            "hidden": list(self.hidden),
            "activation": self.activation,
            "actions": self.actions,
        }

    @property
    def digest(self) -> str:
        """Of its shape and weights, by which it is known again."""
        found = hashlib.sha256(json.dumps(self.describe()).encode())
        for x in self.tensors().values():
            found.update(x.numpy().tobytes())
        return found.hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """As in policy.safetensors, without the network's name."""
        found = {"mean": self.mean, "scale": self.scale}
        for number, (weight, bias) in enumerate(self.layers()):
            found |= {f"layers.{number}.weight": weight, f"layers.{number}.bias": bias}
        return {name: x.detach().to("cpu").contiguous() for name, x in found.items()}

    def _layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(self, f"weight_{number}"), getattr(self, f"bias_{number}")

    def _check(self) -> None:
        """Shapes that fit together, and finite values."""
        entries = self.mean.numel()
        for number, (weight, bias) in enumerate(self.layers()):
            if weight.dim() != 2 or weight.shape[1] != entries or bias.shape != weight.shape[:1] or not weight.numel():
                raise PolicyError(
                    f"layer {number} of a policy has weights {list(weight.shape)} and biases {list(bias.shape)}: it "
                    f"takes {entries} inputs, so that they must be [units, {entries}] and [units]"
                )
            entries = weight.shape[0]
        if self.mean.dim() != 1 or self.scale.shape != self.mean.shape:
            raise PolicyError(
                f"mean and scale of a policy are {list(self.mean.shape)} and {list(self.scale.shape)}: both must be "
                f"[features], here [{self.mean.numel()}]"
            )
        for name, x in self.named_buffers():
            if not torch.isfinite(x).all():
                raise PolicyError(
                    f"{name} of a policy has {int((~torch.isfinite(x)).sum())} values that are not finite: train it "
                    "again with a smaller learning rate"
                )
        if not (self.scale > 0).all():
            raise PolicyError(f"scale of a policy is {float(self.scale.min()):g} somewhere: it must be above 0")

    def _fold(self) -> None:
        """What a call reads: the standardisation within the first layer, and no look-up of a module's attribute."""
        (weight, bias), *others = self.layers()
        first = weight.double() / self.scale.double()
        start = (first.float(), (bias.double() - first @ self.mean.double()).float())
        if not all(torch.isfinite(x).all() for x in start):
            raise PolicyError(
                f"the scale of a policy is so small (from {float(self.scale.min()):g} on) that its first layer leaves "
                "float32: standardise its inputs otherwise"
            )
        *self._folded, self._last = [start, *others]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Policy:
        """Another device."""
        super()._apply(fn, recurse)
        self._fold()
        return self


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)


AGAIN = "train the policy again with `switchsd train-policy`, or copy its folder again"


@dataclass(frozen=True, eq=False)
class PolicyArtifact:
    """Networks that decide together, and everything needed to trust and use them."""

    kind: str
    """ltd or cospec."""
    target: Mapping[str, Any]
    """Fingerprint of the target (`Fingerprint.to_dict`); no other target fits."""
    drafter: Mapping[str, Any] | None
    """What the drafter said of itself (`Drafter.describe`), None where any will do."""
    networks: Mapping[str, Policy]
    """By the name of what they decide (`NETWORKS`)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What they are used with: JSON values."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """How they were trained, results and provenance: JSON values."""
    origin: str = ""
    """The folder that it was read from, for messages."""

    def __post_init__(self) -> None:
        where = self.origin or "the policy"
        if self.kind not in NETWORKS:
            raise PolicyError(f"{where} is of the kind {self.kind!r}: this switchsd knows {', '.join(NETWORKS)}")
        known = NETWORKS[self.kind]
        strange = sorted(set(self.networks) - set(known))
        if strange or not self.networks:
            raise PolicyError(
                f"{where} has {f'a network {strange[0]!r}' if strange else 'no network'}: {self.kind} is made of "
                f"{' and '.join(known)}"
            )
        try:
            Fingerprint(**self.target)
        except TypeError as error:
            raise PolicyError(f"{where} has a target that is no fingerprint ({error}): {AGAIN}") from error

    # -- use ----------------------------------------------------------------------------------------

    def check(self, kind: str, target: Target, drafter: Drafter | None = None) -> None:
        """Raise PolicyError unless the policy is of this kind and was trained for this target and this drafter."""
        where = self._named()
        if self.kind != kind:
            raise PolicyError(
                f"{where} is of the kind {self.kind}, and {kind} is asked for: choose another, or train one with "
                f"`switchsd train-policy {kind}`"
            )
        self.check_target(target)
        if self.drafter is None:
            return
        if drafter is None:
            raise PolicyError(
                f"{where} was trained with the drafter {self.drafter.get('name', 'of another name')!r}, and there is "
                "none: load it as well"
            )
        different = differences(self.drafter, drafter.describe())
        if different:
            raise PolicyError(
                f"{where} was trained with another drafter than this {drafter.name} ({'; '.join(different)}): "
                f"{self._advice}"
            )

    def check_target(self, target: Target) -> None:
        """Raise PolicyError unless the policy was trained for this target."""
        different = Fingerprint(**self.target).mismatch(target.fingerprint)
        if different:
            raise PolicyError(
                f"{self._named()} was trained for another target than {target.name} ({'; '.join(different)}): "
                f"{self._advice}"
            )

    @property
    def _advice(self) -> str:
        return f"choose the one that was made for it, or train one with `switchsd train-policy {self.kind}`"

    def _named(self) -> str:
        return f"the policy in {self.origin}" if self.origin else f"the {self.kind} policy"

    # -- files --------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the artifact into `folder`, each file whole or not at all; policy.json last, and with a checksum, so
        that a mixture of two policies is noticed.

        Raises PolicyError where that cannot be done; what stood there before is left then.
        """
        root = Path(folder)
        weights = save({f"{n}.{k}": x for n, network in self.networks.items() for k, x in network.tensors().items()})
        values = {
            "kind": self.kind,
            "version": VERSION,
            "target": dict(self.target),
            "drafter": None if self.drafter is None else dict(self.drafter),
            "networks": {name: network.describe() for name, network in self.networks.items()},
            "settings": dict(self.settings),
            "record": dict(self.record),
            "weights": hashlib.sha256(weights).hexdigest(),
        }
        try:
            text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise PolicyError(
                f"settings or record of the {self.kind} policy are no JSON ({error}): give plain, finite values"
            ) from error
        made = {WEIGHTS: weights, CONFIG: text.encode()}
        try:
            root.mkdir(parents=True, exist_ok=True)
            for name, content in made.items():  # a full disk leaves an older policy whole
                (root / f"{name}.tmp").write_bytes(content)
            for name in made:
                os.replace(root / f"{name}.tmp", root / name)
        except OSError as error:
            advice = "free some space or choose another folder"
            raise PolicyError(f"cannot write the policy to {root} ({error}): {advice}") from error
        return root

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> PolicyArtifact:
        """Read an artifact; nothing in the files is trusted.

        Raises PolicyError that names the file and what is wrong with it.
        """
        root = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (root / name).is_file():
                raise PolicyError(
                    f"{root} is no policy ({name} is missing): give a folder that `switchsd train-policy` has made"
                )
        values = _read_config(root / CONFIG)
        try:
            content = (root / WEIGHTS).read_bytes()
        except OSError as error:
            raise PolicyError(f"cannot read {root / WEIGHTS} ({error}): {AGAIN}") from error
        found = hashlib.sha256(content).hexdigest()
        if found != values["weights"]:
            raise PolicyError(
                f"{root / WEIGHTS} is not the file that {CONFIG} was written for (its sha256 begins {found[:12]}, not "
                f"{str(values['weights'])[:12]}): it is damaged, or of another policy; {AGAIN}"
            )
        try:
            tensors = load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            raise PolicyError(f"cannot read {root / WEIGHTS} ({error}): {AGAIN}") from error
        networks = _networks(values["networks"], tensors, root)
        kept = {name: values[name] for name in ("kind", "target", "drafter", "settings", "record")}
        return cls(networks=networks, origin=str(root), **kept)


KEYS = {"kind", "version", "target", "drafter", "networks", "settings", "record", "weights"}


def _read_config(file: Path) -> dict[str, Any]:
    """policy.json, its keys and their types checked."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"cannot read {file} ({error}): {AGAIN}") from error
    if not isinstance(values, dict):
        raise PolicyError(f"{file} is not a JSON object: {AGAIN}")
    if values.get("version") != VERSION:
        raise PolicyError(
            f"{file} has format version {values.get('version')!r}; this switchsd reads {VERSION}: use the switchsd "
            "that wrote it, or train the policy again"
        )
    missing, unknown = sorted(KEYS - set(values)), sorted(set(values) - KEYS)
    if missing or unknown:
        told = [f"{word} {', '.join(keys)}" for word, keys in (("lacks", missing), ("has unknown", unknown)) if keys]
        raise PolicyError(f"{file} {' and '.join(told)}: {AGAIN}")
    for name in ("target", "drafter", "networks", "settings", "record"):
        if not isinstance(values[name], dict) and not (name == "drafter" and values[name] is None):
            raise PolicyError(f"{file} is damaged ({name} is {_short(values[name])}, and must be an object): {AGAIN}")
    if not isinstance(values["kind"], str):
        raise PolicyError(f"{file} is damaged (kind is {_short(values['kind'])}, and must be a name): {AGAIN}")
    return values


def _networks(shapes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], root: Path) -> dict[str, Policy]:
    """The networks of an artifact, if its tensors are those that policy.json tells of."""
    file = root / WEIGHTS
    networks: dict[str, Policy] = {}
    wanted: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        sizes = _sizes(name, shape, root / CONFIG)
        wanted |= {f"{name}.mean": sizes[:1], f"{name}.scale": sizes[:1]}
        for k in range(len(sizes) - 1):
            wanted |= {f"{name}.layers.{k}.weight": [sizes[k + 1], sizes[k]], f"{name}.layers.{k}.bias": [sizes[k + 1]]}
    wrong = sorted(wanted.keys() ^ tensors.keys())
    if wrong:
        told = "lacks" if wrong[0] in wanted else "has an unknown"
        raise PolicyError(f"{file} {told} {wrong[0]!r}: {AGAIN}")
    for name, size in wanted.items():
        x = tensors[name]
        if list(x.shape) != size or x.dtype != torch.float32:
            raise PolicyError(
                f"{file}: {name} is {x.dtype} of shape {list(x.shape)}, expected torch.float32 {size}: {AGAIN}"
            )
    for name, shape in shapes.items():
        layers = [
            (tensors[f"{name}.layers.{k}.weight"], tensors[f"{name}.layers.{k}.bias"])
            for k in range(len(shape["hidden"]) + 1)
        ]
        try:
            networks[name] = Policy(layers, shape["activation"], tensors[f"{name}.mean"], tensors[f"{name}.scale"])
        except PolicyError as error:
            raise PolicyError(f"{file}: network {name}: {error}") from error
    return networks


def _sizes(name: str, shape: Any, file: Path) -> list[int]:
    """Features, hidden units and actions of a network in policy.json."""
    try:
        sizes = [shape["features"], *shape["hidden"], shape["actions"]]
        if set(shape) != {"features", "hidden", "activation", "actions"}:
            raise ValueError(f"its keys are {sorted(shape)}")
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"its sizes are {sizes}, and must be counts")
        if shape["activation"] not in ACTIVATIONS:
            raise ValueError(f"activation is {shape['activation']!r}: {', '.join(ACTIVATIONS)} are known")
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{file} is damaged (network {_short(name)}: {error}): {AGAIN}") from error
    return sizes


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names and both values of the entries that differ as JSON."""
    mine, theirs = (json.loads(json.dumps(dict(x), default=str)) for x in (one, other))
    return [
        f"{name}: {_short(mine.get(name))} and {_short(theirs.get(name))}"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
