"""The target: a frozen causal language model, its tokenizer, and one forward that all packages use."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from activations import attention, packaged
from activations.cache import KVCache, attention_mask
from activations.chat_template import ChatTemplate, MarkerError
from activations.fast import FastForward, fast_forward
from activations.linear import PackedLinear, pack, unpacked
from activations.sites import BRANCHES, Site, SiteReader, parse_sites
from activations.structure import Structure, find_blocks, read_structure

attention.register()


ROLES = ("system", "user", "assistant", "tool", "developer")


class TargetError(Exception):
    """A target that cannot be loaded or cannot be used this way. The message says what to do."""


@dataclass(frozen=True)
class Fingerprint:
    """What must agree for a probe or a drafter to fit a target."""

    architecture: str
    width: int
    blocks: int
    vocabulary: str
    """sha256 of the sorted vocabulary."""
    revision: str
    """Hub commit, or a hash over samples of the weight files; and how they were quantized at loading, if they were."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def mismatch(self, other: Fingerprint) -> list[str]:
        """Names and values of the fields that differ. The revision counts: states move with the weights."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [f"{k}: {mine[k]} and {theirs[k]}" for k in mine if mine[k] != theirs[k]]


class Target:
    """A frozen causal LM. `load_target` makes one."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        folder: Path | None,
        quantization: str | None = None,
        freeze: bool = True,
    ):
        """`freeze`: the model's parameters need no gradients from now on, and it does not train."""
        self.model: Any = model.eval().requires_grad_(False) if freeze else model  # `generate` is in none of its types
        self.tokenizer = tokenizer
        self.name = name
        self.folder = folder
        self.quantization = quantization
        self.config = model.config.get_text_config()
        self.backbone: Any = model.get_decoder()  # families differ: torch modules without a common type
        blocks = find_blocks(self.backbone, int(self.config.num_hidden_layers))
        if blocks is None:
            raise TargetError(
                f"{name} is a {type(model).__name__}, whose blocks cannot be found: {type(self.backbone).__name__} "
                f"has no single list of {self.config.num_hidden_layers} blocks. Choose a decoder-only model"
            )
        # transformers renamed the keyword after 5.22; a model swallows the other one, and forgets the text.
        named = inspect.signature(self.backbone.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"
        self.layers: Any = blocks
        self.embed: Any = model.get_input_embeddings()
        self.head: Any = model.get_output_embeddings()
        types = set(getattr(self.config, "layer_types", None) or ())
        unknown = types - {"full_attention", "sliding_attention"}
        if unknown:
            raise TargetError(
                f"{name} ({type(model).__name__}) has blocks of {', '.join(sorted(unknown))}, whose masks are not "
                "known: choose a target with full or sliding-window attention"
            )
        window = getattr(self.config, "sliding_window", None)
        if getattr(self.config, "use_sliding_window", True) is False or (types and "sliding_attention" not in types):
            window = None  # a window that no block has
        self.window: int | None = window
        self.hybrid = window is not None and "sliding_attention" in types
        self.learned_positions = any(
            isinstance(m, nn.Embedding) and m is not self.embed for m in self.backbone.children()
        )
        self._fast: FastForward | None = None
        self._readers: list[SiteReader] = []
        self._hooks: list[Mapping[int, Any]] = []
        self._ordinary: dict[str, nn.Linear] = {}

    # -- what it is ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where tokens go in, and where states and logits come out."""
        device = self.embed.weight.device
        return device if device.type != "meta" else torch.device(self.embed._hf_hook.execution_device)  # offloaded

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def width(self) -> int:
        return int(self.config.hidden_size)

    @property
    def blocks(self) -> int:
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        return int(self.embed.weight.shape[0])

    @property
    def max_length(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", 2**31))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        ids: set[int] = set()
        for source in (self.model.generation_config, self.config, self.tokenizer):
            value = getattr(source, "eos_token_id", None)
            ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
        return frozenset(ids)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        revision = getattr(self.model.config, "_commit_hash", None) or (
            weights_hash(self.folder) if self.folder else "unknown"
        )
        if self.quantization is not None:  # other weights, and so other states
            revision = f"{revision}+{self.quantization}"
        return Fingerprint(
            architecture=type(self.model).__name__,
            width=self.width,
            blocks=self.blocks,
            vocabulary=vocabulary_hash(self.tokenizer),
            revision=revision,
        )

    # -- text ---------------------------------------------------------------------------------------

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def encode(self, prompt: str | Sequence[Mapping[str, str]] | Sequence[int]) -> list[int]:
        """Token ids of a prompt: chat messages go through the chat template; so does plain text, as one user
        turn, where the target has a template; ids stay as they are.

        Raises TargetError for an empty prompt, one that the context cannot hold, and what is none of the three.
        """
        if isinstance(prompt, str):
            chat = bool(self.tokenizer.chat_template)
            ids = self._chat([{"role": "user", "content": prompt}]) if chat else self._text(prompt)
        elif not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise TargetError(
                f"a prompt is text, a list of chat messages or a list of token ids, not {type(prompt).__name__}"
            )
        elif prompt and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
            ids = [t for t in prompt if isinstance(t, int)]
            bad = [t for t in ids if not 0 <= t < self.vocab_size]
            if bad:
                raise TargetError(f"token id {bad[0]} is outside the vocabulary of {self.vocab_size} of {self.name}")
        else:
            for m in prompt:
                if not isinstance(m, Mapping) or not all(isinstance(m.get(k), str) for k in ("role", "content")):
                    raise TargetError(
                        f"{m!r} is no chat message: each needs a 'role' and a 'content' that are texts "
                        "(token ids are plain integers)"
                    )
                if m["role"] not in ROLES:
                    raise TargetError(f"a chat message has role {m['role']!r}: use one of {', '.join(ROLES)}")
            ids = self._chat([dict(m) for m in prompt if isinstance(m, Mapping)])
        if not ids:
            raise TargetError("the prompt is empty: give it some text")
        if len(ids) >= self.max_length:
            raise TargetError(
                f"the prompt has {len(ids)} tokens; {self.name} takes at most {self.max_length - 1}: shorten the prompt"
            )
        return ids

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of chat messages; a base model, which has no chat template, continues their bare text."""
        return self.encode(messages if self.tokenizer.chat_template else "\n\n".join(m["content"] for m in messages))

    def _text(self, text: str) -> list[int]:
        if not text.strip():
            raise TargetError("the prompt is empty: give it some text")
        begun = bool(self.tokenizer.bos_token) and text.startswith(self.tokenizer.bos_token)
        return [int(t) for t in self.tokenizer(_whole(text), add_special_tokens=not begun)["input_ids"]]

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.tokenizer.chat_template:
            raise TargetError(f"{self.name} has no chat template: give it plain text instead of messages")
        if not any(str(m.get("content", "")).strip() for m in messages):
            raise TargetError("the prompt is empty: give it some text")
        try:
            text = self.chat_template.render(messages)
        except MarkerError as error:
            raise TargetError(f"{self.name}: {error}") from error
        except TemplateError as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise TargetError(f"the chat template of {self.name} refuses messages of {roles}: {error}") from error
        return [int(t) for t in self.tokenizer(_whole(text), add_special_tokens=False)["input_ids"]]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    # -- states -------------------------------------------------------------------------------------

    @cached_property
    def structure(self) -> Structure:
        """Where the branches, the final norm and the logits come from; found by one short forward on first use."""
        return read_structure(self.model, self.backbone, self.layers, self.device)

    @property
    def final_norm(self) -> Any:
        """The norm between the last block and the final states; an identity where there is none."""
        if self.structure.final_norm is None:
            raise TargetError(f"the final norm of {self.name} ({type(self.model).__name__}) was not found")
        return self.structure.final_norm

    def check_structure(self) -> None:
        """Raise TargetError, naming what was not found, unless every site and the logits can be read."""
        problems = self.structure.problems()
        if problems:
            raise TargetError(f"{self.name} ({type(self.model).__name__}) cannot be read: {'; '.join(problems)}")

    def sites(self, names: Iterable[str | Site]) -> list[Site]:
        """Sites by name. Raises ValueError for one that this target does not have."""
        sites = parse_sites(names, self.blocks)
        for site in sites:
            if site.kind in BRANCHES:
                try:
                    self.structure.layouts[site.block].place(site.kind)
                except ValueError as error:
                    raise ValueError(f"{self.name} has no {site}: {error}") from error
        return sites

    def read(self, sites: Iterable[str | Site]) -> SiteReader:
        """Attach hooks for these sites until the reader is closed. Their states come to the target's `device`."""
        chosen = self.sites(sites)
        structure = self.structure  # found by a forward of its own, which open hooks would mistake for the caller's
        branches = any(site.kind in BRANCHES for site in chosen)
        layouts = structure.layouts if branches else ()
        reader = SiteReader(self.embed, self.layers, chosen, layouts, self.device, self._readers.remove)
        self._readers.append(reader)
        return reader

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Forwards of the model within are somebody else's: open readers keep the states that they have."""
        kept = [(reader, dict(reader.states)) for reader in self._readers]
        try:
            yield
        finally:
            for reader, states in kept:
                reader.states = states

    def speed_up(self) -> None:
        """Pack the linear layers where that is faster, and take the fast forward where the blocks are common ones and
        it gives what the general forward gives. States and logits move by rounding at most."""
        pack(self.model)
        self.head = self.model.get_output_embeddings()
        slides = getattr(self.config, "layer_types", None)
        windowed = [t == "sliding_attention" for t in slides] if slides else [self.window is not None] * self.blocks
        fast = fast_forward(self.backbone, self.layers, windowed)
        if fast is not None and self.device.type != "meta" and self._agrees(fast):
            self._fast = fast
            self._hooks = [hooks for m in self.backbone.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]

    def drop_blocks(self) -> None:
        """Forget the blocks for good: tokens can still be embedded, and final states become logits, as a drafter
        needs it in a process of its own."""
        self.__dict__["structure"] = replace(self.structure, layouts=())  # found by a forward, and holds the blocks
        for k in range(self.blocks):
            self.layers[k] = nn.Identity()
        self._fast, self._hooks = None, []
        self._ordinary.clear()

    @property
    def forward_kind(self) -> str:
        """What a step's time depends on: the fast forward or the general one, packed layers or ordinary ones."""
        packed = isinstance(self.head, PackedLinear)
        return f"{'fast' if self._fast is not None else 'general'}, {'packed' if packed else 'ordinary'} layers"

    @contextmanager
    def stock(self) -> Iterator[PreTrainedModel]:
        """The model as transformers runs it by itself, with its own attention and layers; set back afterwards.

        The ordinary weights are made at the first time, and kept: this is for comparisons.
        """
        before = self.model.config._attn_implementation
        with unpacked(self.model, self._ordinary):
            self.model.set_attn_implementation("sdpa")
            try:
                yield self.model
            finally:
                self.model.set_attn_implementation(before)

    def _agrees(self, fast: FastForward) -> bool:
        """Whether a fast forward gives the general one's states, block by block, on a prompt and a tree behind it."""
        size = min(CHECKED, self.max_length // 2)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (1, 2 * size), generator=generator).to(self.device)
        twos = torch.arange(size, device=self.device) // 2  # pairs of siblings, each below the first of the pair before
        ancestors = (torch.arange(size, device=self.device) % 2 == 0) & (twos[None] < twos[:, None])
        ancestors |= torch.eye(size, dtype=torch.bool, device=self.device)
        sites = [Site("resid_post", k) for k in range(self.blocks)]
        found = []
        with self.read(sites) as reader:
            for one in (None, fast):
                self._fast = one
                self._hooks = []
                cache = KVCache(1, capacity=2 * size)
                states = [self.hidden(tokens[:, :size], cache)]
                states += [reader.states[site] for site in sites]
                cache.commit([range(size)])
                states.append(self.hidden(tokens[:, size:], cache, ancestors[None], twos[None]))
                found.append(states + [reader.states[site] for site in sites])
        self._fast = None
        far = TOLERANCE[self.dtype]
        return all(
            float((a.float() - b.float()).norm()) <= far * float(a.float().norm()) for a, b in zip(*found, strict=True)
        )

    @property
    def _undisturbed(self) -> bool:
        """No hook but the readers' is in the decoder, and nobody looks into attention."""
        ours = sum(reader.hooks for reader in self._readers) if self._hooks else 0
        return not attention.OBSERVERS and not attention.EDITORS and sum(map(len, self._hooks)) == ours

    def forward(
        self,
        tokens: torch.Tensor,
        cache: KVCache,
        ancestors: torch.Tensor | None = None,
        depths: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        """Logits [B, Q, V] of new tokens (the last `logits_to_keep` of them, 0 = all); see `hidden`."""
        hidden = self.hidden(tokens, cache, ancestors, depths)
        return self.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)

    def hidden(
        self,
        tokens: torch.Tensor,
        cache: KVCache,
        ancestors: torch.Tensor | None = None,
        depths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normed final states [B, Q, width] of new tokens [B, Q], appended to `cache` but not committed.

        Without `ancestors` [B, Q, Q] and `depths` [B, Q] the new tokens are a chain. The attention masks, the
        sliding-window ones included, and the positions follow from these and the cache's lengths. Raises TargetError
        if the attention implementation takes no mask (flash, flex).
        """
        b, q = tokens.shape
        device = tokens.device
        implementation = self.model.config._attn_implementation
        cache.pads = implementation == attention.NAME
        start, end = min(cache.lengths), max(cache.lengths)
        slides = self.window is not None and end + q > self.window
        # a causal pass over the whole of every row needs no mask: a first pass, or one more token a row
        plain = ancestors is None and (end == 0 or (q == 1 and start == end)) and cache.shows_exactly
        if implementation == "eager" and q > 1:  # no mask would be no causality there
            plain = False
        if depths is None:
            depths = torch.arange(q, device=device).expand(b, q)
        full = windowed = None
        if not plain or slides:
            if ancestors is None:
                ancestors = torch.ones(q, q, dtype=torch.bool, device=device).tril()
            if not plain:
                full = self._shape(attention_mask(cache.lengths, ancestors, depths), implementation)
            if slides:
                windowed = self._shape(attention_mask(cache.lengths, ancestors, depths, self.window), implementation)
        if not slides:
            windowed = full
        positions = torch.tensor(cache.lengths, device=device)[:, None] + depths
        if self.learned_positions:  # a draft may reach behind the last one; what it says there is never kept
            positions = positions.clamp(max=self.max_length - 1)
        if self._fast is not None and implementation == attention.NAME and self._undisturbed:
            with torch.no_grad():
                return self._fast(tokens, positions, cache, full, windowed, self._readers)
        mask: Any = full
        if self.window is not None:
            mask = {"full_attention": full, "sliding_attention": windowed} if self.hybrid else windowed
        with torch.no_grad():
            states = self.backbone(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                **{self._cache_name: cache},
            ).last_hidden_state
        return states.to(device)

    def _shape(self, mask: torch.Tensor, implementation: str) -> torch.Tensor:
        """A boolean mask in the form that the attention implementation takes."""
        if "flash" in implementation or "flex" in implementation:
            raise TargetError(
                f"attention {implementation!r} cannot mask a draft tree: load {self.name} with the default attention"
            )
        if implementation == "eager":  # adds its mask to the scores: a boolean one would be silently wrong
            return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(
                ~mask, torch.finfo(self.dtype).min
            )
        return mask

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocabulary] of normed final states [..., width], scaled or soft-capped as the target does it.

        Raises TargetError for a target that makes its logits in some other way.
        """
        rule = self.structure.logit_rule
        if rule is None:
            raise TargetError(
                f"the logits of {self.name} ({type(self.model).__name__}) are not its output matrix's product, scaled "
                "or soft-capped: choose another target"
            )
        # Rows of their own: a slice of a longer pass, such as its last position, costs a CPU 15 times as much here.
        rows = hidden.reshape(-1, hidden.shape[-1])
        with torch.no_grad():
            return rule(self.head(rows)).to(hidden.device).unflatten(0, hidden.shape[:-1])


def _whole(text: str) -> str:
    """The text; half a surrogate pair, which bytes that are no UTF-8 turn into on a command line, is refused."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = f"{text[error.start]!r} at character {error.start}"
        raise TargetError(f"the prompt is no valid Unicode text ({bad}): give it as UTF-8") from None
    return text


CHECKED = 12
"""Tokens of the prompt, and of the tree, on which the fast forward is compared with the general one."""
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest norm of a difference of states, over the norm of the states, that is rounding."""
DTYPES = ("bfloat16", "float16", "float32")


def vocabulary_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """What `Fingerprint.vocabulary` says of a tokenizer."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def weights_hash(folder: Path) -> str:
    """A hash over sizes and evenly spaced samples of the weight files: milliseconds instead of a full read."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as handle:
            for part in range(64):
                handle.seek(size * part // 64)
                digest.update(handle.read(4096))
    return digest.hexdigest()[:16]


QUANTIZATIONS = {
    "bnb-4bit": ("bitsandbytes", lambda dtype: _bitsandbytes(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)),
    "bnb-8bit": ("bitsandbytes", lambda dtype: _bitsandbytes(load_in_8bit=True)),
    "torchao-int8": ("torchao", lambda dtype: _torchao("Int8WeightOnlyConfig")),
    "torchao-int4": ("torchao", lambda dtype: _torchao("Int4WeightOnlyConfig")),
}
"""By name: the library that it needs, and what makes its configuration for a dtype."""


def _bitsandbytes(**options: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def _torchao(name: str) -> Any:
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)())


def quantization_config(name: str, dtype: torch.dtype) -> Any:
    """The transformers configuration of a quantization. Raises TargetError if it is unknown or its library missing."""
    if name not in QUANTIZATIONS:
        raise TargetError(f"unknown quantization {name!r}: use {', '.join(QUANTIZATIONS)}")
    library, make = QUANTIZATIONS[name]
    if importlib.util.find_spec(library) is None:
        raise TargetError(f"quantization {name!r} needs {library}, which is not installed: pip install {library}")
    return make(dtype)


def load_target(
    name: str | os.PathLike[str] = "smollm2",
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    quantization: str | None = None,
    attention: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    check: bool = True,
) -> Target:
    """Load a target by alias (`smollm2`, `gemma3-270m`, `small-qwen3`), hub id or folder.

    dtype: "auto" is bfloat16; float32 is what exactness is proven in.
    device: where the whole target goes; a GPU, if there is one.
    device_map: instead of `device`, how transformers spreads the blocks: auto, balanced, sequential, or a mapping.
    quantization: one of `QUANTIZATIONS`; the weights are quantized as they are loaded.
    attention: an implementation by name; by default the folded one, or what `choose_attention` falls back to.
    check: refuse a target whose sites or logits cannot be read (one short forward).

    Raises TargetError with a message for people.
    """
    text = os.fspath(name)
    source = target_source(text)
    if device is not None and device_map is not None:
        raise TargetError(f"device {str(device)!r} and device_map {device_map!r} were both given: choose one")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(dtype, str) and dtype not in ("auto", *DTYPES):
        raise TargetError(f"unknown dtype {dtype!r}: use auto, {', '.join(DTYPES)}")
    wanted = getattr(torch, "bfloat16" if dtype == "auto" else dtype) if isinstance(dtype, str) else dtype
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    placing: dict[str, Any] = {}
    if quantization is not None:  # such weights are made where they will be used
        placing = {"quantization_config": quantization_config(quantization, wanted), "device_map": {"": str(device)}}
    if device_map is not None:
        placing["device_map"] = device_map
    part = "configuration"
    try:
        config = AutoConfig.from_pretrained(source, **options)
        refuse_recurrent(config, text)
        part = "weights"
        transformers_logging.disable_progress_bar()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=wanted,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
            **placing,
            **options,
        )
        model, loading = loaded
        check_weights(loading, text)
        if attention is None:
            choose_attention(model)
        part = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except UNLOADABLE as error:
        _refuse(text, part, error)
    folder = Path(source) if Path(source).is_dir() else None
    target = Target(model if placing else model.to(device), tokenizer, text, folder, quantization)
    if check:
        target.check_structure()
    if quantization is None and not trust_remote_code:
        target.speed_up()
    return target


UNLOADABLE = (OSError, ValueError, ImportError, KeyError, RuntimeError, SafetensorError)


def _refuse(name: str, part: str, error: Exception) -> NoReturn:
    """Say which part of a target cannot be loaded, and what can."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise error  # a download that filled the disk
    first = str(error).strip().splitlines()[0].rstrip(": ") if str(error).strip() else ""
    kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
    raise TargetError(
        f"cannot load target {name!r}, its {part}: {kind}{first}\n"
        f"Use an alias ({', '.join(packaged.ALIASES)}), a hub id that is cached or reachable, or a folder with "
        "config.json, safetensors weights and a tokenizer."
    ) from error


def target_source(name: str) -> str:
    """The folder or hub id of a target that is named by alias, hub id or folder. Raises TargetError."""
    if name in packaged.ALIASES:
        return str(packaged.folder(name))
    if not Path(name).is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise TargetError(f"no such folder: {name}")
        if "/" not in name:
            raise TargetError(
                f"unknown target {name!r}: use an alias ({', '.join(packaged.ALIASES)}), a hub id or a folder"
            )
    return name


def unloaded_target(name: str | os.PathLike[str]) -> Target:
    """A target without its weights, to ask what it is and what fits it. Raises TargetError."""
    text = os.fspath(name)
    source = target_source(text)
    part = "configuration"
    try:
        config = AutoConfig.from_pretrained(source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        part = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(source)
    except UNLOADABLE as error:
        _refuse(text, part, error)
    return Target(model, tokenizer, text, Path(source) if Path(source).is_dir() else None)


def target_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Target:
    """A target of a model that is loaded already and stays its owner's: weights, attention and gradients are left as
    they are. Its name is the one that it was loaded by.

    Raises TargetError where it cannot be a target.
    """
    name = str(getattr(model, "name_or_path", "") or type(model).__name__)
    if model.config.is_encoder_decoder:
        raise TargetError(f"{name} ({type(model).__name__}) has an encoder: choose a decoder-only model")
    refuse_recurrent(model.config, name)
    target = Target(model, tokenizer, name, Path(name) if Path(name).is_dir() else None, freeze=False)
    target.check_structure()
    return target


def choose_attention(model: PreTrainedModel) -> None:
    """Folded attention where the family takes any implementation; eager where it soft-caps scores; else its own."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")
    elif model.is_backend_compatible():
        model.set_attn_implementation(attention.NAME)


def check_weights(loading: Mapping[str, Any], name: str) -> None:
    """Raises TargetError for a checkpoint that leaves weights at random values."""
    for what, found in (("are missing", loading["missing_keys"]), ("have another shape", loading["mismatched_keys"])):
        names = sorted(key if isinstance(key, str) else key[0] for key in found)
        if names:
            raise TargetError(
                f"the weights of {name} do not fit its config.json: {len(names)} tensors {what}, "
                f"{names[0]} for one: download or save the model again"
            )


def refuse_recurrent(config: Any, name: str) -> None:
    """Raises TargetError for a recurrent target: speculation needs to forget rejected tokens, and its state cannot.

    So for ALiBi positions, which cannot place the nodes of a draft tree.
    """
    text = config.get_text_config()
    types = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    recurrent = {t for t in types if any(w in t for w in ("mamba", "linear", "recurrent", "conv", "rwkv"))}
    family = str(getattr(config, "model_type", ""))
    if recurrent or any(w in family for w in ("mamba", "rwkv", "recurrent", "xlstm")):
        raise TargetError(
            f"{name} ({family}) keeps a recurrent state, which cannot drop rejected tokens: "
            "choose a target whose blocks are all attention"
        )
    if getattr(text, "alibi", False) or family in ("bloom", "mpt"):
        raise TargetError(
            f"{name} ({family}) uses ALiBi positions, which cannot place draft trees: choose a RoPE target"
        )
