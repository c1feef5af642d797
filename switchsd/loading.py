"""`load`: a decoder from names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from activations.corpus import Prompt
    from activations.target import Target
    from decoding.decoder import Decoder
    from decoding.draft.drafter import DraftModelDrafter
    from decoding.drafters import Drafter
    from decoding.eagle.drafter import EagleDrafter
    from decoding.lazy import Lazy
    from decoding.modes import ModeSettings
    from decoding.policies.policy import PolicyArtifact
    from decoding.serving.hugging_face.custom_generate import CustomGenerate
    from probes.artifact import Probe
    from probes.length_head import LengthHead
    from switchsd.artifacts import Kind

LOG = logging.getLogger("switchsd")
AUTO = "auto"
T = TypeVar("T")


@dataclass(frozen=True)
class LoadConfig:
    """How a command loads its target: fields are options of `activations.target.load_target`."""

    dtype: str = "auto"
    """auto (bfloat16), bfloat16, float16 or float32."""
    device_map: str | None = None
    """How to spread the target over devices: auto, balanced, sequential, or one device (cpu, cuda:1)."""
    quantization: str | None = None
    """Quantize the weights as they are loaded: bnb-4bit, bnb-8bit, torchao-int8 or torchao-int4."""


def load(
    target: str | os.PathLike[str] | Target = "smollm2",
    probe: str | os.PathLike[str] | Probe | None = AUTO,
    drafter: str | os.PathLike[str] | None = AUTO,
    *,
    draft: str | os.PathLike[str] | None = AUTO,
    policy: str | os.PathLike[str] | None = AUTO,
    neural: str = "eagle",
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    quantization: str | None = None,
    **settings: Any,
) -> Decoder:
    """A decoder for a target.

    target: an alias (`smollm2`, `gemma3-270m`), a hub id, a folder, or a loaded `Target`.
    probe, drafter: a folder (a hub id for a probe), None for none, or "auto": the one made on this machine or shipped
        for this target, and none if there is none. `drafter` is an EAGLE head.
    draft: a draft model: a folder that `switchsd train draft` made, another language model with the target's tokenizer
        (a hub id or a folder), None, or "auto".
    policy: a folder that `switchsd train-policy` made, for the learned mode of its kind, None, or "auto".
    neural: the neural side of mode switchsd: "eagle", "draft", or "none" (only copying is drafted).
    dtype, device, device_map, quantization: as `activations.target.load_target` takes them.
    settings: fields of `decoding.modes.ModeSettings`: kappa, candidates, gate, tau, ...

    What cannot be loaded or does not fit the target raises the error of its kind (TargetError, ProbeError, HeadError,
    DraftError, PolicyError); an unknown setting raises ValueError.
    """
    from activations.target import Target, load_target
    from decoding.decoder import Decoder
    from decoding.modes import ModeSettings

    try:
        chosen = ModeSettings(neural=neural, **settings)
    except TypeError as error:
        known = ", ".join(field.name for field in fields(ModeSettings))
        raise ValueError(
            f"unknown setting in {', '.join(settings)}: there are {known} (mode, max_new_tokens and the like belong to "
            "generate)"
        ) from error
    how: dict[str, Any] = {"dtype": dtype, "device": device, "device_map": device_map, "quantization": quantization}
    loaded = target if isinstance(target, Target) else load_target(target, **how)
    return Decoder(
        loaded,
        probe=_probe(loaded, probe),
        neural=_neural(loaded, drafter, draft),
        settings=chosen,
        lengths=_lengths(loaded)
        if probe == AUTO or chosen.gate == "cost"
        else None,  # who names a probe means its gate
        elsewhere=_elsewhere(loaded, drafter, draft),
        policies=_policies(loaded, policy),
    )


def custom_generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    probe: str | os.PathLike[str] | Probe | None = AUTO,
    drafter: str | os.PathLike[str] | None = AUTO,
    *,
    mode: str = "switchsd",
    **options: Any,
) -> CustomGenerate:
    """What makes `model.generate(..., custom_generate=...)` draft: for a `transformers` model that is loaded already,
    and stays as it is. `mode` is one that is lossless; the other arguments are those of `load`.

    Raises TargetError for a model that cannot be drafted for, and DecodingError for a mode without its parts.
    """
    from activations.target import target_of
    from decoding.serving.hugging_face.custom_generate import CustomGenerate

    return CustomGenerate(load(target_of(model, tokenizer), probe, drafter, **options), mode)


def _lengths(target: Target) -> LengthHead | None:
    """The length head that fits; it is small, and only the cost gate reads it."""
    from probes.length_head import LengthHead

    folder = first_fitting("lengths", target)
    return None if folder is None else LengthHead.from_pretrained(folder, target)


def _probe(target: Target, probe: str | os.PathLike[str] | Probe | None) -> Probe | None:
    from probes.artifact import Probe
    from switchsd.artifacts import candidates

    auto = isinstance(probe, str) and probe == AUTO
    found = first_fitting("probe", target) if auto else probe
    if found is None:
        if auto and (others := list(candidates("probe", target.name))):
            told = "Probes of another %s are in %s, and left alone: a probe fits the weights that it was trained for."
            LOG.warning(told, target.name, others[0].parent)
        return None
    loaded = found if isinstance(found, Probe) else Probe.from_pretrained(found)
    loaded.check_target(target.fingerprint, target.name)
    return loaded


def _neural(
    target: Target, eagle: str | os.PathLike[str] | None, draft: str | os.PathLike[str] | None
) -> Lazy[Drafter]:
    """The neural drafters. What was named is loaded now, and refused now; what fits by itself when it is used."""
    from decoding.lazy import Lazy

    makers: dict[str, Callable[[], Drafter]] = {}
    for name, asked, load_one in (("eagle", eagle, _eagle), ("draft", draft, _draft)):
        if asked == AUTO:
            folder = first_fitting(name, target)  # type: ignore[arg-type]
            if folder is not None:
                makers[name] = partial(load_one, target, folder)
        elif asked is not None:
            makers[name] = partial(_same, load_one(target, asked))
    return Lazy(makers)


def _elsewhere(
    target: Target, eagle: str | os.PathLike[str] | None, draft: str | os.PathLike[str] | None
) -> Lazy[Drafter]:
    """The same in processes of their own, each started when a mode first asks for it."""
    from decoding.lazy import Lazy
    from decoding.minedraft.remote import RemoteDrafter, own_device
    from decoding.minedraft.worker import DrafterSpec
    from switchsd.artifacts import CONFIGS

    where: dict[str, Any] = {
        "target": target.name, "dtype": str(target.dtype).removeprefix("torch."), **own_device(target.device)
    }  # fmt: skip
    makers: dict[str, Callable[[], Drafter]] = {}
    for name, asked in (("eagle", eagle), ("draft", draft)):
        source = first_fitting(name, target) if asked == AUTO else asked  # type: ignore[arg-type]
        if source is None:
            continue
        made = name == "eagle" or (Path(source) / CONFIGS["draft"]).is_file()
        what: dict[str, Any] = {"folder" if made else "model": os.fspath(source)}
        makers[name] = partial(RemoteDrafter, DrafterSpec(name, **where, **what))
    return Lazy(makers)


def _policies(target: Target, policy: str | os.PathLike[str] | None) -> Lazy[PolicyArtifact]:
    """The policies of the learned modes, by kind. One that was named is loaded now, and refused now."""
    from decoding.lazy import Lazy
    from decoding.policies.policy import PolicyArtifact

    kinds: tuple[Kind, ...] = ("ltd", "cospec")
    makers: dict[str, Callable[[], PolicyArtifact]] = {}
    if policy is not None:
        for kind in kinds:
            folder = first_fitting(kind, target)
            if folder is not None:
                makers[kind] = partial(PolicyArtifact.load, folder)
    if policy is not None and policy != AUTO:
        named = PolicyArtifact.load(policy)
        named.check_target(target)
        makers[named.kind] = partial(_same, named)
    return Lazy(makers)


def _same(made: T) -> T:
    return made


def _eagle(target: Target, source: str | os.PathLike[str]) -> EagleDrafter:
    from decoding.eagle.drafter import EagleDrafter
    from decoding.eagle.formats import load_head
    from switchsd.artifacts import made_for

    folder = Path(source)
    theirs = made_for(folder)
    check_made_for("head", theirs, target, folder, "--neural none")  # a published head does not say
    head = load_head(folder, target.vocab_size)
    if theirs is None:  # nobody has vouched for it
        from decoding.eagle.selfcheck import ensure_head

        ensure_head(target, head, folder)
    return EagleDrafter(target, head)


def _draft(target: Target, source: str | os.PathLike[str]) -> DraftModelDrafter:
    """From a folder that `switchsd train draft` made, or any language model's folder or hub id."""
    from activations.target import TargetError
    from decoding.draft.drafter import DraftModelDrafter, drafter_of
    from decoding.draft.model import DraftError, independent
    from decoding.eagle.head import ChoiceError
    from switchsd.artifacts import CONFIGS, made_for

    folder, config = Path(source), CONFIGS["draft"]
    if (folder / config).is_file():
        check_made_for("draft model", made_for(folder, config), target, folder, "another --draft")
        return drafter_of(folder, target)
    try:
        return DraftModelDrafter(target, independent(source, target))
    except DraftError as error:  # it names both already
        raise ChoiceError(str(error)) from error
    except TargetError as error:
        raise ChoiceError(f"{os.fspath(source)!r} cannot draft: {error}") from error


