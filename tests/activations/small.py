"""The maker of the small model, which lies beside the packages in a checkout, and in no wheel."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

import activations.packaged

ROOT = Path(activations.packaged.__file__).parents[1]


def maker(name: str) -> ModuleType:
    """`benchmarks.<name>`; the test is skipped where there is no checkout."""
    if not (ROOT / "benchmarks" / f"{name}.py").is_file():
        pytest.skip("no checkout")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(f"benchmarks.{name}")
