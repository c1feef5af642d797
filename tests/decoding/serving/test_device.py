"""The switch's rule on the device, its history and its tally, on CPU tensors through the torch reference. Not run on a
GPU: the kernel that stands in for the reference there has tests of its own."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contexts import longest
from test_host import CONFIG, PROBE, TAU, Played, Recorder

from activations.matching import MatchConfig, SuffixIndex
from activations.target import Fingerprint
from decoding.serving.vllm.device import Copies, DeviceSwitch, Texts
from decoding.serving.vllm.history import DeviceHistory, HistorySwitch
from decoding.serving.vllm.tally import Tally
from probes.artifact import Probe, ProbeConfig

WIDTH, K = 4, 3


def probe() -> Probe:
    """Reads the first entry of the state: copy iff it is above 0."""
    target = Fingerprint("Toy", WIDTH, 2, "v", "r")
    config = ProbeConfig(
        "resid_post.0", WIDTH, "follow", {"match": 2}, 0.5, "given", target, "toy", "0", {}, {}, {}, "linear"
    )
    return Probe(config, torch.tensor([1.0, 0, 0, 0]))


class Seen:
    """Counters that remember."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, bool]] = []
        self.outcomes: list[tuple[int, int]] = []

    def decided(self, scores: list[float], copies: int, rows: int, skipped: bool) -> None:
        assert all(0 <= score <= 1 for score in scores)
        self.steps.append((len(scores), copies, rows, skipped))

    def settled(self, drafted: int, kept: int) -> None:
        self.outcomes.append((drafted, kept))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_copy_is_drafted_where_a_match_and_the_probe_say_so(data: st.DataObject) -> None:
    slots, capacity = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    line = st.lists(st.integers(0, 2), min_size=capacity, max_size=capacity)
    buffer = torch.tensor([data.draw(line) for _ in range(slots)], dtype=torch.int32)
    lengths = torch.tensor([data.draw(st.integers(0, capacity)) for _ in range(slots)], dtype=torch.int32)
    rows = data.draw(st.permutations(range(slots)))[: data.draw(st.integers(1, slots))]
    flags = st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
    intents, eligible = data.draw(flags), data.draw(flags)
    states = torch.full((len(rows), WIDTH), -7.0, dtype=torch.bfloat16)
    states[:, 0] = torch.where(torch.tensor(intents), 3, -3)
    neural = torch.full((len(rows), K), 9)

    config = MatchConfig(2, candidates=1, depth=K)
    switch = DeviceSwitch(probe(), config, 0.5, slots)
    copies = switch.decide(states, Texts(buffer, lengths, torch.tensor(rows)), torch.tensor(eligible))
    drafts = copies.over(neural)

    assert drafts.dtype == torch.int64
    wanted, needed = [], []
    for row, intent, used in zip(rows, intents, eligible, strict=True):
        index = SuffixIndex(config, buffer[row, : lengths[row]].tolist())
        found = index.candidates(index.find())
        wanted.append(found[0] if found and intent and used else [9] * K)
        needed.append(used and wanted[-1][0] == 9)
    assert drafts.tolist() == wanted
    assert copies.everywhere() == (not any(needed))


def test_ranks_take_one_rank_s_scores() -> None:
    theirs = torch.tensor([0.9, 0.1])
    switch = DeviceSwitch(probe(), MatchConfig(1, candidates=1, depth=K), 0.5, 2, agree=lambda scores: theirs)
    texts = Texts(torch.tensor([[5, 6, 5], [5, 6, 5]], dtype=torch.int32), torch.tensor([3, 3]), torch.tensor([0, 1]))
    states = torch.tensor([[-3.0, 0, 0, 0], [3.0, 0, 0, 0]])
    copies = switch.decide(states, texts, torch.tensor([True, True]))
    assert copies.chosen.tolist() == [True, False]


def test_a_history_is_what_the_engine_verified() -> None:
    """Cached prompts, chunks, rejected drafts, other orders, and a request that leaves and comes back."""
    history = DeviceHistory(2, 20, "cpu")
    prompts = {"a": [1, 2, 3, 4, 5, 6], "b": [7, 8, 9]}

    requests = {name: SimpleNamespace(prompt_token_ids=tokens, output_token_ids=[]) for name, tokens in prompts.items()}

    def step(ids: list[str], rows: list[tuple[list[int], int, int, int]]) -> list[list[int]]:
        """Each row: tokens read, position of the first, how many of them were kept, the token that follows."""
        texts = history.texts([requests[name] for name in ids])
        starts, anchors = [0], []
        for tokens, _, kept, _ in rows:
            anchors.append(starts[-1] + kept - 1)
            starts.append(starts[-1] + len(tokens))
        history.extend(
            texts,
            torch.tensor([token for tokens, *_ in rows for token in tokens], dtype=torch.int32),
            torch.tensor([first + i for tokens, first, *_ in rows for i in range(len(tokens))]),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(anchors),
            torch.tensor([row[3] for row in rows], dtype=torch.int32),
        )
        return [texts.buffer[slot, : texts.lengths[slot]].tolist() for slot in texts.rows.tolist()]

    # the first four tokens of `a` are cached; of `b` one is read, and the next one of its prompt is told as pending
    assert step(["a", "b"], [([5, 6], 4, 2, 10), ([7], 0, 1, 8)]) == [[1, 2, 3, 4, 5, 6, 10], [7, 8]]
    # `a` drafted three and one of them was kept; `b` read the rest
    assert step(["b", "a"], [([8, 9], 1, 2, 20), ([10, 11, 99, 98], 6, 2, 12)]) == [
        [7, 8, 9, 20],
        [1, 2, 3, 4, 5, 6, 10, 11, 12],
    ]
    assert step(["a"], [([12], 8, 1, 13)]) == [[1, 2, 3, 4, 5, 6, 10, 11, 12, 13]]  # `b` waits
    # `b` comes back with what it had, recomputed from its third token on; `a` is finished, and `c` in its slot
    requests["b"].output_token_ids = [20]
    requests["c"] = SimpleNamespace(prompt_token_ids=[30, 31], output_token_ids=[])
    assert step(["b", "c"], [([9, 20], 2, 2, 21), ([30, 31], 0, 2, 32)]) == [[7, 8, 9, 20, 21], [30, 31, 32]]
    assert step(["c"], [([32] * 17, 2, 17, 33)])[0][-2:] == [32, 33]  # to the last place
    step(["c"], [([33] * 12, 19, 12, 34)])  # and beyond: nothing breaks


