"""SwitchSD: speculative decoding that listens to the model.

    import switchsd
    decoder = switchsd.load("smollm2")
    print(decoder.generate("Repeat after me: ...", mode="switchsd").text)

    switch = switchsd.custom_generate(model, tokenizer)             # of transformers
    model.generate(**inputs, custom_generate=switch)

Importing this module is cheap; these functions import what they need.
"""

from __future__ import annotations

from switchsd.loading import custom_generate, load

__all__ = ["custom_generate", "load"]
__version__ = "0.1.0"
