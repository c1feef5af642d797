"""The viewer's page in headless Chromium: it shows what it should, keeps quiet, and stays quick."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_traces import ABOUT, WORDS, made, particles, write
from test_viewer import NASTY

from decoding.trace import Trace
from decoding.viewer import compared, page

CHROMIUM = Path("/usr/bin/chromium")
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")]

Show = Callable[..., Any]
QUICK = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=QUICK)
        yield found
        found.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Show]:
    """show(page, width, ...) opens a page; at the test's end nothing may have been said, raised or asked for."""
    said: list[str] = []
    opened: list[Any] = []

    def call(text: str, width: int = 1280, scheme: str = "light", **more: Any) -> Any:
        file = tmp_path / f"{len(opened)}.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        tab = context.new_page()
        opened.append(context)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: None if request.url == file.as_uri() else said.append(request.url))
        tab.goto(file.as_uri())
        return tab

    call.said = said  # type: ignore[attr-defined]
    yield call
    for context in opened:
        context.close()
    assert [text for text in said if not text.startswith("data:")] == []


def test_what_a_page_says_and_asks_for_is_heard(show: Show) -> None:
    show(
        "<!DOCTYPE html><script>console.error('broken'); throw Error('thrown')</script><img src='http://127.0.0.1:9/x'>"
    )
    heard = "\n".join(show.said)  # type: ignore[attr-defined]
    assert all(text in heard for text in ("broken", "thrown", "http://127.0.0.1:9/x"))
    show.said.clear()  # type: ignore[attr-defined]


def chosen(tab: Any) -> list[int]:
    """The pieces of the chosen step."""
    return tab.eval_on_selector_all(".text .on", "all => all.map(e => +e.dataset.i)")


def heading(tab: Any) -> str:
    return tab.inner_text("#details h2 >> nth=0")


def steps(tab: Any) -> list[int]:
    """The step numbers of the table's rows that are there, as they stand."""
    lines = tab.eval_on_selector_all("#steps .rows .line", "all => all.map(e => +e.firstChild.textContent)")
    return [int(n) for n in lines]


def settled(tab: Any) -> None:
    """Two frames later, and after what waits for the typing to end."""
    tab.evaluate("() => new Promise(r => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(r)), 90))")


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1600, "light")])
def test_it_is_readable_narrow_and_wide(show: Show, width: int, scheme: str) -> None:
    for text in (page(made()[0]), page(particles()[0]), compared(made()[0], made(seed=1)[0]), page(Trace())):
        tab = show(text, width, scheme)
        tab.keyboard.press("j")
        settled(tab)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(20, 24, 29)" if scheme == "dark" else "rgb(255, 255, 255)")
        small = tab.evaluate(
            "() => Math.min(...[...document.querySelectorAll('body *')]"
            ".filter(e => e.textContent.trim() && !e.children.length)"
            ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
        )
        assert small >= 12


def test_the_text_and_its_marks(show: Show) -> None:
    trace, [truth] = made(seed=3)
    tab = show(page(trace))
    text = trace.texts[0]
    shown = tab.eval_on_selector_all(".text .t", "all => all.map(e => e.textContent)")
    assert shown == list(text.pieces)
    classes = tab.eval_on_selector_all(".text .t", "all => all.map(e => e.className.split(' '))")
    prompt = len(text.prompt)
    assert all("p" in names for names in classes[:prompt]) and not any("p" in names for names in classes[prompt:])
    for names, source, (row, node), before in zip(
        classes[prompt:], text.sources, truth, [(-1, 0), *truth], strict=False
    ):
        assert ("u0" in names) == (source == "copy") and ("u1" in names) == (source == "eagle")
        assert ("b" in names) == (row >= 0 and before[0] != row), "a bar where a step begins"
        if row >= 0:
            record = trace.records[row]
            rejected = len(record.tokens) > len(record.accepted)
            assert ("r" in names) == (node < 0 and rejected)
            assert ("f" in names) == (node < 0 and rejected and record.copies and not record.accepted)
    style = "getComputedStyle(document.querySelector('.text .{}')).textDecorationStyle"
    assert [tab.evaluate(style.format(name)) for name in ("u0", "u1")] == ["solid", "dotted"], "not by colour alone"
    tiles = dict(
        zip(tab.locator(".tiles dt").all_inner_texts(), tab.locator("dt + dd").all_inner_texts(), strict=False)
    )
    assert f"in {len(trace)} steps, and 1 from prefill" in tab.inner_text("#tiles")
    assert tiles["tokens"] == str(len(truth) - 1) and tiles["target"] == ABOUT.target
    assert tiles["mode"] == "switchsd, lossless"
    assert tiles["tokens per step"] == f"{(len(truth) - 1) / len(trace):.2f}"


