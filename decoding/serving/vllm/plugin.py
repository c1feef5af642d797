"""The entry point that vLLM loads in each of its processes (group `vllm.general_plugins`).

It changes nothing by itself: where an engine is built with `additional_config={"switchsd": {"probe": ...}}` and
`method: eagle3`, its EAGLE-3 drafter becomes SwitchSD's, which drafts a copy where the probe says so. Any other
engine gets vLLM's own. Where vLLM is not as this plug-in knows it, one line is logged and nothing is changed.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.serving.vllm.symbols import Runner

logger = logging.getLogger("vllm.switchsd")  # below vLLM's own logger, so that its handlers print it
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"


def register() -> None:
    """Hook the configuration, and the EAGLE-3 drafters of both model runners. Safe to repeat."""
    for hook in (_hook_config, _hook_v1, _hook_v2):
        try:
            hook()
        except Exception as error:  # whatever another version does, vLLM must start
            _off(f"{type(error).__name__}: {error}")


def _off(reason: str) -> None:
    logger.warning("switchsd is off, vLLM is as it was: %s", reason)


def _wanted(vllm_config: Any, runner: Runner) -> bool:
    """Does this engine ask for the switch, and can it have it? vLLM's sources are looked at only then."""
    from decoding.serving.config import SwitchConfig

    if SwitchConfig.of(vllm_config.additional_config) is None:
        return False
    from decoding.serving.vllm import symbols

    reason = symbols.obstacle(runner)
    if reason:
        _off(reason)
    return not reason


def _hook_config() -> None:
    from vllm.config import VllmConfig

    check = VllmConfig.__post_init__
    if hasattr(check, "switchsd"):
        return

    def __post_init__(self: Any) -> None:
        check(self)
        _refuse(self)

    __post_init__.switchsd = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = __post_init__


def _refuse(vllm_config: Any) -> None:
    """Raise ValueError, before anything is built, for a switch that is asked for and would not be in the engine."""
    from decoding.serving.config import KEY, SwitchConfig

    speculative, additional = vllm_config.speculative_config, vllm_config.additional_config
    method = None if speculative is None else speculative.method
    if method == "custom_class":  # what its class is told is between the two
        return
    if SwitchConfig.of(additional) is not None and method != "eagle3":
        raise ValueError(
            f"additional_config.{KEY} asks for the switch, and the engine drafts by {method}: name an EAGLE-3 head, "
            'speculative_config={"method": "eagle3", "model": ..., "num_speculative_tokens": ...}'
        )


def _hook_v1() -> None:
    from vllm.v1.spec_decode.eagle import EagleProposer

    if "__new__" not in vars(EagleProposer):
        EagleProposer.__new__ = _new  # type: ignore[method-assign, assignment]


def _new(cls: type, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """`EagleProposer.__new__`: an instance of the switch's subclass for an engine that asks for it. Python calls its
    `__init__` then, since it is a subclass."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    if cls is EagleProposer and _wanted(vllm_config, "v1"):
        from decoding.serving.vllm.v1 import SwitchProposer

        cls = SwitchProposer
    return object.__new__(cls)


def _hook_v2() -> None:
    from vllm.v1.worker.gpu import spec_decode

    build = spec_decode.init_speculator
    if hasattr(build, "switchsd"):
        return

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not _wanted(vllm_config, "v2"):
            return build(vllm_config, device, req_states)
        from decoding.serving.vllm.v2 import SwitchSpeculator

        return SwitchSpeculator(vllm_config, device, req_states)

    init_speculator.switchsd = True  # type: ignore[attr-defined]
    spec_decode.init_speculator = init_speculator
    if V2_RUNNER in sys.modules:  # it has taken the name already
        sys.modules[V2_RUNNER].init_speculator = init_speculator  # type: ignore[attr-defined]
