# %% [markdown]
# # Where does the model mean to copy?
#
# Decodes one prompt with the probe-gated switch and shows, step by step, the copy intent that the probe read at the
# anchor, what was drafted, and how much of it the target kept. Open this file as a notebook (it is in percent
# format), or run it as a script; the figure is then written to `copy_intent.png`.

# %%
import matplotlib.pyplot as plt

import switchsd

PROMPT = (
    "Correct the spelling in this note and change nothing else.\n\n"
    "The meeting with the suppliers is on Tuesday at nine. Please bring the list of open orders, the list of late "
    "orders and the prices for next year. The prices for next year are in the shared foldr, the list of late orders "
    "is on my desk."
)

decoder = switchsd.load("smollm2")
answer = decoder.generate(PROMPT, mode="switchsd", max_new_tokens=96)
print(answer.text)
print(f"{answer.tokens_per_step:.2f} tokens per step, {answer.copy_share:.0%} of the steps copied")

# %% [markdown]
# Every step of the trace: copy intent (line), threshold (dashes), and the accepted length by drafter (bars).

# %%
steps = list(decoder.trace)
figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
top.plot([s.intent for s in steps], marker=".", color="black")
assert decoder.probe is not None
top.axhline(decoder.probe.config.threshold, linestyle="--", color="gray")
top.set_ylabel("copy intent")
for source, colour in (("copy", "tab:green"), ("eagle", "tab:blue")):
    kept = [len(s.accepted) if source in s.source else 0 for s in steps]
    bottom.bar(range(len(steps)), kept, color=colour, label=source)
bottom.set_ylabel("accepted length")
bottom.set_xlabel("step")
bottom.legend(frameon=False)
figure.savefig("copy_intent.png", dpi=150)
