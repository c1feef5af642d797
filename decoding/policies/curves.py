"""The picture of a training in its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decoding.plots import training


def draw_curves(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the records of a training (`train_ppo`) into a PNG, whole or not at all."""
    scratch = file.with_name(f"{file.name}.tmp")
    training(records).savefig(scratch, dpi=120, format="png")
    os.replace(scratch, file)
