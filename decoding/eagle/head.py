"""The EAGLE head: a decoder block or a few that draft from the target's own states.

Row i pairs the state of token i with the embedding of token i+1 and predicts token i+2; its RoPE position is i.

EAGLE-3 (arXiv 2503.01840): a row's state is several target states side by side, which `fc` maps to the head's
width, or what the head gave at the row before. The first block reads the normed embedding beside the normed state.
EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858): the state is the target's last normed one; `fc` maps embedding and
state to the block's input, and the target's own output matrix gives the logits.

Names are the published ones; `decoding.eagle.formats` reads the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from activations.sites import eagle_sites, last_site
from decoding.eagle.rope import KINDS, NEEDED, frequencies, rotate, table

AGAIN = "train the head again with `switchsd train eagle`, or download it again"
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class HeadError(Exception):
    """A head that cannot be loaded or does not fit its target. The message says what to do."""


class ChoiceError(HeadError):
    """A head that was named and is not there, or one of another target."""


class HeadWarning(UserWarning):
    """Something about a head that does not stop it, and that may well lower what it is worth."""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes, and the places in which the published kinds differ. Keys of a published `config.json` keep their names."""

    hidden_size: int
    """The head's own width."""
    intermediate_size: int
    """Width inside its MLP."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Heads of keys and values."""
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    """How many of its tokens are drafted."""
    head_dim: int = 0
    """0: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in its norms."""
    rope_theta: float = 10000.0
    """Base of the rotary angles."""
    target_hidden_size: int = 0
    """Width of the target's states; 0: the head's own width."""
    num_hidden_layers: int = 1
    """Blocks; only the first one reads the embedding."""
    eagle: int = 3
    """3, or 1 for EAGLE-1 and EAGLE-2, whose weights are alike."""
    features: int = 3
    """Target states that `fc` reads side by side; 0: the target's last normed state alone, and EAGLE-3 has no `fc`."""
    layer_ids: tuple[int, ...] = ()
    """The states are those entering these blocks (`hidden_states[k]`); empty: the usual three."""
    norm_before_residual: bool = False
    """EAGLE-3: the first block adds its attention to the normed state and not to the state."""
    norm_before_fc: bool = False
    """One norm (`input_norm`) over all target states side by side."""
    fc_norm: bool = False
    """A norm (`fc_norm.k`) for each target state."""
    norm_output: bool = False
    """The next row gets the normed output and not the output."""
    first_norm: bool = True
    """EAGLE-1: the first block norms its input; the published ones do not."""
    last_norm: bool = True
    """There is a norm before the output matrix; EAGLE-1 has none."""
    own_head: bool = True
    """It has an output matrix of its own; else the target's."""
    own_embedding: bool = False
    """It has an embedding of its own; else the target's."""
    qk_norm: bool = False
    """Queries and keys are normed, head by head."""
    biases: tuple[str, ...] = ()
    """Linear maps that have a bias."""
    hidden_act: str = "silu"
    """Activation in its MLP."""
    window: int = 0
    """A row sees this many rows, itself included; 0: all."""
    max_position_embeddings: int = 0
    """How long the texts were that it was trained for; 0: unknown. Positions behind it are right, the drafts worse."""
    rope_scaling: dict[str, Any] | None = None
    """`rope_type` and its numbers."""

    def __post_init__(self) -> None:
        optional = ("target_hidden_size", "head_dim", "features", "window", "max_position_embeddings")
        for f in fields(self):
            value = getattr(self, f.name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if f.type == "int" and (not whole or value < (0 if f.name in optional else 1)):
                raise HeadError(f"config.json of an EAGLE head has {f.name} {value!r}, which is no size: {AGAIN}")
            if f.type == "float" and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
                raise HeadError(f"config.json of an EAGLE head has {f.name} {value!r}, which is no number: {AGAIN}")
            if f.type == "bool" and not isinstance(value, bool):
                raise HeadError(f"config.json of an EAGLE head has {f.name} {value!r}: it is true or false: {AGAIN}")
        if self.eagle not in (1, 3):
            raise HeadError(f"eagle is {self.eagle}; it is 3, or 1 for EAGLE-1 and EAGLE-2")
        if self.hidden_act not in ACTIVATIONS:
            raise HeadError(f"the head's hidden_act is {self.hidden_act!r}: there are {', '.join(ACTIVATIONS)}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise HeadError(
                f"the head has {self.num_attention_heads} query heads and {self.num_key_value_heads} key heads, "
                f"which must divide them: {AGAIN}"
            )
        if self.per_head % 2 or not self.per_head:
            raise HeadError(f"the head's head_dim is {self.per_head}; rotary positions need an even one: {AGAIN}")
        if self.layer_ids and len(self.layer_ids) != self.features:
            raise HeadError(
                f"the head's config.json names the layers {list(self.layer_ids)}, "
                f"and its fc reads {self.features} states"
            )
        kind = (self.rope_scaling or {}).get("rope_type", "default")
        if kind not in KINDS:
            raise HeadError(f"the head's rope_scaling is of type {kind!r}: there are {', '.join(KINDS)}")
        lacks = [k for k in NEEDED.get(kind, ()) if not isinstance((self.rope_scaling or {}).get(k), (int, float))]
        if lacks:
            raise HeadError(f"the head's rope_scaling of type {kind!r} lacks {', '.join(lacks)}: {AGAIN}")

    @property
    def per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def target_width(self) -> int:
        return self.target_hidden_size or self.hidden_size

    @property
    def feature_width(self) -> int:
        """Width of what a row reads of the target."""
        return (self.features or 1) * self.target_width

    def sites(self, blocks: int) -> tuple[str, ...]:
        """The sites of a target with so many blocks that the head reads. Raises HeadError where it has not got them."""
        if not self.features:
            return (last_site(blocks),)
        if not self.layer_ids:
            if self.features != 3:
                raise HeadError(
                    f"the head reads {self.features} states of the target and does not say which: "
                    "add eagle_aux_hidden_state_layer_ids (k = what enters block k) to its config.json"
                )
            try:
                return tuple(eagle_sites(blocks))
            except ValueError as error:
                raise HeadError(str(error)) from error
        outside = [k for k in self.layer_ids if not 0 <= k <= blocks]
        if outside:
            raise HeadError(
                f"the head reads layer {outside[0]} and the target has {blocks} blocks: it was trained for another one"
            )
        return tuple(f"resid_pre.{k}" if k < blocks else last_site(blocks) for k in self.layer_ids)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the sizes, and whatever else is not as in a plain EAGLE-3 head."""
        out = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.default is MISSING or value != f.default or f.name in PLAIN:
                out[f.name] = list(value) if isinstance(value, tuple) else value
        return out


PLAIN = ("head_dim", "rms_norm_eps", "rope_theta", "target_hidden_size")
"""Keys that are written whatever their value is."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., width] over the root of its mean square, times weight [width]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig, entering: int) -> None:
        super().__init__()
        heads, keys, dim = config.num_attention_heads, config.num_key_value_heads, config.per_head
        for name, out in (("q_proj", heads * dim), ("k_proj", keys * dim), ("v_proj", keys * dim)):
            setattr(self, name, nn.Linear(entering, out, bias=name in config.biases))
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias="o_proj" in config.biases)
        if config.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(dim, config.rms_norm_eps), nn.RMSNorm(dim, config.rms_norm_eps)


