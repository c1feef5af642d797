"""The V2 runner's speculator, driven step by step as vLLM's runner drives it, over stand-ins for vLLM's classes with
their real signatures. Not run on a GPU."""

from __future__ import annotations

import importlib
import random
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from activations.matching import MatchConfig, SuffixIndex
from activations.target import Fingerprint
from probes.artifact import Probe, ProbeConfig

WIDTH, K, SLOTS, LONGEST = 4, 3, 3, 120
LAYERS = (1, 3)
"""Those that the head reads; the probe reads 2."""
NEURAL = 8
"""What the head drafts, which the target never says."""


class Seen:
    def __init__(self) -> None:
        self.copies = self.rows = self.skipped = 0
        self.outcomes: list[tuple[int, int]] = []

    @classmethod
    def of(cls, vllm_config: Any) -> Seen:
        return cls()

    def decided(self, scores: list[float], copies: int, rows: int, skipped: bool) -> None:
        assert copies <= len(scores) <= rows
        self.copies, self.rows, self.skipped = self.copies + copies, self.rows + rows, self.skipped + skipped

    def settled(self, drafted: int, kept: int) -> None:
        self.outcomes.append((drafted, kept))


class StagedWriteTensor:
    def __init__(
        self, size: Any, dtype: torch.dtype, device: Any, max_concurrency: Any = None, uva_instead_of_gpu: bool = False
    ) -> None:
        self.gpu = torch.zeros(size, dtype=dtype, device=device)


class EagleSpeculator:
    """The head: what it is given is looked at, and it drafts the same thing always."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
        self.speculative_config = vllm_config.speculative_config
        self.num_speculative_steps, self.max_num_reqs = K, SLOTS
        self.draft_tokens = torch.zeros(SLOTS, K, dtype=torch.int64)
        self.passes: list[int] = []

    def load_model(self, target_model: Any) -> None:
        assert target_model.layers == LAYERS

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        assert aux_hidden_states is not None and [int(states[0, 1]) for states in aux_hidden_states] == list(LAYERS)
        steps = K if num_speculative_tokens is None else num_speculative_tokens
        self.passes.append(steps)
        drafts = self.draft_tokens[: input_batch.num_reqs]
        drafts[:, :steps] = NEURAL
        return drafts


class Target:
    def __init__(self) -> None:
        self.layers: tuple[int, ...] = LAYERS

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return LAYERS

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = tuple(sorted(set(layers)))


@pytest.fixture
def v2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, over stand-ins."""
    gpu = "vllm.v1.worker.gpu"
    single = SimpleNamespace(world_size=1, rank_in_group=0)
    contents: dict[str, dict[str, Any]] = {
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: single},
        f"{gpu}.buffer_utils": {"StagedWriteTensor": StagedWriteTensor},
        f"{gpu}.spec_decode.eagle.eagle3_utils": {"get_eagle3_aux_layers_from_config": lambda spec_config: None},
        f"{gpu}.spec_decode.eagle.speculator": {"EagleSpeculator": EagleSpeculator},
        "decoding.serving.vllm.counters": {"Counters": Seen},
    }
    for name, values in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            part = ".".join(parts[:end])
            if part.startswith("vllm") or end == len(parts):
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules[name]).update(values)
    monkeypatch.delitem(sys.modules, "decoding.serving.vllm.v2", raising=False)
    module = importlib.import_module("decoding.serving.vllm.v2")
    monkeypatch.setattr(module, "serving_probe", lambda config, vllm_config: probe())
    yield module
    sys.modules.pop("decoding.serving.vllm.v2", None)


def probe() -> Probe:
    target = Fingerprint("Toy", WIDTH, 5, "v", "r")
    config = ProbeConfig("resid_post.1", WIDTH, "follow", {"match": 2}, 0.5, "given", target, "toy", "0", {}, {}, {})
    return Probe(config, torch.tensor([1.0, 0, 0, 0]))


def vllm_config(replicas: int = 1, adaptive: bool = False, context_ranks: int = 1) -> Any:
    return SimpleNamespace(
        additional_config={"switchsd": {"probe": "toy"}},
        speculative_config=SimpleNamespace(enable_adaptive_verification=adaptive),
        parallel_config=SimpleNamespace(data_parallel_size=replicas, prefill_context_parallel_size=context_ranks),
    )