def check_made_for(what: str, theirs: Any, target: Target, folder: Path, instead: str) -> None:
    """Raise ChoiceError where files say that they were made for another target."""
    from decoding.eagle.head import ChoiceError

    mine = target.fingerprint.to_dict()
    if isinstance(theirs, dict) and theirs != mine:
        different = "; ".join(f"{k}: {theirs.get(k)} and {v}" for k, v in mine.items() if theirs.get(k) != v)
        raise ChoiceError(
            f"the {what} in {folder} was trained for another target than {target.name} ({different}): "
            f"choose the one that was trained for it, or use {instead}"
        )


def first_fitting(kind: Kind, target: Target) -> Path | None:
    """The first artifact under the target's name that was made for exactly this target."""
    from switchsd.artifacts import CONFIGS, candidates, made_for

    mine = target.fingerprint.to_dict()
    config = CONFIGS[kind]
    return next((folder for folder in candidates(kind, target.name) if made_for(folder, config) == mine), None)


def measure_costs(decoder: Decoder, modes: Iterable[str]) -> None:
    """Have the cost table ready, and say what takes so long the first time, where a mode (settings may follow after a
    slash, as in a benchmark's columns) reads it."""
    from switchsd.show import bar

    sides = {side for mode in modes if (side := _side(mode, decoder.settings)) is not None}
    drafters = sorted(sides & set(decoder.neural))
    if not sides or decoder.costs_known(*drafters):
        return
    with bar("measuring what a step costs (once, about 12 s)"):
        decoder.costs(*drafters)