def test_a_click_chooses_a_step_everywhere(show: Show) -> None:
    trace, _ = made(seed=3)
    tab = show(page(trace))
    row = next(i for i, r in enumerate(trace) if r.copies and len(r.accepted) > 1 and r.match_start > 0)
    record = trace.records[row]
    first = record.position + 1
    tab.click(f".text [data-i='{first}']")
    settled(tab)
    assert chosen(tab) == list(range(first, first + len(record.accepted) + 1))
    assert f"step {record.step}: {len(record.accepted)} of {len(record.tokens)}" in heading(tab)
    assert tab.inner_text("#steps .rows .on >> nth=0").split("\n")[0] == str(record.step)
    assert tab.eval_on_selector_all(".text .src", "all => all.map(e => +e.dataset.i)") == [
        record.match_start - 1, record.position]  # fmt: skip
    candidate = tab.eval_on_selector_all(".text .cand", "all => all.map(e => +e.dataset.i)")
    assert candidate[0] == record.match_start and len(candidate) <= len(record.tokens)
    assert tab.locator(".arrows path").count() >= 1
    marks = tab.locator(".tree .mark").all_inner_texts()
    assert marks.count("✓") == len(record.accepted) and len(marks) == len(record.tokens)
    assert "copy intent reaches τ" in tab.inner_text("#details")
    assert not tab.locator(".curve .now").is_hidden()
    tab.click("#steps .rows .line >> nth=2")
    assert "step 2:" in heading(tab) and chosen(tab)[0] == trace.records[2].position + 1
    box = tab.locator(".curve canvas").bounding_box()
    tab.mouse.click(box["x"] + box["width"] - 12, box["y"] + 40)
    assert f"step {len(trace) - 1}:" in heading(tab)


def test_a_tap_chooses_too(show: Show) -> None:
    trace, _ = made(seed=3)
    tab = show(page(trace), 400, has_touch=True)
    tab.tap(f".text [data-i='{trace.records[4].position + 1}']")
    assert "step 4:" in heading(tab)


def test_hovering_tells_what_was_accepted_and_rejected(show: Show) -> None:
    trace, _ = made(seed=3)
    tab = show(page(trace))
    row = next(i for i, r in enumerate(trace) if 0 < len(r.accepted) < len(r.tokens))
    tab.hover(f".text [data-i='{trace.records[row].position + 1}']")
    told = tab.inner_text("#tip")
    assert "✓ accepted:" in told and "✗ rejected:" in told and f"step {trace.records[row].step}" in told
    tab.hover("#title")
    assert tab.locator("#tip").is_hidden()


def test_the_keyboard(show: Show) -> None:
    trace, _ = made()
    tab = show(page(trace))
    press = tab.keyboard.press
    for key, step in [("j", 0), ("ArrowRight", 1), ("j", 2), ("k", 1), ("ArrowLeft", 0), ("ArrowLeft", 0),
                      ("End", len(trace) - 1), ("Home", 0)]:  # fmt: skip
        press(key)
        assert heading(tab).startswith(f"step {step}:")
    assert tab.inner_text("#live").startswith("Step 0:")
    press("/")
    assert tab.evaluate("document.activeElement.type") == "search"
    press("j")
    assert heading(tab).startswith("step 0:"), "keys are letters in the filter"
    press("Escape")
    press("?")
    assert tab.locator("#help").is_visible() and "suffix match" in tab.inner_text("#help")
    press("Escape")
    assert not tab.locator("#help").is_visible()
    tab.focus(".text")
    assert tab.evaluate("getComputedStyle(document.querySelector('.text')).outlineStyle") == "solid", (
        "the focus is seen"
    )
    press("Enter")
    assert tab.evaluate("document.activeElement.id") == "details"
    tab.focus("#steps .grid")
    press("ArrowDown")
    assert heading(tab).startswith("step 1:")


