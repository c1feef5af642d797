"""What the parts of the corpus maker exchange."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
HEAVY, MEDIUM, LIGHT = "heavy", "medium", "light"


@dataclass(frozen=True)
class Made:
    """A prompt without its id and split."""

    family: str
    repetition: str
    group: str
    turns: tuple[str, ...]
    """User and assistant by turns; the last is the user's."""
    decoy: bool = False


def sections(file: str) -> list[tuple[str, str]]:
    """(heading, body) of each `## ` section of a material file."""
    parts = ("\n" + (FOLDER / file).read_text(encoding="utf-8")).split("\n## ")[1:]
    pairs = (part.partition("\n") for part in parts)
    return [(heading.strip(), body.strip("\n")) for heading, _, body in pairs]
