"""SwitchSD over the EAGLE-3 speculator of vLLM's V2 model runner.

Run in vLLM 0.32 on a CPU, through Triton's interpreter, and driven by hand over stand-ins. Not run on a GPU yet: for
that its kernels were compiled, and the symbols of 0.32 and 0.33 looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from activations.matching import MatchConfig
from decoding.serving.config import SwitchConfig
from decoding.serving.vllm.columns import Columns, layer_of
from decoding.serving.vllm.counters import Counters
from decoding.serving.vllm.device import SKIPS, Copies, DeviceSwitch, Texts
from decoding.serving.vllm.tally import Tally
from decoding.serving.vllm.target import serving_probe

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState


class SwitchSpeculator(EagleSpeculator):
    """Drafts a copy for the requests whose anchor state says so, and leaves the others to the head.

    The head reads every verified token, whoever drafted it, so that its KV cache is the one it would have had.
    Everything of the switch's own runs outside the CUDA graphs of target and head, on tensors of fixed shape.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState) -> None:
        config = SwitchConfig.of(vllm_config.additional_config)
        assert config is not None
        self.probe = serving_probe(config, vllm_config)
        refuse(vllm_config)
        super().__init__(vllm_config, device)
        group = get_tp_group()
        tau, kappa = config.rule(self.probe.config)
        self.switch = DeviceSwitch(
            self.probe,
            MatchConfig(kappa, candidates=1, depth=self.num_speculative_steps),
            tau,
            self.max_num_reqs,
            agree=group.broadcast if group.world_size > 1 else None,
        )
        # replicas run their heads in step, so that none may leave a pass out alone
        self._skips = SKIPS if vllm_config.parallel_config.data_parallel_size == 1 else 0
        self.tally: Tally | None = None
        if group.rank_in_group == 0:
            self.tally = Tally(Counters.of(vllm_config), self.max_num_reqs, device, self._skips)
        # By default the texts are in the host's memory, and a matcher reads each of them once a step: 128 KiB at 32,768
        # tokens, 3 microseconds over the bus and 0.03 from the device's own. As for vLLM's n-gram drafter, they move.
        shape = (req_states.max_num_reqs, req_states.max_model_len)
        req_states.all_token_ids = StagedWriteTensor(shape, dtype=torch.int32, device=device)
        self.requests = req_states

    def load_model(self, target_model: Any) -> None:
        """The target's captured layers are set by now; the probe's joins them before any graph is made."""
        super().load_model(target_model)
        layers = get_eagle3_aux_layers_from_config(self.speculative_config)
        layers = tuple(layers or target_model.get_eagle3_default_aux_hidden_state_layers())
        layer = layer_of(self.probe.config.site, self.probe.config.target.blocks)
        self.columns = Columns(self.probe.config.width, layer, tuple(sorted({*layers, layer})), layer in layers)
        target_model.set_aux_hidden_state_layers(self.columns.layers)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *rest: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """Drafts int64 [requests, K]; as vLLM's own, but for the requests that copy."""
        assert aux_hidden_states is not None  # `load_model` asked for them
        captured = list(aux_hidden_states)
        states = captured[self.columns.place] if self.columns.shared else captured.pop(self.columns.place)
        wanted = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        drafting = num_sampled > 0 if wanted else torch.zeros_like(num_sampled, dtype=torch.bool)
        copies = self._decide(input_batch, states, num_rejected, drafting)
        skipped = wanted > 1 and input_batch.num_reqs <= self._skips and not dummy_run and copies.everywhere()
        neural = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            captured,
            num_sampled,
            num_rejected,
            *rest,
            num_speculative_tokens=1 if skipped else num_speculative_tokens,
            dummy_run=dummy_run,
            **others,
        )
        if dummy_run:  # it has warmed the kernels up, and its requests are none
            return neural
        if self.tally is not None:
            self.tally.add(input_batch.idx_mapping, num_sampled, num_rejected, copies)
        return copies.over(neural)

    def _decide(
        self, batch: InputBatch, states: torch.Tensor, rejected: torch.Tensor, drafting: torch.Tensor
    ) -> Copies:
        anchors = batch.query_start_loc[1 : batch.num_reqs + 1] - 1 - rejected
        texts = Texts(self.requests.all_token_ids.gpu, self.requests.total_len.gpu, batch.idx_mapping)
        return self.switch.decide(states[anchors], texts, drafting)


def refuse(vllm_config: VllmConfig) -> None:
    """Raises ValueError for what the V2 runner can do and the switch cannot."""
    assert vllm_config.speculative_config is not None
    if vllm_config.speculative_config.enable_adaptive_verification:
        raise ValueError(
            "switchsd: enable_adaptive_verification goes by the head's confidences, which say nothing of a copy: leave "
            "it off"
        )
    ranks = vllm_config.parallel_config.prefill_context_parallel_size
    if ranks > 1:
        raise ValueError(f"switchsd: prefill_context_parallel_size is {ranks}: use tensor or data parallelism")
