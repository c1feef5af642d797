"""Reading EAGLE heads of every published format: names and settings become one `HeadConfig` and one set of tensors.

            SafeAILab            speculators                SpecForge                ModelOpt
known by    none of the others   speculators_model_type     architectures            eagle_config, layers.0.
                                                            LlamaForCausalLMEagle3
blocks      midlayer.            layers.k.                  midlayer.                layers.k.
settings    top level            transformer_layer_config   top level                top level
layer ids   the usual three      top level:                 eagle_config:            eagle_config:
                                 what enters block k        what leaves block k      what leaves block k
norm_output -                    as named here              a norm before lm_head    -

A setting that the weights show is taken from the weights; where both speak and differ, that is an error. What can
only be guessed is guessed as the format's own library does, with a `HeadWarning`.

Sources: the repositories SafeAILab/EAGLE, vllm-project/speculators, sgl-project/SpecForge and NVIDIA/Model-Optimizer.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from decoding.eagle.head import AGAIN, ChoiceError, EagleHead, HeadConfig, HeadError, HeadWarning

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
OLD_NORMS = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
UNUSED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Ends of names of tensors that follow from the settings or are the target's."""
IDS = "eagle_aux_hidden_state_layer_ids"


def load_head(folder: Path, target_vocab: int) -> EagleHead:
    """The head in a folder, for a target with so many tokens. Raises HeadError, which says what is wrong."""
    raw = read_config(folder)
    state = normal_names(read_tensors(folder))
    form = recognise(raw, state)
    config = head_config(raw, state, form, target_vocab, folder)
    tokens = draft_vocabulary(state, config, folder)
    for name, tensor in state.items():
        if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
            raise HeadError(f"{name} in {folder} holds values that are not finite: {AGAIN}")
    state = {k: v.float() if v.is_floating_point() and k != "embed_tokens.weight" else v for k, v in state.items()}
    state["d2t"] = tokens - torch.arange(len(tokens))
    state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
    with torch.device("meta"):  # no random start that nobody needs
        head = EagleHead(config)
    try:
        result = head.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        told = " ".join(str(error).split())[:300]
        raise HeadError(f"the tensors in {folder} do not fit its config.json ({told}): {AGAIN}") from error
    if result.missing_keys or result.unexpected_keys:
        raise HeadError(
            f"the tensors in {folder} do not make an EAGLE head: missing {result.missing_keys}, "
            f"not understood {result.unexpected_keys}"
        )
    head.format = form
    return head.eval().requires_grad_(False)


# -- files ------------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """A head's config.json as it stands. Raises ChoiceError where there is none, HeadError for a damaged one."""
    file = folder / "config.json"
    if not file.is_file():
        raise ChoiceError(f"{folder} holds no EAGLE head: config.json is missing: give the folder of one")
    return _json(file)


def _json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("it holds no object")
        return raw
    except (OSError, ValueError) as error:
        raise HeadError(f"{file} is damaged ({error}): {AGAIN}") from error


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder: safetensors if there are any, else torch files, read as weights only.

    Raises HeadError if they cannot be read, or hold anything else.
    """
    out: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            if file.suffix == ".safetensors":
                part = load_file(file)
            else:
                part = torch.load(file, map_location="cpu", weights_only=True)
            if not isinstance(part, dict) or not all(isinstance(v, torch.Tensor) for v in part.values()):
                raise ValueError("it holds something else than tensors by name")
        except Exception as error:  # torch and safetensors have many
            raise HeadError(f"cannot read the weights in {file} ({error}): {AGAIN}") from error
        out |= part
    return out


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises HeadError if there are none, or an index names one that is not here."""
    for suffix, index in zip(("safetensors", "bin"), INDICES, strict=True):
        if (folder / index).is_file():
            named = _json(folder / index).get("weight_map")
            names = sorted({str(n) for n in named.values()}) if isinstance(named, dict) else []
            if not names:
                raise HeadError(f"{folder / index} is damaged (it has no weight_map): {AGAIN}")
            for name in names:
                if "/" in name or "\\" in name or not name.endswith(f".{suffix}"):
                    raise HeadError(f"{folder / index} names {name!r}, which is no .{suffix} file of this folder")
                if not (folder / name).is_file():
                    raise HeadError(f"{folder} lacks {name}, which its index names: {AGAIN}")
            return [folder / name for name in names]
        found = sorted(folder.glob("*.safetensors" if suffix == "safetensors" else "pytorch_model*.bin"))
        if found:
            return found
    raise HeadError(f"{folder} has no model.safetensors or pytorch_model.bin: {AGAIN}")


