"""SwitchSD over the EAGLE-3 proposer of vLLM's V1 model runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.spec_decode.eagle import EagleProposer

from activations.matching import MatchConfig
from decoding.serving.config import SwitchConfig
from decoding.serving.contexts import Context, Contexts, Gap
from decoding.serving.vllm.columns import Columns
from decoding.serving.vllm.target import serving_probe

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

logger = init_logger("vllm.switchsd")


class SwitchProposer(EagleProposer):
    """Drafts a copy for the requests whose anchor state says so, and leaves the others to the head.

    The head reads every verified token, whoever drafted it, so that its KV cache is the one it would have had. Only
    its further steps are left out, where no request needs them.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner=runner)
        config = SwitchConfig.of(vllm_config.additional_config)
        assert config is not None
        self.probe = serving_probe(config, vllm_config)
        self.tau = self.probe.config.threshold if config.tau is None else config.tau
        self.kappa = config.kappa or self.probe.config.kappa
        self.contexts: Contexts[str] = Contexts(
            MatchConfig(kappa=self.kappa, candidates=1, depth=self.speculative_config.num_speculative_tokens)
        )
        self.runner = runner
        self._skips = vllm_config.parallel_config.data_parallel_size == 1  # else replicas draft in step

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.columns = Columns.install(target_model, self.probe.config)

    # -- drafting -----------------------------------------------------------------------------------

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [requests, K]: the drafts of a step (see `SpecDecodeBaseProposer.propose`); `target_hidden_states`
        [tokens, layers * width] also has the probe's layer."""
        ends = token_indices_to_sample
        if ends is None:
            ends = common_attn_metadata.query_start_loc[1:] - 1
        states = self.columns.probe(target_hidden_states, ends)
        copies = self._copies(
            states, target_token_ids, target_positions, common_attn_metadata.query_start_loc_cpu, ends, next_token_ids
        )
        copied = [row for row, copy in enumerate(copies) if copy]
        drafting = num_speculative_tokens
        if self._skips and all(copy is not None for copy in copies):
            drafting = 0
        drafts = super().propose(
            drafting,
            target_token_ids,
            target_positions,
            self.columns.head(target_hidden_states),
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            *args,
            **kwargs,
        )
        self.num_speculative_tokens = num_speculative_tokens
        if drafting == 0:
            drafts = drafts.new_zeros(len(copies), num_speculative_tokens)
        if copied:
            tokens = [copies[row][:num_speculative_tokens] for row in copied]
            drafts[torch.tensor(copied)] = torch.tensor(tokens, dtype=drafts.dtype)
        return drafts

    def _copies(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        pending: torch.Tensor,
    ) -> list[Sequence[int] | None]:
        """For each request its copy, None where the head is to draft, and () where no draft is used: its prompt is
        still being read."""
        batch, requests = self.runner.input_batch, self.runner.requests
        unused = self.runner.discard_request_mask.np
        ids, places = tokens.tolist(), positions.tolist()
        found: list[Sequence[int] | None] = []
        rows = zip(batch.req_ids, starts.tolist(), ends.tolist(), pending.tolist(), strict=False)
        for row, (name, start, end, last) in enumerate(rows):
            state = requests[name]
            context = self.contexts.of(name, state)
            here = ids[start : end + 1]
            if unused[row]:
                self._write(context, places[start], here, state.get_token_id)
                found.append(())
                continue
            here.append(last)
            known = self._write(context, places[start], here, state.get_token_id)
            if known:
                context.cut(places[start] + len(here))
            found.append((context.copy() or None) if known else None)
        if len(self.contexts) > len(requests):
            self.contexts.keep(requests.__contains__)
        asked = [row for row, copy in enumerate(found) if copy]
        if asked:
            for row, score in zip(asked, self._scores(states[asked]), strict=True):
                if score < self.tau:
                    found[row] = None
        return found

    @staticmethod
    def _write(context: Context, start: int, tokens: list[int], ask: Callable[[int], int]) -> bool:
        try:
            context.write(start, tokens, ask)
        except Gap:
            return False
        return True

    def _scores(self, states: torch.Tensor) -> list[float]:
        scores = self.probe.score(states)
        group = get_tp_group()
        if group.world_size > 1:  # a rounding on one rank must not part the ranks
            scores = group.broadcast(scores, src=0)
        return scores.tolist()
