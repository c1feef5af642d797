"""Cost tables that tests measure stay out of the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from activations.target import Target
from decoding import costs

MEASURED = costs.costs_file


@pytest.fixture(scope="session")
def cost_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(autouse=True)
def own_cost_tables(cost_tables: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Target], Path]:
    """Gives the function that it replaces."""
    monkeypatch.setattr(costs, "costs_file", lambda target: cost_tables / MEASURED(target).name)
    return MEASURED
