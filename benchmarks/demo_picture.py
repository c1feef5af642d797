"""The picture in the README: what `switchsd demo` printed, as an SVG.

    python -m benchmarks.demo_picture docs/images/demo.svg

Runs the demo (a few minutes) and keeps its own lines, notes included. Times in it are those of the machine at hand, so
that it should be a quiet one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.terminal_theme import TerminalTheme

from switchsd import show
from switchsd.commands import demo

COLUMNS = 104
DARK = TerminalTheme(
    (24, 26, 31),
    (222, 224, 228),
    [(70, 74, 82), (232, 120, 110), (86, 196, 138), (226, 180, 90), (110, 165, 245), (212, 140, 226), (90, 195, 205),
     (222, 224, 228)],
)  # fmt: skip
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" class="rich-terminal" viewBox="0 0 {width} {height}" role="img">
<title>Output of switchsd demo</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#181a1f"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""Rich's own frame fetches a font; this one takes what the reader has."""


def main(file: Path) -> None:
    """Run the demo and write its output to `file`."""
    show.out.width, show.out.record = COLUMNS, True
    demo.notes = show.out  # type: ignore[attr-defined]
    demo.demo()
    file.write_text(show.out.export_svg(theme=DARK, code_format=FRAME, unique_id="demo"), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
