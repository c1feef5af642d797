"""The page: markup, style, script and data in one file, which asks nothing of a network.

Data goes in as JSON that holds no `<`, `>` or `&`, and the script only ever writes it as text. The page's own policy
lets nothing but that script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib import resources
from typing import Any

from activations.figures import COLOURS, SOURCE_COLOURS
from decoding.trace import Trace
from decoding.viewer.data import opening, trace_data

SCRIPTS = ("base.js", "text.js", "arrows.js", "chart.js", "steps.js", "details.js", "compare.js", "main.js")
OTHER = COLOURS[4]
"""Of a drafter that has no colour of its own."""
LIGHT, DARK = "#ffffff", "#14181d"
"""Backgrounds, as view.css has them."""
HEAVY = 3_000_000
"""Most letters of a page inside a notebook."""
INLINE_HEIGHT = 900
"""Pixels."""
STANDS_OUT = 3.0
"""Contrast of a mark with the background; what is read has 4.5 or more."""


def page(trace: Trace, name: str = "trace", text: int | None = None) -> str:
    """A trace as HTML. `text`: index of the text that is shown first; by default the last turn of a chat, or the first
    of several requests. Raises ValueError for a step whose text the trace does not hold."""
    shown = opening(trace) if text is None else text
    return _page(f"{name}: trace", {"traces": [trace_data(name, trace)], "text": shown})


def compared(first: Trace, second: Trace, names: tuple[str, str] = ("A", "B"), text: int | None = None) -> str:
    """Two traces side by side, otherwise as `page`; what is shown first is the first one's choice. Raises ValueError
    for a step whose text its trace does not hold."""
    traces = [trace_data(name, trace) for name, trace in zip(names, (first, second), strict=True)]
    shown = opening(first) if text is None else text
    return _page(f"{names[0]} and {names[1]}: traces", {"traces": traces, "text": shown})


def inline(trace: Trace) -> str:
    """A trace inside another page, which it cannot touch: for notebooks. A line above it says what it is, since some
    notebooks show no frame until they are trusted. A page that would make the notebook heavy is not put in. Raises
    ValueError for a step whose text the trace does not hold."""
    if not len(trace) and not trace.numbers:
        return "<p>An empty trace: nothing was generated yet.</p>"
    data, text = trace_data("trace", trace), opening(trace)
    made = _page("trace: trace", {"traces": [data], "text": text})
    if len(made) > HEAVY:
        return (
            f"<p>A trace of {len(trace)} steps, too long to be shown inside a notebook: "
            "<code>trace.save(&quot;steps.parquet&quot;)</code>, then <code>switchsd view steps.parquet</code>.</p>"
        )
    shown = html.escape(made, quote=True)
    return (
        f"<p>{_told(data, text)}<br>"
        "<small>Where no page is seen here: run the cell, or trust the notebook.</small></p>"
        f'<iframe srcdoc="{shown}" sandbox="allow-scripts" title="The trace, step by step" '
        f'style="width: 100%; height: {INLINE_HEIGHT}px; border: 1px solid #80808080; border-radius: 6px"></iframe>'
    )


def _told(data: dict[str, Any], text: int) -> str:
    """One text of a trace in a line of HTML."""
    shown, about = data["texts"][text], data["about"]
    count, numbers = len(data["texts"]), shown["summary"]
    names = [about["target"] if about else None, shown["mode"] or (about["mode"] if about else None)]
    parts = [
        "A trace, step by step" + (f" (text {text + 1} of {count})" if count > 1 else ""),
        ", ".join(html.escape(_encodable(name)) for name in names if name),
        f"{numbers['written']} tokens in {numbers['steps']} steps",
        f"{numbers['tokens_per_step']:.2f} tokens per step" if numbers["steps"] else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def _encodable(text: str) -> str:
    """Names of files may be no text."""
    return text.encode("utf-8", "replace").decode()


def _page(title: str, data: dict[str, Any]) -> str:
    names = dict.fromkeys(name for trace in data["traces"] for name in trace["sources"])
    script = "\n".join(_slim(_asset(name)) for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}\n}})();'
    parts = {
        "title": html.escape(_encodable(title)),
        "style": _slim(_asset("view.css")) + colours(list(names)),
        "script": script,
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "data": as_script(data | {"looks": list(names)}),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("view.html"))


def as_script(data: Any) -> str:
    """JSON in ASCII that an HTML parser takes for text, whatever the strings in it."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def colours(sources: list[str]) -> str:
    """A mark's colour for each drafter, light and dark: the project's own, moved away from the background until it
    stands out."""
    chosen = [SOURCE_COLOURS.get(source, OTHER) for source in sources]
    light = "".join(f"--s{i}:{distinct(c, LIGHT)};" for i, c in enumerate(chosen))
    dark = "".join(f"--s{i}:{distinct(c, DARK)};" for i, c in enumerate(chosen))
    uses = "".join(f".s{i}{{--own:var(--s{i})}}" for i in range(len(sources)))
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{{dark}}}}}\n{uses}\n"
    )


def distinct(colour: str, back: str) -> str:
    """The colour, mixed with black or white as little as makes it stand out from `back`."""
    aim = 255 if luminance(back) < 0.5 else 0
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    for share in range(0, 101, 4):
        mixed = [round(c + (aim - c) * share / 100) for c in (red, green, blue)]
        found = "#" + "".join(f"{c:02x}" for c in mixed)
        if contrast(found, back) >= STANDS_OUT:
            return found
    raise AssertionError("black and white stand out from one another")


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours `#rrggbb`, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb` (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _slim(text: str) -> str:
    """Without indents and lines that are comments. No string in the assets goes over a line's end."""
    return "\n".join(line for line in map(str.strip, text.splitlines()) if line and not line.startswith("//"))


@cache
def _asset(name: str) -> str:
    return resources.files("decoding.viewer").joinpath("assets", name).read_text(encoding="utf-8")
