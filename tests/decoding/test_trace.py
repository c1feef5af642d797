"""Traces survive the disk."""

from __future__ import annotations

import copy
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.chat import Chat
from decoding.decoder import Decoder
from decoding.modes import ModeSettings
from decoding.trace import RECORDS, TEXTS, About, StepRecord, Trace, spell

TEXT_WITHOUT_PIECES = """{"about": null, "strings": {}, "texts": [
    {"request": 0, "prompt": [1], "tokens": [], "sources": [], "pieces": []}
]}"""


def record(step: int, intent: float | None) -> StepRecord:
    return StepRecord(
        request=3, step=step, start=0.25 * step, position=10 + step, mode="switchsd", drafters=("copy",) * (step % 2),
        reason="intent", intent=intent, match_length=5 * step, match_start=-1 if step == 0 else 4,
        tokens=(7, 8, 9)[:step], parents=(-1, 0, 0)[:step], source=("copy",) * step, logq=(0.0, -1.5, -0.5)[:step],
        accepted=(0,)[:step], pending=11, rows=2, draft_ms=0.5, verify_ms=40.25, overhead_ms=0.125,
    )  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    trace = Trace(record(i, intent) for i, intent in enumerate([None, 0.75, 0.0, None]))
    trace.save(tmp_path / "t.parquet")
    assert Trace.load(tmp_path / "t.parquet").records == trace.records
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"], "scratch was left behind"


def test_an_empty_trace(tmp_path: Path) -> None:
    Trace().save(tmp_path / "t.parquet")
    assert len(Trace.load(tmp_path / "t.parquet")) == 0


