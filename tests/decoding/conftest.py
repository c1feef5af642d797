"""Cost tables that tests measure stay out of the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoding import costs, decoder


@pytest.fixture(autouse=True, scope="session")
def cost_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, file = tmp_path_factory.mktemp("costs"), costs.costs_file
    with pytest.MonkeyPatch.context() as patch:
        for module in (costs, decoder):
            patch.setattr(module, "costs_file", lambda *parts: folder / file(*parts).name)
        yield folder