def normal_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors under the names of `EagleHead`. Raises HeadError if two would have the same name."""
    out = {}
    for name, tensor in state.items():
        name = name.removeprefix("model.").replace("layers.0.", "midlayer.")
        for old, new in OLD_NORMS.items():
            name = name.replace(old, new) if name.startswith(old) else name
        if not name.endswith(UNUSED):
            if name in out:
                raise HeadError(f"the head's files hold {name} twice, under two names: {AGAIN}")
            out[name] = tensor
    return out


def recognise(raw: dict[str, Any], state: dict[str, torch.Tensor]) -> str:
    """Whose format it is: switchsd, speculators, specforge, modelopt or safeailab.

    Raises HeadError for a speculators head of another kind than EAGLE.
    """
    if raw.get("speculators_model_type") is not None:
        kind = raw["speculators_model_type"]
        if kind not in ("eagle", "eagle3"):
            raise HeadError(f"a speculators head of the kind {kind!r} cannot be used: there are eagle and eagle3")
        return "speculators"
    if "switchsd" in raw:
        return "switchsd"
    modelopt = {"use_aux_hidden_state", "use_last_layernorm", "use_input_layernorm_in_first_layer"}
    nested = raw.get("eagle_config")
    if (isinstance(nested, dict) and "use_last_layernorm" in nested) or modelopt & raw.keys():
        return "modelopt"
    if any("Eagle3" in str(a) for a in raw.get("architectures") or ()):
        return "specforge"
    return "modelopt" if isinstance(nested, dict) else "safeailab"


# -- settings ---------------------------------------------------------------------------------------


def head_config(
    raw: dict[str, Any], state: dict[str, torch.Tensor], form: str, target_vocab: int, folder: Path
) -> HeadConfig:
    """The settings, from config.json and from what the weights show.

    Raises HeadError for a key that is missing or contradicts the weights, and for a head of another vocabulary.
    """
    layer = _layer_config(raw, form)
    nested = raw.get("eagle_config") if isinstance(raw.get("eagle_config"), dict) else {}

    def look(name: str) -> Any:
        return next((d[name] for d in (raw, nested, layer) if d and d.get(name) is not None), None)

    def shown(name: str, tensor: str) -> bool:
        """A setting that a tensor shows; the file may say the same, or nothing."""
        there, said = tensor in state, look(name)
        if isinstance(said, bool) and said != there and not (form == "specforge" and not there):
            raise HeadError(
                f"config.json in {folder} has {name} {str(said).lower()}, and the weights have "
                f"{'a' if there else 'no'} tensor {tensor}: one of them is of another head"
            )
        return there

    eagle = kind_of(state, folder)
    values: dict[str, Any] = {"eagle": eagle, "vocab_size": target_vocab}
    for f in fields(HeadConfig):
        if f.type in ("int", "float", "str") and f.name not in ("eagle", "features", "window") and layer.get(f.name):
            values[f.name] = layer[f.name]
    _sizes_from_tensors(values, state)
    required = [f.name for f in fields(HeadConfig) if f.default is MISSING and f.name not in values]
    required = [name for name in required if name != "draft_vocab_size"]
    if required:
        raise HeadError(f"config.json in {folder} lacks a key of an EAGLE head: {', '.join(required)}: {AGAIN}")
    if not all(isinstance(values[k], int) and values[k] > 0 for k in ("hidden_size", "num_attention_heads")):
        HeadConfig(**values, draft_vocab_size=1)  # says which
    if "t2d" in state:
        values["vocab_size"] = state["t2d"].shape[0]
    if values["vocab_size"] != target_vocab:
        raise HeadError(
            f"the head in {folder} is for a vocabulary of {values['vocab_size']}, the target has {target_vocab}: "
            "use the head that was trained for this target"
        )
    blocks = 1 + max((int(n.split(".")[1]) for n in state if n.startswith("layers.")), default=0)
    if values.get("num_hidden_layers", blocks) != blocks:
        raise HeadError(
            f"config.json in {folder} says {values['num_hidden_layers']} blocks, and the weights have {blocks}: {AGAIN}"
        )
    values["num_hidden_layers"] = blocks
    values |= _states_read(raw, nested or {}, state, values, eagle, look, folder)
    values["rope_theta"], values["rope_scaling"] = _rope(layer, folder)
    values["window"] = _window(layer, folder)
    values["biases"] = tuple(sorted({n.split(".")[-2] for n in state if n.endswith(".bias")}))
    values["qk_norm"] = "midlayer.self_attn.q_norm.weight" in state
    values["own_head"] = "lm_head.weight" in state
    values["own_embedding"] = "embed_tokens.weight" in state
    values["last_norm"] = "norm.weight" in state or eagle == 3
    values["first_norm"] = "midlayer.input_layernorm.weight" in state
    if eagle == 3:
        values["first_norm"] = True
        values["norm_before_fc"] = shown("norm_before_fc", "input_norm.weight")
        values["fc_norm"] = shown("fc_norm", "fc_norm.0.weight")
        values["norm_before_residual"] = _flag(look("norm_before_residual"), "norm_before_residual", form, folder)
        newer = values["fc_norm"] or values["norm_before_fc"]
        values["norm_output"] = _norm_output(look("norm_output"), form, newer, folder)
    said = look("draft_vocab_size")
    values["draft_vocab_size"] = state["lm_head.weight"].shape[0] if values["own_head"] else target_vocab
    if not values["own_head"] and said not in (None, target_vocab):
        raise HeadError(
            f"{folder} has a draft vocabulary of {said} and no lm_head.weight: only a head that drafts all "
            f"{target_vocab} tokens can use the target's own output matrix"
        )
    return HeadConfig(**values)


def kind_of(state: dict[str, torch.Tensor], folder: Path) -> int:
    """3 for EAGLE-3, 1 for EAGLE-1 and -2. Raises HeadError for weights of neither."""
    query, normed = state.get("midlayer.self_attn.q_proj.weight"), "midlayer.hidden_norm.weight" in state
    if query is None:
        raise HeadError(
            f"{folder} is not an EAGLE head: its weights have no midlayer or layers.0 "
            f"({', '.join(sorted(state)[:4]) or 'nothing'}, ...)"
        )
    fc = state.get("fc.weight")
    if not normed and (fc is None or query.shape[1] != fc.shape[0]):
        raise HeadError(f"{folder} is not an EAGLE head: midlayer.hidden_norm.weight missing: {AGAIN}")
    return 3 if normed else 1


def _layer_config(raw: dict[str, Any], form: str) -> dict[str, Any]:
    """Where sizes and rope stand. speculators leaves out what is its model's default: filled in as it does itself."""
    if form != "speculators":
        return raw
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise HeadError(f"config.json of a speculators head has no transformer_layer_config: {AGAIN}")
    from transformers import AutoConfig

    given = {k: v for k, v in inner.items() if k != "model_type"}
    try:
        whole: dict[str, Any] = AutoConfig.for_model(inner.get("model_type", "llama"), **given).to_dict()
    except Exception as error:  # transformers checks what it is given, each class in its own way
        raise HeadError(f"the transformer_layer_config of the head is damaged ({error}): {AGAIN}") from error
    return whole


