"""Whether a probe, and the switch, fit the model that vLLM serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from activations.target import Fingerprint, vocabulary_hash, weights_hash
from decoding.serving.vllm.columns import layer_of
from probes.artifact import Probe

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from decoding.serving.config import SwitchConfig


def serving_probe(config: SwitchConfig, vllm: VllmConfig) -> Probe:
    """The probe that a configuration names. Raises ValueError or ProbeError where it cannot gate this engine: for
    each there is one line that says why, and what to do."""
    speculative, stages = vllm.speculative_config, vllm.parallel_config.pipeline_parallel_size
    assert speculative is not None
    head = getattr(speculative.draft_model_config.hf_config, "eagle_config", None) or {}
    problems = {
        f"method is {speculative.method!r}: name 'eagle3', whose captured states the probe reads":
            speculative.method != "eagle3",
        "draft_sample_method is 'probabilistic': a copy has no probabilities; leave it at 'greedy'":
            speculative.draft_sample_method != "greedy",
        "the head drafts all tokens at once (parallel_drafting): choose a head that drafts one after another":
            speculative.parallel_drafting,
        "the head reads no captured states (use_aux_hidden_state is false): choose one that does":
            not head.get("use_aux_hidden_state", True),
        f"pipeline_parallel_size is {stages}, and the probe's state does not travel between stages: use tensor or data "
        "parallelism":
            stages > 1,
        "positions have several axes (M-RoPE): choose a model that reads text alone":
            vllm.model_config.uses_mrope,
        "prompts may be embeddings (enable_prompt_embeds), in which nothing can be matched: leave it out":
            vllm.model_config.enable_prompt_embeds,
    }  # fmt: skip
    for problem in (what for what, holds in problems.items() if holds):
        raise ValueError(f"switchsd: {problem}")
    probe = Probe.from_pretrained(config.probe)
    target = fingerprint(vllm.model_config)
    probe.check_target(target, vllm.model_config.model)
    try:
        layer_of(probe.config.site, target.blocks)
    except ValueError as error:
        raise ValueError(f"switchsd: {error}") from error
    return probe


def fingerprint(model: ModelConfig) -> Fingerprint:
    """What a probe is compared with: as `Target.fingerprint` says it of the same files."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
    folder = Path(model.model)
    revision = getattr(model.hf_config, "_commit_hash", None)
    return Fingerprint(
        architecture=model.hf_config.architectures[0],
        width=model.hf_text_config.hidden_size,
        blocks=model.hf_text_config.num_hidden_layers,
        vocabulary=vocabulary_hash(tokenizer),
        revision=revision or (weights_hash(folder) if folder.is_dir() else "unknown"),
    )
