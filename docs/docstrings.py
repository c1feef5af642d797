"""Docstrings are plain text: what Markdown would take for links, tags or one long line stays as it was written."""

from __future__ import annotations

import re
from typing import Any

import griffe

COLUMNS = re.compile(r"\S {3,}\S")
"""A gap that lines words up."""
CODE = re.compile(r"(`[^`]*`)")


class Plain(griffe.Extension):
    """Prepares every docstring for Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """A docstring as Markdown that shows it."""
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if all(line.startswith("    ") for line in lines if line):
        return text  # code already
    if any(COLUMNS.search(line) for line in lines):
        return "\n".join(f"    {line}" for line in lines)
    return "\n".join(map(_escaped, lines))


def _escaped(line: str) -> str:
    parts = CODE.split(line)
    parts[::2] = [p.replace("][", "]\\[").replace("<", "&lt;") for p in parts[::2]]
    return "".join(parts)