def test_depth_is_that_of_the_longest_path() -> None:
    assert [record(i, None).depth for i in range(4)] == [0, 1, 2, 2]


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=r"cannot read the trace .*broken\.parquet: Parquet "):
        Trace.load(broken)
    pq.write_table(pa.table({"request": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="lacks step, start"):
        Trace.load(tmp_path / "other.parquet")


def test_texts_come_back_without_a_target(small_target: Any, tmp_path: Path) -> None:
    decoder = Decoder(small_target(), settings=ModeSettings(kappa=2))
    prompts = ["01230123", "5454"]
    found = decoder.generate(prompts, mode="copy", max_new_tokens=30)
    decoder.trace.save(tmp_path / "t.parquet")
    back = Trace.load(tmp_path / "t.parquet")
    assert back.records == decoder.trace.records and back.about == decoder.trace.about
    assert back.texts == decoder.trace.texts
    assert back.about is not None and (back.about.mode, back.about.kappa, back.about.tau) == ("copy", 2, None)
    assert back.about.settings["kappa"] == 2
    for i, made in enumerate(found):
        [text] = [t for t in back.texts if t.request == i]
        assert list(text.tokens) == made.tokens and list(text.sources) == made.sources
        assert "".join(text.pieces) == prompts[i] + small_target().decode(made.tokens, skip_special_tokens=False)
    for r in back:
        text = back.texts[r.text]
        assert text.request == r.request
        whole = [*text.prompt, *text.tokens]
        step = [*(r.tokens[i] for i in r.accepted), r.pending][: len(whole) - r.position - 1]  # the last one may be cut
        assert whole[r.position + 1 : r.position + 1 + len(step)] == step
        assert all(back.string(t) == small_target().decode([t], skip_special_tokens=False) for t in r.tokens)


def test_a_chat_has_a_text_a_turn(small_target: Any) -> None:
    target = copy.copy(small_target())
    target.tokenizer = copy.copy(target.tokenizer)
    target.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = Chat(Decoder(target), mode="copy", max_new_tokens=5)
    with chat:
        chat.send("0123")
        chat.send("45")
        texts = chat.decoder.trace.texts
    assert [t.request for t in texts] == [0, 0] and len(texts[1].prompt) > len(texts[0].prompt) + 4
    assert {r.text for r in chat.decoder.trace} == {0, 1}


def test_a_chat_that_starts_again_keeps_its_former_turns(small_target: Any) -> None:
    target = copy.copy(small_target())
    target.tokenizer = copy.copy(target.tokenizer)
    target.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with Chat(Decoder(target), mode="copy", max_new_tokens=5) as chat:
        chat.send("0123")
        [former] = chat.decoder.trace.texts
        chat.reset()
        chat.send("45")
        trace = chat.decoder.trace
    assert trace.texts[0] == former and len(trace.texts[1].prompt) < len(former.prompt)
    assert {r.text for r in trace} == {0, 1}
    starts = [r.start for r in trace]
    assert starts == sorted(set(starts)), "time runs on"


def test_a_trace_of_version_1_loads_without_texts(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    trace = Trace(record(i, None) for i in range(3))
    trace.save(tmp_path / "new.parquet")
    table = pq.read_table(tmp_path / "new.parquet").drop(["text"])
    pq.write_table(table.replace_schema_metadata({"switchsd_trace": "1"}), tmp_path / "old.parquet")
    old = Trace.load(tmp_path / "old.parquet")
    assert (old.records, old.texts, old.about) == (trace.records, [], None)
    assert old.string(7) == "#7"


@pytest.mark.parametrize("beside", ["{", "[]", '{"about": {"x": 1}, "texts": [], "strings": {}}', TEXT_WITHOUT_PIECES])
def test_texts_that_cannot_be_read_are_named(beside: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    Trace([record(0, None)]).save(tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    pq.write_table(table.replace_schema_metadata({TEXTS: beside}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"the texts of the trace .*t\.parquet cannot be read"):
        Trace.load(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    "wrong",
    [
        '{"tau": "high"}', '{"target": 5}', '{"lossless": null}', '{"settings": [1]}', '{"pieces": "ab"}',
        '{"pieces": [1, 2]}', '{"tokens": ["2"]}', '{"sources": [null]}', '{"request": "a"}', '{"prompt": null}',
    ],
)  # fmt: skip
def test_texts_of_wrong_types_are_named(wrong: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    about = asdict(About("t", "ar", True, "Never", None, None, None, None))
    text = {"request": 0, "prompt": [1], "tokens": [2], "sources": ["copy"], "pieces": ["a", "b"]}
    beside = {"about": about, "texts": [text], "strings": {}}
    file = tmp_path / "t.parquet"
    Trace([record(0, None)]).save(file)
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({TEXTS: json.dumps(beside)}), file)
    assert Trace.load(file).texts[0].pieces == ("a", "b")
    [(name, value)] = json.loads(wrong).items()
    (about if name in about else text)[name] = value
    pq.write_table(table.replace_schema_metadata({TEXTS: json.dumps(beside)}), file)
    with pytest.raises(ValueError, match=f"the texts of the trace .* cannot be read: {name} (has|is)"):
        Trace.load(file)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"source": ("copy",)}, "source has 1 values for 2 drafted tokens"),
        ({"logq": (0.0,) * 3}, "logq has 3 values"),
        ({"parents": (0, 0)}, "the parent of node 0 is 0"),
        ({"parents": (-2, 0)}, "the parent of node 0 is -2"),
        ({"accepted": (2,)}, "accepted names node 2 of 2"),
        ({"kept": (-1,)}, "kept names node -1"),
        ({"verify_ms": math.inf}, "verify_ms is inf"),
        ({"start": math.nan}, "start is nan"),
        ({"position": -1}, "position is -1"),
        ({"reason": None}, "reason lacks values"),
        ({"tokens": (7, None)}, "tokens lacks values"),
    ],
)
def test_steps_that_contradict_themselves_are_named(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    Trace([record(2, math.inf), replace(record(2, None), **wrong)]).save(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=f"the steps of the trace .* cannot be read: .*{says}"):
        Trace.load(tmp_path / "t.parquet")


def test_columns_of_another_type_are_named_or_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    trace, file = Trace(record(i, None) for i in range(3)), tmp_path / "t.parquet"
    trace.save(file)
    table = pq.read_table(file)
    place = table.column_names.index("step")
    pq.write_table(table.set_column(place, "step", pa.array([0, 1, 2], pa.int8())), file)
    assert Trace.load(file).records == trace.records
    for values in (["a", "b", "c"], [[0], [1], [2]], [0.5, 1.5, 2.5]):
        pq.write_table(table.set_column(place, "step", pa.array(values)), file)
        with pytest.raises(ValueError, match=r"the steps of the trace .* cannot be read"):
            Trace.load(file)


def test_a_trace_of_a_later_version_is_named(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    trace, file = Trace([record(1, None)]), tmp_path / "t.parquet"
    trace.save(file)
    table = pq.read_table(file)
    for version in ("3", "12"):
        pq.write_table(table.replace_schema_metadata({RECORDS: version}), file)
        with pytest.raises(ValueError, match=f"is a trace of version {version}, and this switchsd reads 2"):
            Trace.load(file)
    for version in ("1", "2", "", "\u00b2"):
        pq.write_table(table.replace_schema_metadata({RECORDS: version}), file)
        assert Trace.load(file).records == trace.records


def test_any_name_that_the_system_knows(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b'n\xff "><b>.parquet')
    Trace([record(1, None)]).save(file)
    assert Trace.load(file).records == [record(1, None)]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_trace_that_is_read_goes_on(tmp_path: Path) -> None:
    """Saved twice, read, added to, saved and read again."""
    from made_traces import made, write

    trace, _ = made(tokens=20)
    for _ in range(2):
        trace.save(tmp_path / "t.parquet")
    read = Trace.load(tmp_path / "t.parquet")
    write(read, 10, 5, 1, 200)
    read.save(tmp_path / "u.parquet")
    again = Trace.load(tmp_path / "u.parquet")
    assert again.records == read.records and again.records[: len(trace)] == trace.records
    assert again.texts == read.texts and again.texts[0] == trace.texts[0]
    assert {r.text for r in again.records[len(trace) :]} == {1}
    for token in trace.records[0].tokens:
        assert again.string(token) == trace.string(token)


@given(st.text(max_size=60))
def test_pieces_join_to_the_text_whatever_the_tokens_cut(text: str) -> None:
    """Tokens of one byte: the hardest cuts there are."""
    tokens = list(text.encode("utf-8", "replace"))
    pieces = spell(lambda ids: bytes(ids).decode("utf-8", "replace"), tokens)
    assert "".join(pieces) == bytes(tokens).decode("utf-8", "replace")
    assert len(pieces) == len(tokens)


def test_bytes_that_make_no_character_are_told_too() -> None:
    tokens = [0x80] * 30 + list(b"end")
    pieces = spell(lambda ids: bytes(ids).decode("utf-8", "replace"), tokens)
    assert "".join(pieces) == "\N{REPLACEMENT CHARACTER}" * 30 + "end"
