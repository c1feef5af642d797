"""SwitchSD over the EAGLE-3 proposer of vLLM's V1 model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.spec_decode.eagle import EagleProposer

from activations.matching import MatchConfig
from decoding.serving.config import SwitchConfig
from decoding.serving.vllm.columns import Columns
from decoding.serving.vllm.counters import Counters
from decoding.serving.vllm.device import SKIPS, DeviceSwitch
from decoding.serving.vllm.history import HistorySwitch
from decoding.serving.vllm.host import HostSwitch, Step
from decoding.serving.vllm.sampling import repair
from decoding.serving.vllm.target import serving_probe

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig


class SwitchProposer(EagleProposer):
    """Drafts a copy for the requests whose anchor state says so, and leaves the others to the head.

    The head reads every verified token, whoever drafted it, so that its KV cache is the one it would have had. Only
    its further passes are left out, where no request needs them.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        config = SwitchConfig.of(vllm_config.additional_config)
        assert config is not None
        self.probe = serving_probe(config, vllm_config)
        depth = vllm_config.speculative_config.num_speculative_tokens
        super().__init__(vllm_config, device, runner=runner)
        self.runner = runner
        group = get_tp_group()
        tau, kappa = config.rule(self.probe.config)
        match = MatchConfig(kappa, candidates=1, depth=depth)
        agree = group.broadcast if group.world_size > 1 else None
        counters = Counters.of(vllm_config) if group.rank_in_group == 0 else None
        requests = vllm_config.scheduler_config.max_num_seqs
        # replicas run their heads in step, so that none may leave a pass out alone
        alone = vllm_config.parallel_config.data_parallel_size == 1
        self.switch: HostSwitch | HistorySwitch
        if device.type == "cpu":
            repair()
            self.switch = HostSwitch(self.probe, match, tau, agree, counters)
            self._skips = requests if alone else 0
        else:
            rule = DeviceSwitch(self.probe, match, tau, requests, agree)
            self._skips = SKIPS if alone else 0
            self.switch = HistorySwitch(rule, requests, self.max_model_len, device, counters, self._skips)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.columns = Columns.install(target_model, self.probe.config)

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: Any,
        *rest: Any,
        **others: Any,
    ) -> torch.Tensor:
        """Drafts int64 [requests, K]; as vLLM's own, but for the requests that copy."""
        meta = common_attn_metadata
        ends = meta.query_start_loc[1:] - 1 if token_indices_to_sample is None else token_indices_to_sample
        step = Step(
            names=self.runner.input_batch.req_ids,
            unused=self.runner.discard_request_mask.gpu[: len(ends)],
            tokens=target_token_ids,
            positions=target_positions,
            starts=meta.query_start_loc,
            ends=ends,
            pending=next_token_ids,
            states=self.columns.probe(target_hidden_states, ends),
        )
        copies = self.switch.decide(step, self.runner.requests)
        skipped = len(ends) <= self._skips and copies.everywhere()
        neural = super().propose(
            0 if skipped else num_speculative_tokens,
            target_token_ids,
            target_positions,
            self.columns.head(target_hidden_states),
            next_token_ids,
            token_indices_to_sample,
            meta,
            *rest,
            **others,
        )
        self.num_speculative_tokens = num_speculative_tokens
        if skipped:
            neural = neural.new_zeros(len(neural), num_speculative_tokens)
        return copies.over(neural)