def intent(position: int, token: int) -> bool:
    """Does the target's state at a position say copy?"""
    return (position * 7 + token) % 3 > 0


def says(tokens: list[int]) -> int:
    """The target's next token. It repeats itself, though not for ever."""
    return (tokens[-1] * 2 + tokens[-2] + len(tokens) // 17) % 5


@dataclass
class Request:
    tokens: list[int]
    prompt: int
    slot: int
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    copied: bool = False


class Engine:
    """What vLLM's runner and scheduler do with a speculator, for a target that is a rule."""

    def __init__(self, speculator: Any, states: Any, seed: int) -> None:
        self.speculator, self.states, self.random = speculator, states, random.Random(seed)
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.outcomes: list[tuple[int, int]] = []
        self.copies = self.rows = 0
        self.target = Target()
        speculator.load_model(self.target)
        assert self.target.layers == (1, 2, 3)

    def admit(self, prompt: list[int]) -> None:
        slot = next(s for s in range(SLOTS) if s not in [r.slot for r in self.running])
        self.running.append(Request(list(prompt), len(prompt), slot))
        self.states.all_token_ids.gpu[slot, : len(prompt)] = torch.tensor(prompt)
        self.states.total_len.gpu[slot] = len(prompt)

    def step(self, wanted: int | None = None) -> None:
        batch = [r for r in self.running if self.random.random() < 0.8] or self.running[:1]
        self.random.shuffle(batch)
        starts, states, sampled, rejected, anchors = [0], [], [], [], []
        for r in batch:
            if r.computed < r.prompt:
                size = min(self.random.randint(1, 6), r.prompt - r.computed)
                if r.computed + size == r.prompt and self.random.random() < 0.3:
                    r.drafts, r.copied = [], False
                read = r.tokens[r.computed : r.computed + size]
                given, thrown = ([says(r.tokens)], 0) if r.computed + size == r.prompt else ([], 0)
            else:
                trim = self.random.choice([K, K, len(r.drafts), 1])
                drafts = r.drafts[:trim]
                read = [r.tokens[-1], *drafts]
                given = [says(r.tokens)]
                while len(given) <= len(drafts) and drafts[len(given) - 1] == given[-1]:
                    given.append(says(r.tokens + given))
                thrown = len(drafts) + 1 - len(given)
                if r.copied and drafts:
                    self.outcomes.append((len(drafts), len(given) - 1))
            states += [self.state(r.computed + i, token) for i, token in enumerate(read)]
            starts.append(len(states))
            anchors.append((r.computed + len(read) - thrown - 1, read[len(read) - thrown - 1]))
            r.computed += len(read) - thrown
            r.tokens += given
            sampled.append(len(given))
            rejected.append(thrown)
            self.states.all_token_ids.gpu[r.slot, : len(r.tokens)] = torch.tensor(r.tokens)
            self.states.total_len.gpu[r.slot] = len(r.tokens)
        rows = torch.stack(states)
        layered = [
            torch.cat([rows[:, :1], torch.full((len(rows), WIDTH - 1), float(n))], 1) for n in self.target.layers
        ]
        drafts_of_all = self.speculator.propose(
            SimpleNamespace(
                num_reqs=len(batch),
                idx_mapping=torch.tensor([r.slot for r in batch]),
                query_start_loc=torch.tensor([*starts, *[starts[-1]] * 2], dtype=torch.int32),
            ),
            None,
            None,
            rows,
            layered,
            torch.tensor(sampled, dtype=torch.int32),
            torch.tensor(rejected, dtype=torch.int32),
            None,
            None,
            None,
            None,
            num_speculative_tokens=wanted,
            dp_sync_state=None,
            mm_inputs=None,
        )
        assert drafts_of_all.shape == (len(batch), K) and drafts_of_all.dtype == torch.int64
        for r, drafts, given, anchor in zip(batch, drafts_of_all.tolist(), sampled, anchors, strict=True):
            r.drafts, r.copied = [], False
            if not given or wanted == 0:
                continue
            config = MatchConfig(2, candidates=1, depth=K)
            index = SuffixIndex(config, r.tokens)
            found = index.candidates(index.find())
            r.copied = bool(found) and intent(*anchor)
            assert drafts == (found[0] if r.copied else [NEURAL] * K)
            r.drafts = drafts[: K if wanted is None else wanted]
            self.copies, self.rows = self.copies + r.copied, self.rows + 1
        for r in [r for r in batch if len(r.tokens) >= LONGEST - 20 or (r.computed > r.prompt + 40)]:
            self.running.remove(r)
            self.finished.append(r)

    @staticmethod
    def state(position: int, token: int) -> torch.Tensor:
        return torch.tensor([3.0 if intent(position, token) else -3.0] + [0.0] * (WIDTH - 1))


def request_states() -> Any:
    gone = SimpleNamespace(gpu=None)  # in the host's memory
    lengths = SimpleNamespace(gpu=torch.zeros(SLOTS, dtype=torch.int32))
    return SimpleNamespace(max_num_reqs=SLOTS, max_model_len=LONGEST, all_token_ids=gone, total_len=lengths)


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_step_drafts_what_the_rule_says_and_the_text_is_the_target_s(v2: ModuleType, replicas: int) -> None:
    skipped = 0
    for seed in range(4):
        states = request_states()
        speculator = v2.SwitchSpeculator(vllm_config(replicas), torch.device("cpu"), states)
        engine = Engine(speculator, states, seed)
        prompts = [[engine.random.randrange(5) for _ in range(engine.random.randint(2, 30))] for _ in range(7)]
        waiting = list(prompts)
        while waiting or engine.running:
            while waiting and len(engine.running) < SLOTS:
                engine.admit(waiting.pop())
            engine.step(wanted=engine.random.choice([None, K, K, K, 2, 0]))
        assert len(engine.finished) == 7
        for request in engine.finished:
            tokens = request.tokens[: request.prompt]
            while len(tokens) < len(request.tokens):
                tokens.append(says(tokens))
            assert request.tokens == tokens
        counters = speculator.tally._counters
        last = len(engine.outcomes) - len(counters.outcomes)  # the last step is counted by the next one
        assert sorted(counters.outcomes) == sorted(engine.outcomes[: len(engine.outcomes) - last]) and last <= SLOTS
        assert engine.rows - SLOTS <= counters.rows <= engine.rows
        assert any(kept == 0 for _, kept in engine.outcomes) and any(kept > 1 for _, kept in engine.outcomes)
        assert len(speculator.passes) > 20  # the head reads every step
        skipped += counters.skipped
    assert (skipped > 0) == (replicas == 1)


def test_a_dummy_run_drafts_what_the_head_drafts_and_is_not_counted(v2: ModuleType) -> None:
    speculator = v2.SwitchSpeculator(vllm_config(), torch.device("cpu"), request_states())
    speculator.load_model(Target())
    batch = SimpleNamespace(num_reqs=2, idx_mapping=torch.arange(2), query_start_loc=torch.tensor([0, 1, 2]))
    drafts = speculator.propose(
        input_batch=batch,
        attn_metadata=None,
        slot_mappings=None,
        last_hidden_states=torch.zeros(2, WIDTH),
        aux_hidden_states=[torch.full((2, WIDTH), float(n)) for n in (1, 2, 3)],
        num_sampled=torch.ones(2, dtype=torch.int32),
        num_rejected=torch.zeros(2, dtype=torch.int32),
        last_sampled=None,
        next_prefill_tokens=None,
        temperature=None,
        seeds=None,
        dp_sync_state=None,
        dummy_run=True,
        skip_attn_for_dummy_run=True,
        mm_inputs=None,
        is_profile=True,
    )
    assert drafts.tolist() == [[NEURAL] * K] * 2 and speculator.passes == [K]
    assert not speculator.tally._sent


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"adaptive": True}, "switchsd: enable_adaptive_verification goes by the head's confidences"),
        ({"context_ranks": 4}, "switchsd: prefill_context_parallel_size is 4: use tensor or data parallelism"),
    ],
)
def test_what_cannot_be_served_is_refused(v2: ModuleType, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        v2.SwitchSpeculator(vllm_config(**wrong), torch.device("cpu"), request_states())