def test_themes(show: Show) -> None:
    tab = show(page(made()[0]), scheme="light")
    back = "getComputedStyle(document.body).backgroundColor"
    seen = [tab.evaluate(back)]
    for _ in range(3):
        tab.keyboard.press("t")
        seen.append(tab.evaluate(back))
    white, dark = "rgb(255, 255, 255)", "rgb(20, 24, 29)"
    assert seen == [white, dark, white, white]
    tab.click("#theme")
    assert tab.evaluate(back) == dark
    tab.reload()
    assert tab.evaluate(back) == dark, "remembered"


def test_sorting_and_filters(show: Show) -> None:
    trace, _ = made(tokens=60, seed=38)
    tab = show(page(trace), 1600)
    count = len(trace)
    assert steps(tab) == list(range(count)), "the test wants all rows to be in view or near it"
    tab.click("[data-key=kept] button")
    kept = [len(r.accepted) for r in trace]
    settled(tab)
    assert [kept[s] for s in steps(tab)] == sorted(kept)
    assert tab.get_attribute("[data-key=kept]", "aria-sort") == "ascending"
    tab.click("[data-key=kept] button")
    settled(tab)
    assert [kept[s] for s in steps(tab)] == sorted(kept, reverse=True)
    tab.click("[data-key=step] button")
    for name, test in {
        "copied": lambda r: r.copies, "false copy": lambda r: r.copies and not r.accepted,
        "rejected something": lambda r: len(r.tokens) > len(r.accepted), "abstained": lambda r: not r.drafters,
    }.items():  # fmt: skip
        expected = [r.step for r in trace if test(r)]
        assert 0 < len(expected) < count, name
        tab.click(f"#steps button:text-is('{name}')")
        settled(tab)
        assert steps(tab) == expected, name
        assert tab.inner_text("#steps [role=status]") == f"{len(expected)} of {count} steps"
        tab.click(f"#steps button:text-is('{name}')")
    wanted = WORDS[trace.records[5].pending].strip() or "w1"
    for typed, test in [
        (wanted.upper(), lambda r: wanted in "".join(WORDS[t] + "," for t in (*r.tokens, r.pending))),
        ("no intent", lambda r: r.reason == "no intent"), ("copy", lambda r: r.copies),
        ("nothing has this", lambda r: False),
    ]:  # fmt: skip
        tab.fill("#steps input", typed)
        settled(tab)
        assert steps(tab) == [r.step for r in trace if test(r)], typed


def test_text_is_text(show: Show) -> None:
    """Markup, a null, a character that turns the writing around, and half a character."""
    trace, _ = made(words=[NASTY, "<b>bold</b>", "{{data}}", "שלום ", "", "\t\r"], prompt=9)
    trace.records[0] = replace(trace.records[0], reason="<img src=x onerror=alert(1)>")
    tab = show(page(trace, name="<script>alert(2)</script>.parquet"))
    tab.keyboard.press("j")
    assert tab.evaluate("document.querySelectorAll('#middle b, #middle img, #middle script, #steps img').length") == 0
    assert "<img src=x onerror=alert(1)>" in tab.inner_text("#details") and "<script>alert(2)" in tab.inner_text(
        "#title"
    )
    shown = tab.inner_text(".text")
    assert "</script><script>alert(1)" in shown and "\x00" not in shown and "\u202e" not in shown
    assert "U+202E" in shown and "␀" in shown
    empty = next(r for r in trace if trace.texts[0].pieces[r.position + 1] == "")
    box = tab.locator(f".text [data-i='{empty.position + 1}']").bounding_box()
    assert box["width"] > 3, "a piece of a character can be clicked on"


