"""What the viewer's page is given is what the trace holds, whatever the strings in it; colours can be told apart."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_traces import ABOUT, WORDS, made, particles, write

from activations.figures import SOURCE_COLOURS
from decoding.request import Request
from decoding.trace import StepRecord, Trace
from decoding.viewer import compared, inline, page
from decoding.viewer import page as page_module  # the function, by which the module is hidden
from decoding.viewer.data import NONE, opening, summaries, trace_data
from decoding.viewer.page import DARK, HEAVY, LIGHT, _asset, as_script, colours, contrast, distinct

SEEDS = range(5)


def owners(text: dict[str, Any]) -> list[tuple[int, int]]:
    return list(zip(text["by"], text["node"], strict=True))


# -- data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_each_token_knows_its_step_and_node(seed: int) -> None:
    trace, [truth] = made(seed=seed)
    again = write(trace, 50, 7, seed + 100, len(WORDS))
    first, second = trace_data("t", trace)["texts"]
    assert (owners(first), owners(second)) == (truth, again)
    assert first["rows"] + second["rows"] == list(range(len(trace)))
    assert [first["pieces"], second["pieces"]] == [list(text.pieces) for text in trace.texts]
    sources = trace_data("t", trace)["sources"]
    assert [sources[i] for i in first["source"]] == list(trace.texts[0].sources) and sources[0] == "target"


def slow_summary(records: list[StepRecord]) -> dict[str, float]:
    """Of steps of a single row each."""
    tokens = seconds = copied = empty = 0.0
    for r in records:
        tokens += len(r.accepted) + 1
        seconds += (r.draft_ms + r.verify_ms + r.overhead_ms) / 1e3
        if "copy" in r.drafters:
            copied += 1
            empty += len(r.accepted) == 0
    return {
        "written": tokens, "tokens_per_second": tokens / seconds, "tokens_per_step": tokens / len(records),
        "steps": len(records), "copied": copied, "false_copies": empty, "seconds": seconds,
        "verify_ms": sum(r.verify_ms for r in records) / len(records),
    }  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_the_numbers_are_those_of_a_slow_count(seed: int) -> None:
    trace, _ = made(tokens=300, seed=seed)
    [found] = summaries(trace)
    expected = slow_summary(trace.records)
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-3)
    assert expected["copied"] > expected["false_copies"] > 0, "nothing was tried"
    drafted = Counter(source for r in trace for source in r.source)
    assert found["drafted"] == drafted
    assert found["kept"] == Counter(r.source[node] for r in trace for node in r.accepted)


def test_the_time_of_a_forward_that_requests_share_counts_once_in_each_text() -> None:
    trace, _ = made(tokens=20)
    write(trace, 20, 7, 9, len(WORDS))
    shared = [replace(r, start=float(r.step), rows=2, draft_ms=1.0, verify_ms=8.0, overhead_ms=1.0) for r in trace]
    trace.records[:] = shared
    for text, numbers in enumerate(summaries(trace)):
        steps = sum(r.text == text for r in shared)
        assert numbers["seconds"] == pytest.approx(0.01 * steps) and numbers["steps"] == steps


@pytest.mark.parametrize("seed", SEEDS)
def test_the_text_of_particles_is_that_of_one_line_of_steps(seed: int) -> None:
    trace, truth = particles(seed=seed)
    data = trace_data("t", trace)
    [text] = data["texts"]
    assert owners(text) == truth
    numbers = text["summary"]
    assert (numbers["steps"], numbers["rows"]) == (6, 24)
    assert numbers["seconds"] == pytest.approx(6 * 0.031)
    assert numbers["tokens_per_step"] == pytest.approx((len(truth) - 1) / 6, abs=1e-4)
    assert data["steps"]["particle"] == [r.particle for r in trace]
    assert data["steps"]["log_weight"][:3] == [0.0, "-inf", -2.0]


def test_particles_whose_lines_part_and_meet() -> None:
    """Particle 0 writes the text's next token too, but what follows it does not go on from there."""
    trace, _ = particles(count=2, rounds=1)
    request = trace._requests[0]
    base = replace(trace.records[0], tokens=(7,), accepted=(0,), parents=(-1,), source=("draft",), logq=(0.0,))
    trace.records[:] = [
        replace(base, particle=0, position=3, tokens=(7, 8), accepted=(0, 1), pending=9, parents=(-1, 0),
                source=("draft",) * 2, logq=(0.0, 0.0)),
        replace(base, particle=1, position=3, tokens=(7,), pending=8),
        replace(base, particle=1, position=5, tokens=(9,), pending=10, step=1),
    ]  # fmt: skip
    request.tokens = [*request.prompt, 4, 7, 8, 9, 10]
    request.sources = ["target", "draft", "target", "draft", "target"]
    [text] = trace_data("t", trace)["texts"]
    assert owners(text) == [(-1, -1), (1, 0), (1, -1), (2, 0), (2, -1)]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_cut_from_the_end_is_no_difference(seed: int) -> None:
    trace, [truth] = made(tokens=40, seed=seed)
    request = trace._requests[0]
    for cut in range(1, 6):
        request.tokens, request.sources = request.tokens[:-1], request.sources[:-1]
        [text] = trace_data("t", trace)["texts"]
        assert owners(text) == truth[:-cut]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_match_is_shown_where_the_text_has_it(seed: int) -> None:
    trace, _ = made(seed=seed)
    trace.records[3] = replace(trace.records[3], match_length=2, match_start=5)  # as from another text
    ids = [*trace.texts[0].prompt, *trace.texts[0].tokens]
    [text] = trace_data("t", trace)["texts"]
    for record, found in zip(trace, text["matched"], strict=True):
        n, start, end = record.match_length, record.match_start, record.position + 1
        assert found == (n > 0 and ids[start - n : start] == ids[end - n : end] and n <= start < end)
    assert any(text["matched"]) and not text["matched"][3]


