"""SwitchSD: speculative decoding that listens to the model.

    import switchsd
    decoder = switchsd.load("smollm2")
    print(decoder.generate("Repeat after me: ...", mode="switchsd").text)

Importing this module is cheap; `load` imports what it needs.
"""

from __future__ import annotations

from switchsd.loading import load

__all__ = ["load"]
__version__ = "0.1.0"
