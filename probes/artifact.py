"""The probe artifact: a folder that holds a fitted probe and everything needed to trust and use it.

probe.safetensors   weight [features], bias, scale, calibration [2]; an MLP's hidden layers as hidden.0.weight
                    [units, sites * width], hidden.0.bias [units], hidden.1.weight ...; all float32
config.json         a ProbeConfig
README.md           a model card made from the config

`features` is sites * width, or the units of the last hidden layer. Format version 1 knows linear probes of one site
only, and calls that `site` where version 2 has a list `sites`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.functional import relu

from activations.sites import parse_sites
from activations.target import Fingerprint, Target

VERSION = 2
Kind = Literal["linear", "mlp"]
JOIN = "+"
"""Between the sites of a probe that reads several."""
SHIPPED = Path(__file__).parent / "weights"
"""Probes that come with the package; a folder below it is a probe's short name."""
SHAPES: dict[str, tuple[int, ...]] = {"weight": (0,), "bias": (), "scale": (), "calibration": (2,)}
"""Tensors of every probe; the weight's length follows from the config."""


class ProbeError(Exception):
    """A probe that cannot be fitted, read, or used on this target. The message says what to do."""


class ChoiceError(ProbeError):
    """A probe or site that was named and is not there, or a probe of another target."""


@dataclass(frozen=True)
class ProbeConfig:
    """What a probe is, where it came from, and how good it is."""

    site: str
    """Where the state is read, for example `resid_mid.18`; several sites, whose states stand side by side, are joined
    by `+`: `resid_mid.18+resid_post.20`."""
    width: int
    """Number of entries of one site's state."""
    label: str
    """What the score is the probability of: span_0, span_1 or span_2 (the anchor's own token, the pending one, or the
    first drafted one is copied), or follow (the target follows the candidate for at least follow_m tokens)."""
    label_settings: Mapping[str, Any]
    """How the label was made, and which rows were fitted."""
    threshold: float
    """Copy where the score is at least this."""
    threshold_rule: str
    """How the threshold was chosen."""
    target: Fingerprint
    """The target whose states were fitted; no other target fits."""
    target_name: str
    """Alias, hub id or folder name of that target."""
    store: str
    """sha256 of the manifest of the capture store."""
    split: Mapping[str, Any]
    """Which part was used for what, with its numbers of groups, documents and rows."""
    metrics: Mapping[str, Any]
    """Results on the test part, with intervals."""
    provenance: Mapping[str, Any]
    """Command line, versions, git commit, seed and time."""
    kind: Kind = "linear"
    """linear, or mlp: hidden layers of ReLUs before the linear one."""
    version: int = VERSION
    """Version of this format."""

    @property
    def kappa(self) -> int:
        """Shortest suffix match that the threshold was chosen for."""
        return int(self.label_settings.get("match", 5))

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites whose states are read, in the order in which they stand side by side."""
        return tuple(self.site.split(JOIN))

    def to_dict(self) -> dict[str, Any]:
        """As in config.json."""
        values = asdict(self)
        if self.version == 1:
            return values
        site = values.pop("site")
        return {"sites": site.split(JOIN), **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "config.json") -> ProbeConfig:
        """Check the keys and the version; `where` names the file in messages. Raises ProbeError if they are wrong."""
        if not isinstance(values, Mapping):
            raise ProbeError(f"{where} is not a JSON object: {AGAIN}")
        version = values.get("version")
        if version not in (1, VERSION):
            raise ProbeError(
                f"{where} has format version {version!r}; this switchsd reads 1 to {VERSION}: "
                "use the switchsd that wrote it, or train the probe again"
            )
        wanted = {f.name for f in fields(cls)}
        if version > 1:
            wanted = wanted - {"site"} | {"sites"}
        missing, unknown = sorted(wanted - set(values)), sorted(set(values) - wanted)
        if missing or unknown:
            told = [
                f"{word} {', '.join(keys)}" for word, keys in (("lacks", missing), ("has unknown", unknown)) if keys
            ]
            raise ProbeError(f"{where} {' and '.join(told)}: {AGAIN}")
        values = dict(values)
        if version > 1:
            sites = values.pop("sites")
            if not isinstance(sites, list) or not sites or not all(isinstance(site, str) for site in sites):
                raise ProbeError(f"{where} is damaged (sites is {sites!r}, and must be a list of names): {AGAIN}")
            values["site"] = JOIN.join(sites)
        try:
            config = cls(**{**values, "target": Fingerprint(**values["target"])})
        except TypeError as error:
            raise ProbeError(f"{where} has a target that is no fingerprint ({error}): {AGAIN}") from error
        try:
            parse_sites(str(config.site).split(JOIN), config.target.blocks)
            if len(set(config.sites)) < len(config.sites):
                raise ValueError(f"a site is named twice in {config.site}")
            kinds = get_args(Kind) if version > 1 else ("linear",)
            if config.kind not in kinds:
                raise ValueError(f"kind is {config.kind!r}; version {version} knows {', '.join(kinds)}")
            if not 0 <= config.threshold <= 1:
                raise ValueError(f"threshold is {config.threshold}; a threshold of a probability lies in [0, 1]")
        except (ValueError, TypeError) as error:
            raise ProbeError(f"{where} is damaged ({error}): {AGAIN}") from error
        return config


AGAIN = "train the probe again with `switchsd train`, or download it again"


class Probe:
    """A probe that is ready to score states.

    logit = calibration[0] * (weight . f(state * scale) + bias) + calibration[1], all in float32 on the state's device;
    f is the hidden layers of an MLP, and nothing in a linear probe. The four numbers are folded into the layers when
    the probe is made, so that a linear probe's score is one dot product.
    """

    def __init__(
        self,
        config: ProbeConfig,
        weight: torch.Tensor,
        bias: float = 0.0,
        scale: float = 1.0,
        calibration: tuple[float, float] = (1.0, 0.0),
        hidden: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """`weight` [features] is for states times `scale`, which brings them to RMS 1, or for the last hidden layer.

        `hidden` are the weights [out, in] and biases [out] of an MLP's hidden layers.
        """
        self.config = config
        self.tensors = {
            "weight": weight.detach().to("cpu", torch.float32).contiguous(),
            "bias": torch.tensor(bias, dtype=torch.float32),
            "scale": torch.tensor(scale, dtype=torch.float32),
            "calibration": torch.tensor(calibration, dtype=torch.float32),
        }
        for number, (matrix, offset) in enumerate(hidden):
            self.tensors[f"hidden.{number}.weight"] = matrix.detach().to("cpu", torch.float32).contiguous()
            self.tensors[f"hidden.{number}.bias"] = offset.detach().to("cpu", torch.float32).contiguous()
        _check(self.tensors, config, "the probe")
        self._entries = config.width * len(config.sites)
        a, b = self.tensors["calibration"].double()
        layers = [(w.double(), c.double()) for w, c in _hidden(self.tensors)]
        layers.append((a * self.tensors["weight"].double(), a * self.tensors["bias"].double() + b))
        layers[0] = (self.tensors["scale"].double() * layers[0][0], layers[0][1])
        self._layers = [(w.float().T.contiguous(), c.float()) for w, c in layers[:-1]]
        self._weight, self._bias = layers[-1][0].float(), layers[-1][1].float()

    @classmethod
    def from_estimator(
        cls, config: ProbeConfig, estimator: Any, calibration: tuple[float, float] = (1.0, 0.0)
    ) -> Probe:
        """The artifact of a fitted LinearProbe, DifferenceOfMeans or MLPProbe; the config says what of."""
        layers = [(torch.from_numpy(w), torch.from_numpy(c)) for w, c in estimator.layers()]
        (weight, bias), hidden = layers[-1], layers[:-1]
        scale = 1 / getattr(estimator, "rms_", 1.0) if not hidden else 1.0
        return cls(config, weight[0] / scale, float(bias[0]), scale, calibration, hidden)

    def to(self, device: str | torch.device) -> Probe:
        """Move what `logit` needs; done by itself at the first state of another device."""
        self._layers = [(w.to(device), c.to(device)) for w, c in self._layers]
        self._weight, self._bias = self._weight.to(device), self._bias.to(device)
        return self

    @torch.no_grad()
    def logit(self, state: torch.Tensor) -> torch.Tensor:
        """Calibrated log-odds [...] in float32 of states [..., sites * width] of any float dtype.

        Raises ProbeError for states of another width.
        """
        if state.shape[-1:] != (self._entries,):
            count = len(self.config.sites)
            what = f"states of width {self.config.width}" + (f" of {count} sites side by side" if count > 1 else "")
            raise ProbeError(f"this probe reads {what}, got shape {tuple(state.shape)}")
        if state.device != self._weight.device:
            self.to(state.device)
        state = state.float()
        for weight, bias in self._layers:
            state = relu(state @ weight + bias)
        return state @ self._weight + self._bias

    def score(self, state: torch.Tensor) -> torch.Tensor:
        """Copy intent [...]: the probability in float32 that the label is 1, for states [..., sites * width]."""
        return torch.sigmoid(self.logit(state))

    def check_target(self, target: Fingerprint, name: str = "this target") -> None:
        """Raises ChoiceError, which names both, unless the probe was fitted on this target."""
        differences = self.config.target.mismatch(target)
        if differences:
            raise ChoiceError(
                f"the probe at {self.config.site} was trained on {self.config.target_name} "
                f"({_describe(self.config.target)}) and does not fit {name} ({_describe(target)}); "
                f"they differ in {'; '.join(differences)}. "
                f"Choose the probe of {name}, or train one with `switchsd train`."
            )

    # -- files --------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write the artifact into `folder`, each file whole or not at all; config.json last.

        Raises ProbeError if they cannot be written.
        """
        root = Path(folder)
        try:
            root.mkdir(parents=True, exist_ok=True)
            save_file(self.tensors, root / "probe.safetensors.tmp")
            config = json.dumps(self.config.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            for name, text in (("README.md", model_card(self.config)), ("config.json", config)):
                (root / f"{name}.tmp").write_text(text, encoding="utf-8")
            for name in ("probe.safetensors", "README.md", "config.json"):  # a full disk leaves an older probe whole
                os.replace(root / f"{name}.tmp", root / name)
        except (OSError, SafetensorError) as error:
            advice = "free some space or choose another folder"
            raise ProbeError(f"cannot write the probe to {root} ({error}): {advice}") from error
        return root

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], target: Target | None = None, *, revision: str | None = None
    ) -> Probe:
        """Read a probe from a folder, by the short name of a shipped one (`shipped_probes()`), or from a hub id.

        Raises ChoiceError where there is no such probe and, with a `target`, for a probe of another one; ProbeError for
        a damaged artifact.
        """
        root = _locate(os.fspath(name), revision)
        config_file, weights_file = root / "config.json", root / "probe.safetensors"
        for file in (config_file, weights_file):
            if not file.is_file():
                raise ProbeError(f"{root} is not a whole probe: {file.name} is missing: {AGAIN}")
        try:
            values = json.loads(config_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ProbeError(f"cannot read {config_file} ({error}): {AGAIN}") from error
        config = ProbeConfig.from_dict(values, str(config_file))
        try:
            tensors = load_file(weights_file)
        except (OSError, SafetensorError) as error:
            raise ProbeError(f"cannot read {weights_file} ({error}): {AGAIN}") from error
        _check(tensors, config, str(weights_file))
        a, b = tensors["calibration"].tolist()
        numbers = tensors["bias"].item(), tensors["scale"].item(), (a, b)
        probe = cls(config, tensors["weight"], *numbers, _hidden(tensors))
        if target is not None:
            probe.check_target(target.fingerprint, target.name)
        return probe

    def push_to_hub(self, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the artifact to a model repository of the hub, made if need be; returns its address."""
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        address = str(api.create_repo(repo_id, private=private, exist_ok=True))
        with tempfile.TemporaryDirectory() as scratch:
            self.save_pretrained(scratch)
            api.upload_folder(repo_id=repo_id, folder_path=scratch, commit_message=f"Probe at {self.config.site}")
        return address


def shipped_probes() -> list[str]:
    """Short names of the probes that come with the package."""
    return sorted(file.parent.relative_to(SHIPPED).as_posix() for file in SHIPPED.rglob("config.json"))


def _locate(name: str, revision: str | None) -> Path:
    if name and Path(name).is_dir():
        return Path(name)
    if name in shipped_probes():
        return SHIPPED / name
    if not name or name.startswith((".", "/", "~")) or name.count("/") != 1:
        known = ", ".join(shipped_probes()) or "none"
        raise ChoiceError(f"no probe {name!r}: give a folder, a shipped probe ({known}) or a hub id (org/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["probe.safetensors", "config.json"]))
    except (OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ChoiceError(f"{name!r} is no folder, and cannot be had from the hub: {first}") from error


def _hidden(tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and biases of the hidden layers, in order."""
    count = sum(name.startswith("hidden.") for name in tensors) // 2
    return [(tensors[f"hidden.{n}.weight"], tensors[f"hidden.{n}.bias"]) for n in range(count)]


def _check(tensors: Mapping[str, torch.Tensor], config: ProbeConfig, where: str) -> None:
    """Names, shapes and finite values."""
    count = sum(name.startswith("hidden.") for name in tensors) // 2 if config.kind == "mlp" else 0
    expected = {*SHAPES, *(f"hidden.{n}.{part}" for n in range(count) for part in ("weight", "bias"))}
    if config.kind == "mlp" and not count:
        expected |= {"hidden.0.weight", "hidden.0.bias"}
    if set(tensors) != expected:
        raise ProbeError(f"{where} has tensors {sorted(tensors)}, expected {sorted(expected)}: {AGAIN}")
    shapes = dict(SHAPES)
    entries = config.width * len(config.sites)
    for n in range(count):
        units = tensors[f"hidden.{n}.bias"].numel()
        shapes |= {f"hidden.{n}.weight": (units, entries), f"hidden.{n}.bias": (units,)}
        entries = units
    shapes["weight"] = (entries,)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ProbeError(f"{where}: {name} has shape {list(tensors[name].shape)}, expected {list(shape)}: {AGAIN}")
        if not torch.isfinite(tensors[name]).all():
            raise ProbeError(f"{where}: {name} has values that are not finite: {AGAIN}")


def _describe(target: Fingerprint) -> str:
    return f"{target.architecture}, {target.blocks} blocks, width {target.width}, revision {target.revision}"


def model_card(config: ProbeConfig) -> str:
    """The README.md of an artifact."""
    lines = [
        "---",
        "library_name: switchsd",
        "tags: [probe, speculative-decoding, copy-intent]",
        "---",
        "",
        f"# Copy-intent probe for {config.target_name}",
        "",
        f"{'A linear' if config.kind == 'linear' else 'An MLP'} probe that reads the state at {_places(config.sites)} "
        f"(width {config.width}) of the last position that has one, and gives the probability of `{config.label}`.",
        "",
        "```python",
        "from probes.artifact import Probe",
        "",
        'probe = Probe.from_pretrained("path/to/this/folder", target)',
        "copy = probe.score(state) >= probe.config.threshold",
        "```",
        "",
        f"- Target: {_describe(config.target)}. It fits no other target.",
        f"- Threshold: {config.threshold:.4f} ({config.threshold_rule}).",
        f"- Label settings: {_pairs(config.label_settings)}.",
        f"- Capture store: manifest sha256 {config.store}.",
        "",
        "## Split",
        "",
        *_list(config.split),
        "",
        "## Results on the test part",
        "",
        "| metric | value |",
        "| --- | --- |",
        *(f"| {name} | {_cell(value)} |" for name, value in _flat(config.metrics)),
        "",
        "Values in brackets are 95 % intervals from a bootstrap over documents.",
        "",
        "## Provenance",
        "",
        *_list(config.provenance),
        "",
    ]
    return "\n".join(lines)


def _places(sites: Sequence[str]) -> str:
    """`a`, or `a` and `b` side by side."""
    names = [f"`{site}`" for site in sites]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}, side by side"


def _list(values: Mapping[str, Any]) -> list[str]:
    return [f"- {k}: {_pairs(v) if isinstance(v, Mapping) else _cell(v)}" for k, v in values.items()]


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {_cell(v)}" for k, v in values.items())


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and "estimate" not in value:
            out += _flat(value, f"{prefix}{key} / ")
        else:
            out.append((prefix + key, value))
    return out


def _cell(value: Any) -> str:
    if isinstance(value, Mapping) and "estimate" in value:
        return f"{_cell(value['estimate'])} [{_cell(value['lower'])}, {_cell(value['upper'])}]"
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
