"""Cost tables that tests measure stay out of the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoding import costs

MEASURED = costs.costs_file


@pytest.fixture(scope="session")
def cost_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("costs")


@pytest.fixture(autouse=True)
def own_cost_tables(cost_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "costs_file", lambda target: cost_tables / MEASURED(target).name)
