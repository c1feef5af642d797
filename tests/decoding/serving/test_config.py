"""What an engine is told about the switch."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.serving.config import SwitchConfig


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}, object()])
def test_engines_that_do_not_ask(additional: Any) -> None:
    assert SwitchConfig.of(additional) is None


def test_there_and_back() -> None:
    config = SwitchConfig("folder", tau=0.3)
    assert config.to_additional() == {"switchsd": {"probe": "folder", "tau": 0.3}}
    assert SwitchConfig.of({**config.to_additional(), "other": 1}) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "needs 'probe' and takes tau, kappa"),
        ("folder", "needs 'probe'"),
        ({"probe": "x", "threshold": 1}, "needs 'probe' and takes tau, kappa"),
        ({"probe": ""}, "probe is ''"),
        ({"probe": 3}, "probe is 3"),
        ({"probe": "x", "tau": 2}, r"tau is 2; a threshold of a probability lies in \[0, 1\]"),
        ({"probe": "x", "tau": "low"}, "tau is 'low'"),
        ({"probe": "x", "tau": True}, "tau is True"),
        ({"probe": "x", "kappa": 0}, "kappa is 0; it must be a number from 1 to 32"),
        ({"probe": "x", "kappa": 33}, "kappa is 33; it must be a number from 1 to 32"),
        ({"probe": "x", "kappa": True}, "kappa is True"),
        ({"probe": "x", "kappa": 1.5}, "kappa is 1.5"),
    ],
)
def test_bad_values_are_named(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwitchConfig.of({"switchsd": values})