class _Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias="gate_proj" in config.biases)
        self.up_proj = nn.Linear(width, inner, bias="up_proj" in config.biases)
        self.down_proj = nn.Linear(inner, width, bias="down_proj" in config.biases)


class _Block(nn.Module):
    """`input_layernorm` norms the embedding in the first block of EAGLE-3, and the block's input elsewhere."""

    def __init__(self, config: HeadConfig, first: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        beside = first and config.eagle == 3
        if beside:
            self.hidden_norm = nn.RMSNorm(width, eps)
        if beside or not first or config.first_norm:
            self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = _Attention(config, 2 * width if beside else width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = _Mlp(config)


class EagleHead(nn.Module):
    """Parameters under the published names. Training composes `combine`, `project`, `finish`, `carry` and `logits`
    (of a head that `trainable` passes); drafting reads the weights."""

    d2t: torch.Tensor
    """[draft vocabulary]: target id = draft id + d2t[draft id]."""
    t2d: torch.Tensor
    """[vocabulary] bool: the target ids that the draft vocabulary has."""
    format = "switchsd"
    """Whose files it came from."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.rms_norm_eps
        if config.eagle == 1:
            self.fc = nn.Linear(width + config.target_width, width, bias="fc" in config.biases)
        elif config.features:
            self.fc = nn.Linear(config.feature_width, width, bias="fc" in config.biases)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_width, eps) for _ in range(config.features))
        self.midlayer = _Block(config, first=True)
        self.layers = nn.ModuleDict({str(k): _Block(config, first=False) for k in range(1, config.num_hidden_layers)})
        if config.last_norm:
            self.norm = nn.RMSNorm(width, eps)
        if config.own_head:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias="lm_head" in config.biases)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.angles, self.rope_factor = frequencies(
            config.per_head, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )

    @property
    def blocks(self) -> list[_Block]:
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    @property
    def draft_tokens(self) -> torch.Tensor:
        """Target ids [draft vocabulary] of the draft ids."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_vocabulary(self, tokens: torch.Tensor) -> None:
        """Draft id k stands for target id tokens[k]."""
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True

    # -- the parts that training composes -----------------------------------------------------------

    def check_trainable(self) -> None:
        """Raise HeadError unless training can go on from this head."""
        c = self.config
        reasons = {
            "is an EAGLE-1 or -2 head": c.eagle == 1,
            "reads the target's last state only": not c.features,
            f"has {c.num_hidden_layers} blocks": c.num_hidden_layers > 1,
            "has no output matrix of its own": not c.own_head,
            "has an embedding of its own": c.own_embedding,
            "sees a window of rows only": c.window > 0,
        }
        for what, holds in reasons.items():
            if holds:
                raise HeadError(f"training cannot go on from a head that {what}: use an EAGLE-3 head of one block")

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Target states side by side [..., features * target width] -> what a row starts from [..., width]."""
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.chunk(self.config.features, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        combined: torch.Tensor = self.fc(states)
        return combined

    def project(
        self, hidden: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [..., H, D] and keys [..., Hkv, D], and values, of rows [..., width]."""
        layer, dim = self.midlayer, self.config.per_head
        x = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(hidden)], dim=-1)
        attn: Any = layer.self_attn
        q, k, v = (linear(x).unflatten(-1, (-1, dim)) for linear in (attn.q_proj, attn.k_proj, attn.v_proj))
        if self.config.qk_norm:
            q, k = attn.q_norm(q), attn.k_norm(k)
        cos, sin = table(positions, self.angles, self.rope_factor)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The block's output [..., width] from its input and attention result."""
        layer = self.midlayer
        if self.config.norm_before_residual:
            hidden = layer.hidden_norm(hidden)
        hidden = hidden + layer.self_attn.o_proj(attended)
        mlp, x = layer.mlp, layer.post_attention_layernorm(hidden)
        return hidden + mlp.down_proj(ACTIVATIONS[self.config.hidden_act](mlp.gate_proj(x)) * mlp.up_proj(x))

    def carry(self, output: torch.Tensor) -> torch.Tensor:
        """What the next row starts from [..., width], given a row's output [..., width]."""
        return self.norm(output) if self.config.norm_output else output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits [..., draft vocabulary] of outputs [..., width]."""
        logits: torch.Tensor = self.lm_head(self.norm(output) if self.config.last_norm else output)
        return logits

    # -- files --------------------------------------------------------------------------------------

    def save(self, folder: Path, **extra: object) -> None:
        """Write config.json and model.safetensors; a plain EAGLE-3 head is then one of SafeAILab's format."""
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
        values = self.config.to_dict()
        values["head_dim"] = self.config.per_head
        values["target_hidden_size"] = self.config.target_width
        if self.config.layer_ids:
            values["eagle_aux_hidden_state_layer_ids"] = values.pop("layer_ids")
        write(folder, self.state_dict(), {**config, **values, **extra})


def write(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """config.json and model.safetensors (floating point as bfloat16), both or, on a full disk, neither."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16).contiguous() if v.is_floating_point() else v for k, v in state.items()}
    save_file(state, folder / "model.safetensors.tmp")
    (folder / "config.json.tmp").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("model.safetensors", "config.json"):
        os.replace(folder / f"{name}.tmp", folder / name)