def test_a_trace_of_version_1_has_a_text_a_request() -> None:
    trace, [truth] = made()
    count = len(trace)
    write(trace, 30, 7, 0, len(WORDS))  # the same request again, as in a chat: steps count from 0 once more
    old = Trace([replace(r, text=0) for r in trace])
    data = trace_data("old", old)
    first, second = data["texts"]
    assert first["rows"] == list(range(count)) and second["rows"] == list(range(count, len(trace)))
    assert (first["known"], first["prompt"], data["about"], data["strings"]) == (False, 0, None, {})
    assert owners(first) == truth[1:] and first["start"] == old.records[0].position + 1
    tokens = trace.texts[0].tokens[1:]
    assert first["pieces"] == [f"#{token}" for token in tokens]
    names = [data["sources"][i] for i in first["source"]]
    assert names == list(trace.texts[0].sources[1:])
    assert summaries(old)[0] == summaries(trace)[0]
    several = [replace(r, text=0) for r in particles()[0]]
    [text] = trace_data("old", Trace(several))["texts"]
    assert text["pieces"] == [] and len(text["rows"]) == 24


def test_a_trace_without_steps() -> None:
    data = trace_data("empty", Trace())
    assert data["texts"] == [] and data["steps"]["step"] == []
    trace = Trace(decode=lambda ids: "x" * len(ids))
    trace.begin(made()[0]._requests[0])
    [text] = trace_data("t", trace)["texts"]
    assert set(text["by"]) == {NONE} and text["summary"]["tokens_per_second"] is None
    assert "empty trace" in inline(Trace())


def test_the_text_that_is_shown_first() -> None:
    def of(*requests: int) -> Trace:
        trace = Trace()
        for number in requests:
            trace.begin(Request(number, [1]))
        return trace

    assert [opening(of(*r)) for r in ([], [3], [3, 3, 3], [0, 1, 2], [5, 5, 6])] == [0, 0, 2, 0, 1]
    assert repr(of(1, 2)) == "<Trace: steps 0, texts 2>"


def test_a_step_of_a_text_that_is_not_there_is_named() -> None:
    trace, _ = made(tokens=20)
    trace.records[2] = replace(trace.records[2], text=4)
    with pytest.raises(ValueError, match=r"step 2 of the trace is of text 4; it holds 1 texts"):
        trace_data("t", trace)