def test_joiners_are_a_part_of_what_they_join(show: Show) -> None:
    family, persian = "\U0001f468\u200d\U0001f469", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    tab = show(page(made(words=[family, persian, "\u200d\u200d", "a\u200bb", "\u061c\x85\U000e0041"])[0]))
    shown = tab.inner_text(".text")
    assert family in shown and persian in shown
    assert "\u27e8U+200D\u27e9\u27e8U+200D\u27e9" in shown and "a\u27e8U+200B\u27e9b" in shown
    assert "\u27e8U+061C\u27e9\u27e8U+0085\u27e9\u27e8U+E0041\u27e9" in shown


def test_spaces_alone_go_on_in_the_next_line(show: Show) -> None:
    tab = show(page(made(words=["    "], tokens=100)[0]), width=400)
    boxes = tab.eval_on_selector_all(".text .t", "all => all.map(e => e.getClientRects()[0].right)")
    assert max(boxes) <= 400


@pytest.mark.parametrize("tau", [math.inf, -math.inf])
def test_a_threshold_that_cannot_be_drawn_is_told(show: Show, tau: float) -> None:
    """A threshold chosen for its rate may be one that nothing reaches."""
    tab = show(page(made(about=replace(ABOUT, tau=tau))[0]))
    tab.keyboard.press("j")
    assert heading(tab).startswith("step 0:") and ("−∞" if tau < 0 else "(τ ∞)") in tab.inner_text("#details")


def test_paper_is_white_and_has_all_steps(show: Show) -> None:
    trace, _ = made(tokens=600)
    tab = show(page(trace), scheme="dark")
    tab.emulate_media(media="print", color_scheme="dark")
    for chosen_theme in ("", "dark"):
        tab.evaluate("name => { document.documentElement.dataset.theme = name; }", chosen_theme)
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("#steps .rows .line").count() == len(trace)
    text = tab.evaluate(
        "(() => { const e = document.querySelector('.text'); return e.scrollHeight - e.clientHeight; })()"
    )
    assert text <= 0, "all of the text is there"
    tab.emulate_media(media="screen")
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    settled(tab)
    assert tab.locator("#steps .rows .line").count() < len(trace)


def test_a_trace_with_fewer_texts_shows_its_last(show: Show) -> None:
    first, second = made()[0], made(seed=2)[0]
    write(second, 40, 12, 5, len(WORDS))
    tab = show(compared(first, second, text=1))
    assert "A: There is no text 2: the last one, 1, is shown." in tab.inner_text("#notes")
    tab.select_option("#texts", "0")
    assert "There is no text" not in tab.inner_text("#notes")


def test_a_trace_without_texts_is_not_compared_token_by_token(show: Show) -> None:
    trace, _ = made()
    old = Trace([replace(r, text=0) for r in trace])
    tab = show(compared(trace, old))
    notes = tab.inner_text("#notes")
    assert "The texts are not compared" in notes and "differ" not in notes
    tab.keyboard.press("j")
    assert heading(tab).startswith("A, step 0:") and len(chosen(tab)) == len(trace.records[0].accepted) + 1
    assert "Both answers are equal" in show(compared(old, Trace(old.records))).inner_text("#notes")


def test_long_names_leave_room_for_what_is_compared(show: Show) -> None:
    tab = show(compared(made()[0], made(seed=2)[0], ("a" * 80, "b" * 80)), width=320)
    heads = tab.eval_on_selector_all(".beside tbody th", """all => all.map(e => {
        const range = document.createRange();
        range.selectNodeContents(e);
        return [e.textContent, range.getClientRects().length];
    })""")  # fmt: skip
    assert all(lines <= len(name.split()) for name, lines in heads), heads
    assert tab.evaluate("document.documentElement.scrollWidth") <= 320