def test_a_tally_knows_what_came_of_each_copy() -> None:
    seen = Seen()
    tally = Tally(seen, 4, "cpu", skips=2)  # type: ignore[arg-type]
    false, true = torch.tensor([False, False]), torch.tensor([True, True])
    one, both = torch.tensor([True, False]), true

    def add(slots: list[int], sampled: list[int], rejected: list[int], copies: Copies) -> None:
        tally.add(torch.tensor(slots), torch.tensor(sampled), torch.tensor(rejected), copies)

    def copies(eligible: torch.Tensor, asked: torch.Tensor, chosen: torch.Tensor) -> Copies:
        return Copies(torch.zeros(2, K), torch.tensor([0.8, 0.3]), eligible, asked, chosen)

    add([3, 1], [1, 0], [0, 0], copies(one, one, one))  # the second is still read
    add([1, 3], [1, 3], [0, 1], copies(true, false, false))  # of three copied tokens two were kept
    add([3, 1], [1, 1], [3, 3], copies(true, true, both))  # neural drafts, all rejected: not ours
    add([3, 1], [1, 0], [3, 0], copies(one, one, one))  # a false copy; the other one was preempted
    add([3, 1], [4, 1], [0, 0], copies(true, false, false))  # all kept; the other's slot was given away
    add([3, 1], [1, 1], [0, 0], copies(false, false, false))  # nobody drafts: no step
    add([3, 1], [1, 1], [0, 0], copies(true, false, false))
    assert seen.outcomes == [(3, 2), (3, 0), (3, 3)]
    assert seen.steps == [(1, 1, 1, True), (0, 0, 2, False), (2, 2, 2, True), (1, 1, 1, True), (0, 0, 2, False)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_a_history_s_switch_decides_as_the_plain_rule(seed: int) -> None:
    """In the engine that the host's switch is played in; here no text is hidden."""
    engine, counters = Played(seed), Recorder()
    device = DeviceSwitch(PROBE, CONFIG, TAU, 4)
    switch = HistorySwitch(device, 4, 200, torch.device("cpu"), counters)  # type: ignore[arg-type]
    outcomes: list[tuple[int, int]] = []
    copied: dict[int, int] = {}
    for _ in range(12):
        engine.change()
        if not engine.order:
            continue
        step, scores = engine.step()
        last = []
        for row, name in enumerate(step.names):
            request, begin = engine.requests[name], int(step.starts[row])
            drafted = int(step.starts[row + 1]) - begin - 1
            if copied.pop(id(request), 0) and drafted and int(step.positions[begin]) >= request.prompt:
                last.append((drafted, int(step.ends[row]) - begin))
        outcomes += last
        drafts = switch.decide(step, engine.requests).over(torch.full((len(step.names), CONFIG.depth), -5))
        for row, name in enumerate(step.names):
            request = engine.requests[name]
            wanted = longest(request.text, CONFIG.depth) if scores[row] >= TAU and not step.unused[row] else []
            assert drafts[row].tolist() == (wanted or [-5] * CONFIG.depth)
            if not step.unused[row]:
                request.drafts = wanted or [0] * CONFIG.depth
            if wanted:
                copied[id(request)] = len(wanted)
    assert counters.outcomes in (outcomes, outcomes[: len(outcomes) - len(last)])


def test_a_copy_with_an_unknown_token_is_not_drafted() -> None:
    texts = Texts(torch.tensor([[1, 2, -1, 1, 2]], dtype=torch.int32), torch.tensor([5]), torch.tensor([0]))
    switch = DeviceSwitch(probe(), MatchConfig(kappa=2, candidates=1, depth=K), 0.5, 1)
    copies = switch.decide(torch.full((1, WIDTH), 3.0), texts, torch.tensor([True]))
    assert copies.over(torch.full((1, K), 9)).tolist() == [[9] * K]
    assert not copies.asked.any()