def test_columns_hold_the_records() -> None:
    trace, _ = made(seed=2)
    trace.records[1] = replace(trace.records[1], intent=math.nan)
    trace.records[2] = replace(trace.records[2], logq=tuple(-math.inf for _ in trace.records[2].tokens))
    data = json.loads(as_script(trace_data("t", trace)))
    steps, sources = data["steps"], data["sources"]
    for i, r in enumerate(trace):
        count = len(r.tokens)
        assert steps["reasons"][steps["reason"][i]] == r.reason
        assert [sources[d] for d in steps["drafters"][i]] == list(r.drafters)
        assert (steps["parents"][i] or list(range(-1, count - 1))) == list(r.parents)
        source = steps["source"][i]
        assert [sources[s] for s in (source if isinstance(source, list) else [source] * count)] == list(r.source)
        assert (steps["tokens"][i], steps["accepted"][i]) == (list(r.tokens), list(r.accepted))
        assert (steps["position"][i], steps["pending"][i], steps["match_start"][i]) == (
            r.position, r.pending, r.match_start)  # fmt: skip
    assert steps["intent"][1] is None and steps["intent"][0] == pytest.approx(trace.records[0].intent, abs=1e-4)
    assert trace.records[2].tokens and set(steps["logq"][2]) == {"-inf"}
    assert steps["kept"] is steps["particle"] is steps["ess"] is None
    assert data["strings"][str(trace.records[0].pending)] == WORDS[trace.records[0].pending]


# -- the page -----------------------------------------------------------------------------------------