def test_a_choice_of_texts(show: Show) -> None:
    trace, _ = made()
    write(trace, 40, 12, 5, len(WORDS))
    tab = show(page(trace, text=1))
    assert tab.input_value("#texts") == "1"
    assert tab.locator(".text .t").count() == 12 + len(trace.texts[1].tokens)
    tab.select_option("#texts", "0")
    assert tab.locator(".text .t").count() == len(trace.texts[0].pieces)
    tab.keyboard.press("j")
    assert "step 0" in heading(tab) or "No step" in heading(tab)


def test_particles(show: Show) -> None:
    trace, truth = particles()
    tab = show(page(trace))
    [written] = {row for row, _ in truth if 0 <= row < 4}
    other = next(row for row in range(4) if row != written)
    tab.click(f"#steps .rows .line >> nth={written}")
    assert f"of particle {written}" in heading(tab) and chosen(tab)
    tab.click(f"#steps .rows .line >> nth={other}")
    assert "does not stand in the text" in tab.inner_text("#details") and not chosen(tab)
    tab.click("[data-key=weight] button")
    settled(tab)
    first = tab.inner_text("#steps .rows .line >> nth=0")
    assert "−∞" in first


def test_kept_against_the_target(show: Show) -> None:
    trace, _ = made(seed=3)
    row = next(i for i, r in enumerate(trace) if r.accepted)
    record = trace.records[row]
    trace.records[row] = replace(record, kept=record.accepted[:1], asked=2)
    tab = show(page(trace))
    assert "a" in tab.get_attribute(f".text [data-i='{record.position + 1}']", "class").split()
    tab.click("#steps button:text-is('against the target')")
    settled(tab)
    assert steps(tab) == [record.step]
    tab.click("#steps .rows .line")
    assert "kept against the target" in tab.inner_text(".tree")


def test_a_trace_of_version_1(show: Show) -> None:
    trace = Trace([replace(r, text=0) for r in made()[0]])
    tab = show(page(trace))
    assert "holds no text" in tab.inner_text("#notes")
    tab.click(".text .w >> nth=0")
    assert heading(tab).startswith("step 0:") and f"#{trace.records[0].pending}" in tab.inner_text("#details")


def test_two_traces(show: Show) -> None:
    first, _ = made(seed=1)
    same, _ = made(seed=1, alone=False)
    tab = show(compared(first, same))
    assert f"Both answers are equal: {len(first.texts[0].tokens)} tokens" in tab.inner_text("#notes")
    assert "1.00×" in tab.inner_text(".beside")
    request = same._requests[0]
    at = 20
    request.tokens = [*request.tokens]
    request.tokens[len(request.prompt) + at] = (request.tokens[len(request.prompt) + at] + 1) % len(WORDS)
    tab = show(compared(first, same))
    assert f"equal for {at} tokens" in tab.inner_text("#notes")
    assert tab.eval_on_selector_all(".differs", "all => all.map(e => +e.dataset.i)") == [len(request.prompt) + at] * 2
    tab.keyboard.press("j")
    assert len(chosen(tab)) == 2 * (len(first.records[0].accepted) + 1), "the other trace shows the same place"
    tab.click("#steps button:text-is('B')")
    assert tab.inner_text("#steps h2") == "Steps of B"
    tab.click("#steps .rows .line >> nth=3")
    assert heading(tab).startswith("B, step 3")
    tab = show(compared(first, made(seed=2)[0]))
    assert "The prompts differ" in tab.inner_text("#notes")


def test_what_stood_behind_the_end_is_struck_through(show: Show) -> None:
    trace, _ = made(seed=3)
    request = trace._requests[0]
    last = len(trace) - 1
    while len(trace.records[last].accepted) < 2:  # the text shall end in a step that kept two tokens and more
        last -= 1
    del trace.records[last + 1 :]
    record = trace.records[last]
    whole = [
        WORDS[t].replace("\n", "↵").replace(" ", "␣")
        for t in (*(record.tokens[n] for n in record.accepted), record.pending)
    ]
    for left in (len(whole), 1):
        cut = len(whole) - left
        request.tokens = request.tokens[: record.position + 1 + left]
        del request.sources[len(request.tokens) - len(request.prompt) :]
        tab = show(page(trace))
        tab.keyboard.press("End")
        settled(tab)
        assert heading(tab).startswith(f"step {record.step}:")
        assert tab.locator("#details s").all_inner_texts() == whole[len(whole) - cut :]
        assert tab.locator("#steps s").all_inner_texts() == ["\u2009·\u2009".join(whole[left:])] * bool(cut)
        assert tab.locator("#details .tree .more:has-text('cut:')").count() == max(0, cut - 1)
        told = f"{cut} tokens behind its end were cut" in tab.inner_text("#details")
        assert told == bool(cut) and ("(cut)" in tab.inner_text("#details")) == told


