"""The benchmark on a small random target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_eagle_head import random_head

from activations.target import Target
from decoding import bench as module
from decoding.baselines import hugging_face
from decoding.bench import Bench, BenchConfig, gated, measure, unequal
from decoding.columns import Column, ModeColumn, drafts_of
from decoding.decoder import Decoder
from decoding.eagle.drafter import EagleDrafter
from decoding.modes import DecodingError, ModeSettings
from decoding.suite import CONVERSATION, SuitePrompt, load_suite
from decoding.summary import Drafts, Row

CONFIG = BenchConfig(modes=("ar", "copy"), baselines=("hf", "hf-lookup"), max_new_tokens=40)


def suite(n: int = 3) -> list[SuitePrompt]:
    texts = ["ABABABABAB", "abcabcabcabc", "list:0;1;2;"]
    return [
        SuitePrompt(f"s:{i}", "qa" if i % 2 else "rag", i % 2 == 0, ({"role": "user", "content": t},))
        for i, t in enumerate(texts[:n])
    ]


@pytest.fixture(scope="module")
def decoder(small_target: Callable[..., Target]) -> Decoder:
    return Decoder(small_target("llama"))


def test_run_measures_every_mode_and_writes_results(decoder: Decoder, tmp_path: Path) -> None:
    run = Bench(decoder, suite(), CONFIG, tmp_path)
    assert (run.done, run.total) == (0, 12)
    rows = list(run.run())
    assert {(r.key, r.mode) for r in rows} == {(p.key, m) for p in suite() for m in CONFIG.columns}
    for row in rows:
        assert row.decoded == len(row.tokens) - 1 > 0
        assert row.decode_seconds > 0
        assert row.first_token_seconds > 0
    by_key = {(r.key, r.mode): r for r in rows}
    for prompt in suite():
        assert by_key[prompt.key, "ar"].steps == by_key[prompt.key, "ar"].decoded
        for mode in CONFIG.columns:  # float32: the same text, also beside Hugging Face's
            assert by_key[prompt.key, mode].tokens == by_key[prompt.key, "hf"].tokens
    copy = [by_key[p.key, "copy"] for p in suite()]
    assert sum(r.drafts.get("copy", Drafts()).accepted for r in copy) == sum(r.decoded - r.steps for r in copy) > 0
    result = run.result()
    assert unequal(result) == []
    assert {m: e["different"] for m, e in result["equality"]["modes"].items()} == {"hf-lookup": 0, "ar": 0, "copy": 0}
    assert json.loads((tmp_path / "result.json").read_text())["summary"] == result["summary"]
    table = (tmp_path / "table.md").read_text()
    assert "## overall (3 prompts)" in table
    assert "## copy-heavy (2 prompts)" in table
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_an_interrupted_run_goes_on(decoder: Decoder, tmp_path: Path) -> None:
    run = Bench(decoder, suite(2), CONFIG, tmp_path)
    first = [row for _, row in zip(range(3), run.run(), strict=False)]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"key": "s:0", "mo')  # cut in the middle of a line
    again = Bench(decoder, suite(2), CONFIG, tmp_path)
    assert again.done == 3
    rest = list(again.run())
    assert {(r.key, r.mode) for r in first}.isdisjoint((r.key, r.mode) for r in rest)
    assert again.done == again.total == 8
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 8
    assert list(Bench(decoder, suite(2), CONFIG, tmp_path).run()) == []


def test_other_settings_are_measured_anew_and_only_where_they_matter(decoder: Decoder, tmp_path: Path) -> None:
    list(Bench(decoder, suite(1), CONFIG, tmp_path).run())
    longer = Bench(decoder, suite(1), replace(CONFIG, max_new_tokens=41), tmp_path)
    assert longer.done == 0
    kappa = Bench(Decoder(decoder.target, settings=ModeSettings(kappa=3)), suite(1), CONFIG, tmp_path)
    assert {r.mode for r in kappa.rows} == {"hf", "hf-lookup", "ar"}


def test_the_order_of_the_modes_rotates(decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def fake(column: Column, prompt: SuitePrompt, ids: list[int], max_new_tokens: int) -> Row:
        seen.append((prompt.key, column.describe()["mode"]))
        return Row(prompt.key, prompt.group, False, "", "", 1, [1, 2], 1, 1, 0.1, 0.1)

    monkeypatch.setattr(module, "measure", fake)
    list(Bench(decoder, suite(), CONFIG, tmp_path).run())
    measured = seen[len(CONFIG.columns) :]  # the first ones warm up
    assert [mode for _, mode in seen[:4]] == list(CONFIG.columns)
    assert [mode for key, mode in measured if key == "s:0"] == ["hf", "hf-lookup", "ar", "copy"]
    assert [mode for key, mode in measured if key == "s:1"] == ["hf-lookup", "ar", "copy", "hf"]


def test_a_difference_is_judged_by_the_target_s_own_logits(decoder: Decoder, tmp_path: Path) -> None:
    prompt = suite(1)[0]
    run = Bench(decoder, [prompt], CONFIG, tmp_path)
    list(run.run())
    target = decoder.target
    wrong = next(r for r in run.rows if r.mode == "copy")
    right = list(wrong.tokens)
    other = (right[5] + 7) % target.vocab_size
    wrong.tokens[5] = other
    found = run.result()["equality"]
    assert unequal({"equality": found}) == ["copy"]
    [difference] = found["modes"]["copy"]["differences"]
    ids = torch.tensor([[*target.encode_messages(prompt.messages), *right[:5]]])
    logits = target.model(ids).logits[0, -1].detach()
    gap = float(logits.max() - logits[other])
    assert difference["index"] == 5
    assert difference["tokens"] == (other, right[5])
    assert difference["gap"] == pytest.approx(gap, abs=1e-4)
    spacing = 2.0 ** (math.floor(math.log2(abs(float(logits.max())))) - 7)
    below = torch.nextafter(logits.max().to(torch.bfloat16).abs(), torch.tensor(1e9, dtype=torch.bfloat16))
    assert float(below) - float(logits.max().to(torch.bfloat16).abs()) == pytest.approx(spacing)
    assert difference["ulps"] == pytest.approx(gap / spacing, rel=1e-3)
    assert found["modes"]["copy"]["near_ties"] == int(difference["ulps"] <= 4)


def test_baseline_pieces_add_up_and_attention_is_set_back(decoder: Decoder) -> None:
    before = decoder.target.model.config._attn_implementation
    ids = decoder.target.encode("ABABABABAB")
    plain = hugging_face(decoder.target, ids, 30, "hf")
    lookup = hugging_face(decoder.target, ids, 30, "hf-lookup")
    assert plain.tokens == lookup.tokens
    assert plain.pieces == [1] * len(plain.tokens)
    assert sum(lookup.pieces) == len(lookup.tokens)
    assert decoder.target.model.config._attn_implementation == before
    with pytest.raises(ValueError, match="unknown baseline"):
        hugging_face(decoder.target, ids, 30, "vllm")


def test_drafts_are_counted_by_drafter(decoder: Decoder) -> None:
    prompt = suite(1)[0]
    row = measure(ModeColumn(decoder, "copy"), prompt, decoder.target.encode_messages(prompt.messages), 40)
    records = decoder.trace.records
    drafted = [r for r in records if r.tokens]
    empty = [r for r in drafted if not r.accepted]
    assert drafts_of(records)["copy"] == Drafts(
        len(drafted), sum(len(r.accepted) for r in drafted), len(empty), sum(r.milliseconds for r in empty) / 1e3
    )
    assert row.steps == len(records)
    assert sum(d.empty_seconds for d in row.drafts.values()) <= row.step_seconds <= row.decode_seconds


def test_columns_with_settings_of_their_own(decoder: Decoder, tmp_path: Path) -> None:
    class Half:
        """A probe that says yes at every other position, roughly."""

        class config:
            sites, threshold, kappa = ("resid_mid.1",), 0.5, 5

            @staticmethod
            def to_dict() -> dict:
                return {"site": "resid_mid.1"}

        def score(self, state: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(state.float()[..., 0] * 100)

    columns = ("copy", "copy/kappa=3", "switchsd", "switchsd/kappa=3", "switchsd/gate=match")
    config = BenchConfig(modes=columns, baselines=(), max_new_tokens=40)
    with_probe = Decoder(decoder.target, probe=Half())
    run = Bench(with_probe, suite(), config, tmp_path)
    rows = {(r.key, r.mode): r for r in run.run()}
    assert len({r.settings for r in rows.values()}) == 5
    result = run.result()
    pairs = {(g["mode"], g["always"]) for g in result["gate"]}
    assert pairs == {
        ("switchsd", "copy"), ("switchsd", "switchsd/gate=match"), ("switchsd/kappa=3", "copy/kappa=3"),
    }  # fmt: skip
    for prompt in suite():
        free = ModeColumn(Decoder(decoder.target, settings=ModeSettings(kappa=3)), "copy")
        alone = measure(free, prompt, decoder.target.encode_messages(prompt.messages), 40)
        mine, theirs = rows[prompt.key, "copy/kappa=3"].drafts["copy"], alone.drafts["copy"]
        assert (mine.steps, mine.accepted, mine.empty) == (theirs.steps, theirs.accepted, theirs.empty)
    for bad in ("copy/kapa=3", "copy/kappa", "copy/kappa=0", "copy/gate=luck"):
        with pytest.raises(DecodingError, match="copy/"):
            Bench(with_probe, suite(), replace(config, modes=(bad,)), tmp_path)


def test_a_gate_is_compared_with_copying_under_the_same_limits(decoder: Decoder) -> None:
    free = Decoder(decoder.target, probe=decoder.probe, settings=ModeSettings(gate="match"))
    plan = free.describe("switchsd")

    class Gated(Decoder):
        def describe(self, mode: str) -> dict:
            return {**super().describe(mode), "gate": "ProbeGate"}

    probed = Gated(decoder.target, settings=ModeSettings(gate="match"))
    wide = Gated(decoder.target, settings=ModeSettings(gate="match", copy_nodes=40))
    columns = {name: ModeColumn(d, "switchsd") for name, d in (("free", free), ("probed", probed), ("wide", wide))}
    assert plan["gate"] == "MatchLengthGate"
    assert gated(columns) == [("probed", "free")], "another number of nodes is more than another gate"


def test_an_eagle_column_runs_and_its_rows_depend_on_the_head(decoder: Decoder, tmp_path: Path) -> None:
    def run(seed: int) -> Bench:
        drafter = EagleDrafter(decoder.target, random_head(seed), sites=[f"resid_pre.{k}" for k in range(3)])
        config = BenchConfig(modes=("ar", "eagle"), baselines=(), max_new_tokens=12)
        return Bench(Decoder(decoder.target, neural=drafter), suite(1), config, tmp_path)

    rows = {r.mode: r for r in run(0).run()}
    assert rows["eagle"].tokens == rows["ar"].tokens
    assert rows["eagle"].drafts["eagle"].steps > 0
    assert run(0).done == 2
    assert {r.mode for r in run(1).rows} == {"ar"}


def test_suite_groups_and_limits(tmp_path: Path) -> None:
    mixed, single = tmp_path / "mixed.jsonl", tmp_path / "gsm.jsonl"
    families = ["writing"] * 10 + ["rag"] * 10 + ["coding"] * 5
    lines = [{"question_id": i, "category": c, "turns": [f"q{i}", "then"]} for i, c in enumerate(families)]
    mixed.write_text("\n".join(map(json.dumps, lines)))
    single.write_text(json.dumps({"question_id": 0, "category": "math", "turns": ["2 + 2?"]}))
    prompts = load_suite([mixed, single])
    assert len(prompts) == 26
    assert {p.group for p in prompts} == {CONVERSATION, "rag", "gsm"}
    assert sum(p.copy_heavy for p in prompts) == 15
    assert prompts[0].messages == ({"role": "user", "content": "q0"},)
    assert len({p.key for p in prompts}) == 26
    few = load_suite([mixed, single], limit=5)
    assert [p.group for p in few].count("rag") == 2
    assert [p.group for p in few].count(CONVERSATION) == 3
    assert [p.group for p in few].count("gsm") == 1
    with pytest.raises(ValueError, match="rename one"):
        load_suite([mixed, tmp_path / "other" / "mixed.jsonl"])


def test_the_built_in_suite_is_the_validation_corpus() -> None:
    prompts = load_suite([])
    assert prompts
    assert all(p.key.startswith("validation:") for p in prompts)
    assert any(p.copy_heavy for p in prompts)
    assert not all(p.copy_heavy for p in prompts)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"modes": ()}, "at least one"),
        ({"baselines": ("tgi",)}, "unknown baseline 'tgi'"),
        ({"max_new_tokens": 1}, "at least 2"),
        ({"limit": -1}, "0 (all)"),
    ],
)
def test_bad_settings_are_named(values: dict, text: str) -> None:
    with pytest.raises(ValueError) as error:
        BenchConfig(**values)
    assert text in str(error.value)