class Read(HTMLParser):
    """Tags in order, the text of each script, and attributes that could name something to fetch."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.named: list[str] = []
        self.title = ""
        self._in = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._in = tag
        if tag == "script":
            self.scripts.append("")
        self.named += [str(value) for key, value in attrs if key in ("src", "href", "srcset", "action")]

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        if self._in == "title":
            self.title += data


NASTY = "</script><script>alert(1)</script><!-- <script> ]]> &lt; &\u2028\u2029\x00\u202e\ud800<img src=x onerror=y>"
ANY = st.text(st.characters(exclude_categories=[]), max_size=12)  # lone surrogates too


PLAIN = Read(page(made(tokens=8, words=["a"] * 4)[0]))


@settings(max_examples=30, deadline=None)
@given(st.lists(ANY, min_size=4, max_size=8), ANY)
@example([NASTY, "</SCRIPT >", "<!--", "{{script}}"], NASTY)
def test_text_stays_text(words: list[str], reason: str) -> None:
    trace, _ = made(tokens=8, words=words, decode=lambda ids: "".join(words[i] for i in ids))
    trace.records[0] = replace(trace.records[0], reason=reason, drafters=(reason,))
    text = page(trace, reason)
    assert text.encode()
    read = Read(text)
    assert read.tags == PLAIN.tags
    data = json.loads(read.scripts[0])
    assert not set("<>&") & set(read.scripts[0])
    assert data["traces"][0]["texts"][0]["pieces"] == list(trace.texts[0].pieces)
    assert data["traces"][0]["strings"] == {str(t): words[t] for r in trace for t in (*r.tokens, r.pending)}
    assert data["traces"][0]["steps"]["reasons"][0] == reason and data["traces"][0]["name"] == reason
    assert read.scripts[1] == PLAIN.scripts[1]


def test_the_page_asks_for_nothing_and_runs_its_own_script_alone() -> None:
    text = page(made()[0])
    read = Read(text)
    assert read.named == ["data:,"]
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'"
    digest = base64.b64encode(hashlib.sha256(read.scripts[1].encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"


def test_script_and_style_are_light() -> None:
    assert len(page(Trace())) < 70_000


def test_two_traces_make_one_page() -> None:
    data = json.loads(Read(compared(made()[0], made(seed=1)[0], ("one", "<two>"))).scripts[0])
    assert [trace["name"] for trace in data["traces"]] == ["one", "<two>"]


def test_a_notebook_shows_the_same_page_in_a_frame() -> None:
    trace, _ = made(words=[NASTY, *WORDS])
    write(trace, 20, 7, 1, len(WORDS))
    shown = trace._repr_html_()
    frame = re.fullmatch(r'<p>.*</p><iframe srcdoc="([^"]*)" sandbox="allow-scripts" [^<>]*></iframe>', shown, re.S)
    assert frame is not None
    assert html.unescape(frame[1]) == page(trace)


def test_a_notebook_that_shows_no_frame_says_what_is_missing() -> None:
    trace, [truth] = made(about=replace(ABOUT, target=f"{NASTY}made"))
    line, _, _ = trace._repr_html_().partition("<iframe")
    read = Read(line)
    assert read.tags == ["p", "br", "small"], "no markup of the target's name"
    said = html.unescape(re.sub(r"<[^>]*>", " ", line))
    count = len(truth) - 1
    assert f"made, switchsd; {count} tokens in {len(trace)} steps; {count / len(trace):.2f} tokens per step." in said
    assert "run the cell, or trust the notebook" in said and "text 1" not in said
    write(trace, 20, 7, 1, len(WORDS))
    second = trace_data("t", trace)["texts"][opening(trace)]["summary"]
    said = trace._repr_html_().partition("<iframe")[0]
    assert f"(text {opening(trace) + 1} of 2)" in said and f"{second['written']} tokens in" in said


def test_the_line_over_the_frame_does_without_what_is_not_known() -> None:
    old = Trace([replace(r, text=0) for r in made()[0]])
    assert inline(old).startswith("<p>A trace, step by step; switchsd; ")
    unwritten = Trace(decode=lambda ids: "x" * len(ids))
    unwritten.begin(made()[0]._requests[0])
    assert inline(unwritten).startswith("<p>A trace, step by step; 0 tokens in 0 steps.<br>")


def test_a_notebook_is_spared_a_heavy_page(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("decoding.viewer.page")
    trace, _ = made()
    monkeypatch.setattr(module, "HEAVY", len(page(trace)) - 1)
    assert "iframe" not in inline(trace) and "switchsd view" in inline(trace)
    assert HEAVY > 1_000_000 and page_module is page


# -- colours ------------------------------------------------------------------------------------------


def themes() -> dict[str, dict[str, str]]:
    """The variables of each theme, by their names."""
    style = _asset("view.css")
    blocks = re.findall(r":root(\[data-theme=dark\]|:not\(\[data-theme=light\]\))? \{([^}]*)\}", style)
    found = {key: dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for key, block in blocks}
    assert found["[data-theme=dark]"] == found[":not([data-theme=light])"], "dark is dark, chosen or not"
    return {"light": found[""], "dark": found["[data-theme=dark]"]}


def mixed(colour: str, back: str, share: float) -> str:
    pairs = [(int(colour[i : i + 2], 16), int(back[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_is_read_stands_out(theme: str) -> None:
    has = themes()[theme]
    assert has["back"] == {"light": LIGHT, "dark": DARK}[theme]
    pairs = [("text", back) for back in ("back", "tile", "on", "from", "then")]
    pairs += [(name, back) for name in ("soft", "link", "bad", "good") for back in ("back", "tile")]
    pairs += [("bad", "on"), ("back", "text")]
    for name, back in pairs:
        assert contrast(has[name], has[back]) >= 4.5, f"{name} on {back}"
    tint = int(re.findall(r"--tint: (\d+)%", _asset("view.css"))[theme == "dark"]) / 100
    for source, colour in SOURCE_COLOURS.items():
        mark = distinct(colour, has["back"])
        assert contrast(mark, has["back"]) >= 3, source
        assert contrast(has["text"], mixed(mark, has["back"], tint)) >= 4.5, source


def test_colours_are_the_projects_own_where_they_stand_out() -> None:
    assert distinct("#0072B2", "#ffffff").upper() == "#0072B2"
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    style = colours(["target", "copy", "nobody knows"])
    assert style.count("--s1:") == 3 and ".s2{--own:var(--s2)}" in style