def test_two_texts_that_should_be_equal_say_why_they_part(show: Show) -> None:
    def notes(change: Callable[[Trace], None]) -> str:
        first, second = made(seed=1)[0], made(seed=1)[0]
        request = second._requests[0]
        request.tokens = [*request.tokens]
        request.tokens[60] = (request.tokens[60] + 1) % len(WORDS)
        change(second)
        return str(show(compared(first, second)).inner_text("#notes"))

    def about(**changes: Any) -> Callable[[Trace], None]:
        return lambda trace: setattr(trace, "about", replace(ABOUT, **changes))

    def shorter(trace: Trace) -> None:
        request = trace._requests[0]
        del request.tokens[60:], request.sources[60 - len(request.prompt) :]

    assert "in float32 they do not" in notes(about(mode="eagle", settings={}))
    others = [about(lossless=False), about(target="another"), about(sampling={"seed": 1}), shorter]
    for change in others:
        found = notes(change)
        assert "then A has" in found and "float32" not in found


def test_inside_a_notebook(show: Show) -> None:
    trace, _ = made()
    tab = show(f"<!DOCTYPE html><meta charset=utf-8><body>{trace._repr_html_()}")
    frame = tab.frame_locator("iframe")
    frame.locator(f".text [data-i='{trace.records[1].position + 1}']").click()
    assert frame.locator("#details h2 >> nth=0").inner_text().startswith("step 1:")
    frame.locator("#theme").click()


@pytest.mark.parametrize("alone", [False, True])
def test_ten_thousand_tokens_stay_smooth(show: Show, alone: bool) -> None:
    trace, _ = made(tokens=10_000, prompt=300, alone=alone)
    tab = show(page(trace))
    loaded = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert loaded < 2000
    tab.click("button:text-is('All arrows')")
    found = tab.evaluate(
        """async () => {
          const frame = () => new Promise(r => requestAnimationFrame(() => setTimeout(r)));
          const press = key => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
          const times = [];
          for (const key of ["j", "End", "k", "Home", "j", "j"]) {
            await frame();
            const begun = performance.now();
            press(key);
            document.body.getBoundingClientRect();  // laid out anew
            times.push(performance.now() - begun);
          }
          const long = [];
          const observer = new PerformanceObserver(list => long.push(...list.getEntries().map(e => e.duration)));
          observer.observe({ type: "longtask" });
          const [text, grid] = [".text", ".grid"].map(name => document.querySelector(name));
          for (let i = 0; i < 60; i++) {
            text.scrollTop += text.scrollHeight / 60;
            grid.scrollTop += grid.scrollHeight / 60;
            await frame();
          }
          await frame();
          const rows = document.querySelectorAll(".rows .line");
          const last = rows[rows.length - 1].firstChild.textContent;
          return JSON.stringify({ times, long, rows: rows.length, end: text.scrollTop, last });
        }"""
    )
    numbers = json.loads(found)
    times = sorted(numbers["times"])
    assert times[len(times) // 2] < 50, numbers
    assert max(numbers["long"], default=0) < 200, numbers
    assert numbers["rows"] < 60 and int(numbers["last"]) == len(trace) - 1 and numbers["end"] > 1000
    tab.keyboard.press("End")
    settled(tab)
    box, own = (tab.locator(name).bounding_box() for name in (".text", ".text .on >> nth=0"))
    assert box["y"] <= own["y"] <= box["y"] + box["height"], "what is chosen is in view"