def _side(column: str, settings: ModeSettings) -> str | None:
    """The neural side of a mode that may read the cost table; None for one that does not."""
    from decoding.modes import get_mode

    mode, *changes = column.split("/")
    gated = get_mode(mode).neural == "chosen" and settings.gate in ("auto", "cost")
    if mode in ("ar", "copy", "smcsd", "ltd") or (settings.neural_tree != "priced" and not gated):
        return None
    named = [c.removeprefix("neural=") for c in changes if c.startswith("neural=")]
    return named[-1] if named and get_mode(mode).neural == "chosen" else get_mode(mode).side(settings)


def chosen_prompts(source: str | os.PathLike[str] | None, split: str | None, **how: Any) -> list[Prompt]:
    """What --prompts (read with `how`) or --split names; nothing where neither is given. Raises UsageError."""
    from activations.corpus import SPLITS, load_corpus, read_prompts
    from switchsd.options import UsageError

    if source is not None and split is not None:
        raise UsageError("--split is about the embedded prompts: leave it out, or leave --prompts out")
    if source == "":  # which would be this folder
        raise UsageError("--prompts is empty: name a source, or leave it out")
    if split is not None and split not in SPLITS:
        raise UsageError(f"unknown split {split!r}: use {' or '.join(SPLITS)}, or leave --split out for both")
    try:
        return read_prompts(source, **how) if source is not None else load_corpus(split) if split else []
    except ValueError as error:
        raise UsageError(str(error)) from error
