"""The entry point that vLLM loads in each of its processes (group `vllm.general_plugins`).

It changes nothing by itself: where an engine is built with `additional_config={"switchsd": {"probe": ...}}` and
`method: eagle3`, its EAGLE-3 drafter becomes SwitchSD's, which drafts a copy where the probe says so. Any other
engine gets vLLM's own. Where vLLM is not as this plug-in knows it, one line is logged and nothing is changed.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("vllm.switchsd")  # below vLLM's own logger, so that its handlers print it


def register() -> None:
    """Hook the EAGLE-3 drafters of both model runners. Safe to repeat."""
    try:
        from vllm.v1.spec_decode.eagle import EagleProposer

        from decoding.serving.vllm import symbols

        reason = symbols.obstacle("v1")
    except Exception as error:  # whatever another version does, vLLM must start
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning("switchsd is off, vLLM is as it was: %s", reason)
        return
    if "__new__" not in vars(EagleProposer):
        EagleProposer.__new__ = _new  # type: ignore[method-assign, assignment]


def _new(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """`EagleProposer.__new__`: an instance of the switch's subclass for an engine that asks for it. Python calls its
    `__init__` then, since it is a subclass."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    from decoding.serving.config import SwitchConfig

    if cls is EagleProposer and SwitchConfig.of(vllm_config.additional_config) is not None:
        from decoding.serving.vllm.v1 import SwitchProposer

        cls = SwitchProposer
    return object.__new__(cls)
