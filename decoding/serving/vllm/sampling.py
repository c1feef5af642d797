"""A repair of what vLLM samples on a CPU while it speculates."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("vllm.switchsd")
KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def repair() -> None:
    """See to it that drafted positions are sampled at their requests' temperatures. For an engine on a CPU.

    The stand-in of vLLM 0.32 and 0.33 for the kernel that spreads them over the positions takes its float result for
    integers, and fills a copy: the temperatures are then whatever was in memory, and the text is noise, whoever
    drafts. It is replaced through vLLM's own register of such stand-ins, where a trial shows the fault.
    """
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    given = torch.tensor([0.25, 0.0, 0.5])
    found = expand_batch_to_tokens(given, torch.tensor([2, 3, 5]), 5, replace_from=0, replace_to=1)
    if found.tolist() != [0.25, 0.25, 1.0, 0.5, 0.5]:
        register_kernels({KERNEL: expand})
        logger.info("switchsd: this vLLM loses the temperatures of drafted positions on a CPU, and is repaired")


def expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replaced: int, by: int, longest: int
) -> None:
    """output [tokens]: values [requests], each as often as it has tokens, which end at `ends` [requests]; `replaced`
    becomes `by`. `longest` is the kernel's, and not needed."""
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    output.copy_(values.masked_fill(values == replaced, by).repeat_interleave(counts))
