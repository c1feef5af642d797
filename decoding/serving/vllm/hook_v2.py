"""The place where vLLM's V2 model runner builds its speculator."""

from __future__ import annotations

import sys
from typing import Any

RUNNER = "vllm.v1.worker.gpu.model_runner"


def hook_v2() -> None:
    """From now on an engine that asks for the switch, with an EAGLE-3 head, gets the switch's speculator. Safe to
    repeat. Whatever the runner needs besides is looked at when such an engine is built; where that does not fit, one
    line is logged and it gets vLLM's own."""
    from vllm.v1.worker.gpu import spec_decode

    build = spec_decode.init_speculator
    if hasattr(build, "switchsd"):
        return

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        from decoding.serving.config import SwitchConfig

        if SwitchConfig.of(vllm_config.additional_config) is not None:
            from vllm.logger import init_logger

            from decoding.serving.vllm import symbols

            reason = symbols.obstacle("v2")
            if not reason:
                from decoding.serving.vllm.v2 import SwitchSpeculator

                return SwitchSpeculator(vllm_config, device, req_states)
            init_logger("vllm.switchsd").warning("switchsd is off, vLLM is as it was: %s", reason)
        return build(vllm_config, device, req_states)

    init_speculator.switchsd = True  # type: ignore[attr-defined]
    spec_decode.init_speculator = init_speculator
    if RUNNER in sys.modules:  # it has taken the name already
        sys.modules[RUNNER].init_speculator = init_speculator  # type: ignore[attr-defined]
