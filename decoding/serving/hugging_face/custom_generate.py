"""`model.generate(..., custom_generate=...)`: the project's own loop on a model that is loaded already."""

from __future__ import annotations

from dataclasses import replace
from threading import RLock
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from activations.sampling import Sampling
from decoding.decoder import Decoder
from decoding.engine import Engine
from decoding.minedraft.scheduler import OverlappedScheduler
from decoding.modes import DecodingError, Plan
from decoding.request import Request
from decoding.scheduler import SequentialScheduler
from decoding.serving.hugging_face.asked import forgotten, prompts, refuse
from decoding.serving.hugging_face.sequences import Sequences
from decoding.serving.hugging_face.verifier import ProcessedVerifier
from decoding.trace import Trace
from decoding.verifier import Verifier


class CustomGenerate:
    """What `generate` takes as `custom_generate`. `switchsd.custom_generate` makes one for a model.

    The text is the one that `generate` writes by itself; sampled ones have the same law, and follow torch's seed.
    Processors, criteria, streamers and outputs are those of `generate`, with these differences: `scores` and `logits`
    are zeros where a row has ended, no cache is returned, and rows of a batch are not drafted for where a processor or
    criterion of the caller's own needs them in step. What cannot be done is refused by DecodingError.
    """

    def __init__(self, decoder: Decoder, mode: str = "switchsd") -> None:
        """Raises DecodingError for a mode that does not leave the text to the target."""
        self.decoder = decoder
        self.mode = mode
        self.trace = Trace()
        """The steps of the latest call."""
        self._turn, self._busy = RLock(), False
        self._plan(mode)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Called by `generate` with what it has prepared; input_ids [rows, tokens]. Gives ids [rows, tokens + new], or
        the output class. Calls from several threads take turns."""
        target = self.decoder.target
        if model is not target.model:
            raise DecodingError(
                f"this custom_generate was made for {target.name}, and another {type(model).__name__} calls it: make "
                "one for each model"
            )
        asked = forgotten(model_kwargs)
        refuse(generation_config, model_kwargs, asked)
        texts = prompts(input_ids, model_kwargs)
        config, streamer = generation_config, asked.get("streamer")
        if target.learned_positions and config.max_length > target.max_length:
            raise DecodingError(
                f"max_length is {config.max_length}, the prompt included; {target.name} has {target.max_length} "
                "positions: ask for fewer new tokens"
            )
        pad = getattr(config, "_pad_token_tensor", None)
        told = bool(config.return_dict_in_generate)
        sequences = Sequences(
            input_ids,
            logits_processor,
            stopping_criteria,
            limit=config.max_length - input_ids.shape[1],
            pad=None if pad is None else int(pad),
            sampling=_sampling(config),
            aside=target.unread,
            keep_scores=told and bool(config.output_scores),
            keep_logits=told and bool(config.output_logits),
        )
        requests = [Request(row, text, sequences.limit) for row, text in enumerate(texts)]
        with self._turn:  # a thread that holds it comes in again, and would wait for itself
            if self._busy:
                raise DecodingError(
                    "a processor, criterion or streamer calls generate with the custom_generate that calls it: make "
                    "another one for it"
                )
            self._busy = True
            try:
                self._run(requests, sequences, streamer)
            finally:
                self._busy = False
        if streamer is not None:
            streamer.end()
        length = sequences.length
        ids = sequences.ids[:, : sequences.width + length]
        if not told:
            return ids
        kept = [None if one is None else tuple(one[:length]) for one in (sequences.scores, sequences.logits)]
        return GenerateDecoderOnlyOutput(sequences=ids, scores=kept[0], logits=kept[1])  # type: ignore[arg-type]

    def _run(self, requests: list[Request], sequences: Sequences, streamer: Any) -> None:
        """All texts to their ends; the streamer is given what stands in all rows, a position at a time."""
        mode = "ar" if sequences.in_step else self.mode
        plan = replace(self._plan(mode), verifier=ProcessedVerifier(sequences))
        self.trace = self.decoder.tracing(mode, plan, self.decoder.settings, requests[0].sampling)
        engine = Engine(self.decoder.target, plan, len(requests), self.trace, mode)
        told = 0
        try:
            scheduler = (OverlappedScheduler if plan.overlapped else SequentialScheduler)(engine)
            for commit in scheduler.run(requests, lambda commit: sequences.over(commit.request.number)):
                if commit.cut:
                    raise torch.OutOfMemoryError(f"{commit.cut}: use fewer or shorter prompts")
                if streamer is not None and told < (settled := sequences.settled):
                    for position in range(sequences.width + told, sequences.width + settled):
                        streamer.put(sequences.ids[:, position].cpu())
                    told = settled
        finally:
            engine.close()

    def _plan(self, mode: str) -> Plan:
        plan = self.decoder.plan(mode)
        if type(plan.verifier) is not Verifier:
            raise DecodingError(
                f"mode {mode!r} does not leave every token to the target, and generate's processors would not "
                "be followed: use switchsd, copy, eagle, ltd, sd or minedraft"
            )
        return plan


def _sampling(config: GenerationConfig) -> Sampling:
    """Of logits that are processed already; sampled under a seed that torch's own generator gives."""
    if not config.do_sample:
        return Sampling()
    return Sampling(temperature=1.0, seed=int(torch.randint(2**31, ()).item()))