def _sizes_from_tensors(values: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """Sizes that config.json does not name."""
    shapes = {k: tuple(v.shape) for k, v in state.items()}
    norm, gate = shapes.get("midlayer.post_attention_layernorm.weight"), shapes.get("midlayer.mlp.gate_proj.weight")
    q, k = (shapes.get(f"midlayer.self_attn.{name}_proj.weight") for name in "qk")
    if norm:
        values.setdefault("hidden_size", norm[0])
    if gate:
        values.setdefault("intermediate_size", gate[0])
    heads = values.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and q and not q[0] % heads:
        values.setdefault("head_dim", q[0] // heads)
    dim = values.get("head_dim")
    if isinstance(dim, int) and dim > 0 and k and not k[0] % dim:
        values.setdefault("num_key_value_heads", k[0] // dim)


def _states_read(
    raw: dict[str, Any],
    nested: dict[str, Any],
    state: dict[str, torch.Tensor],
    values: dict[str, Any],
    eagle: int,
    look: Any,
    folder: Path,
) -> dict[str, Any]:
    """Which states of the target the head reads, and how wide they are."""
    width = values["hidden_size"]
    given, entering = look("target_hidden_size"), state["fc.weight"].shape[1] if "fc.weight" in state else 0
    if given is not None and (not isinstance(given, int) or given < 1):
        raise HeadError(f"config.json in {folder} has target_hidden_size {given!r}, which is no size: {AGAIN}")
    if eagle == 1:
        if entering != width + (given or width):
            raise HeadError(
                f"fc in {folder} reads {entering} values; an EAGLE-1 head of width {width} reads {2 * width}"
            )
        return {"features": 0, "target_hidden_size": entering - width}
    if not entering:
        if look("use_aux_hidden_state") is not False:
            raise HeadError(f"{folder} is not an EAGLE head: fc.weight missing: {AGAIN}")
        return {"features": 0, "target_hidden_size": width}
    if look("use_aux_hidden_state") is False:
        raise HeadError(f"config.json in {folder} has use_aux_hidden_state false, and the weights have an fc: {AGAIN}")
    ids = layer_ids(raw, nested, folder)
    target = given or width
    if not given and entering not in (3 * width, 4 * width, 5 * width):  # the head is not as wide as its target
        count = len(ids) or 3
        target = entering // count if entering % count == 0 else width
    if entering % target:
        raise HeadError(
            f"fc in {folder} reads {entering} values, which are no whole number of states of width {target}: "
            "config.json needs the right target_hidden_size"
        )
    return {"features": entering // target, "target_hidden_size": target, "layer_ids": ids}


def layer_ids(raw: dict[str, Any], nested: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Blocks whose entering states the head reads; empty where the file does not say.

    At the top level k means what enters block k, inside eagle_config what leaves it. Raises HeadError for anything but
    whole numbers.
    """
    sites = (raw.get("switchsd") or {}).get("sites") if isinstance(raw.get("switchsd"), dict) else None
    said = {"top": raw.get(IDS), "nested": nested.get(IDS)}
    found: dict[str, tuple[int, ...]] = {}
    for where, ids in said.items():
        if ids is None or ids == []:
            continue
        if not isinstance(ids, list) or not all(isinstance(k, int) and not isinstance(k, bool) for k in ids):
            raise HeadError(f"config.json in {folder} has {IDS} {ids!r}: they are whole numbers: {AGAIN}")
        found[where] = tuple(k + (where == "nested") for k in ids)
    if len(set(found.values())) > 1:
        warnings.warn(
            f"config.json in {folder} names the layers {said['top']} at its top level and {said['nested']} in "
            "eagle_config, which do not mean the same: the first are used",
            HeadWarning,
            stacklevel=2,
        )
    if found:
        return next(iter(found.values()))
    numbers = [str(s).removeprefix("resid_pre.") for s in sites or ()]
    return tuple(int(n) for n in numbers) if numbers and all(n.isdigit() for n in numbers) else ()


def _rope(layer: dict[str, Any], folder: Path) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from wherever a version of transformers has put them."""
    parts = []
    for name in ("rope_parameters", "rope_scaling"):
        part = layer.get(name) or {}
        if not isinstance(part, dict):
            raise HeadError(f"config.json in {folder} has {name} {part!r}, which is no object: {AGAIN}")
        if any(isinstance(v, dict) for v in part.values()):  # one for each kind of block
            kinds = layer.get("layer_types") or list(part)
            part = part.get(kinds[0]) or {}
        parts.append(part)
    scaling = {k: v for k, v in {**parts[0], **parts[1]}.items() if v is not None}
    theta = layer.get("rope_theta") or scaling.pop("rope_theta", None) or 10000.0
    kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
    partial = layer.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise HeadError(f"the head in {folder} turns a part of each head only ({partial}), which cannot be done")
    if kind in ("default", "mrope"):  # mrope gives text the plain positions
        return theta, None
    drop = ("type", "rope_theta", "partial_rotary_factor")
    return theta, {"rope_type": kind, **{k: v for k, v in scaling.items() if k not in drop}}


def _window(layer: dict[str, Any], folder: Path) -> int:
    """Rows that a row sees, itself included; 0 for all."""
    size, kinds = layer.get("sliding_window") or layer.get("window") or 0, set(layer.get("layer_types") or ())
    used = layer.get("use_sliding_window", not str(layer.get("model_type", "")).startswith("qwen"))
    if not size or not used or (kinds and "sliding_attention" not in kinds):
        return 0
    if len(kinds) > 1:
        raise HeadError(f"the head in {folder} has blocks with and without a window, which cannot be done")
    if not isinstance(size, int) or size < 1:
        raise HeadError(f"config.json in {folder} has sliding_window {size!r}, which is no size: {AGAIN}")
    return size


def _flag(value: Any, name: str, form: str, folder: Path) -> bool:
    if value is None and form == "speculators":
        warnings.warn(
            f"config.json in {folder} does not say {name}: it is taken to be false, as speculators does; vLLM takes it "
            "to be true. `switchsd head check` says which one fits",
            HeadWarning,
            stacklevel=2,
        )
    if value not in (None, True, False):
        raise HeadError(f"config.json in {folder} has {name} {value!r}: it is true or false: {AGAIN}")
    return bool(value)


def _norm_output(value: Any, form: str, newer: bool, folder: Path) -> bool:
    """SpecForge calls the norm before the output matrix by this name, which every head has."""
    if form in ("speculators", "switchsd") or newer:
        return _flag(value or False, "norm_output", "", folder)
    if value is False and form == "specforge":
        warnings.warn(
            f"config.json in {folder} has norm_output false, by which SpecForge means no norm before the output "
            "matrix: the norm in its weights is used, as servers do. `switchsd head check` says whether it fits",
            HeadWarning,
            stacklevel=2,
        )
    return False


# -- draft vocabulary -------------------------------------------------------------------------------


def draft_vocabulary(state: dict[str, torch.Tensor], config: HeadConfig, folder: Path) -> torch.Tensor:
    """Target ids [draft vocabulary] of the draft ids; takes d2t and t2d out of `state`.

    Raises HeadError for maps that do not fit the vocabulary or each other.
    """
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    size, vocab = config.draft_vocab_size, config.vocab_size
    own = torch.arange(size)
    if d2t is None:
        if size != vocab:
            raise HeadError(f"{folder} has a draft vocabulary of {size} but no d2t tensor")
        return own
    if d2t.shape != (size,):
        raise HeadError(f"the d2t tensor in {folder} has the shape {list(d2t.shape)}, and {size} tokens are drafted")
    d2t = d2t.to(torch.int64)
    tokens = own + d2t
    if t2d is not None and torch.equal(d2t, t2d.bool().nonzero().flatten()):
        return d2t  # the ids themselves, and t2d bears it out
    if tokens.min() < 0 or tokens.max() >= vocab or len(tokens.unique()) != size:
        raise HeadError(
            f"the d2t tensor in {folder} does not map into the target's vocabulary of {vocab}: token id = "
            "draft id + d2t[draft id] must be inside it, and no id twice"
        )
    if t2d is not None and (int(t2d.sum()) != size or not t2d.bool()[tokens].all()):
        raise HeadError(
            f"the d2t and t2d tensors in {folder} speak of different tokens ({size} and {int(t2d.sum())}): one of them "
            "was never filled in"
        )
    return tokens
