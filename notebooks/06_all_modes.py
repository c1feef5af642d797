# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # All modes on the same prompts
#
# **How fast is each mode, and is the text still the target's own?**
#
# You will see every mode beside `ar` (the target alone) on the same prompts in one run, which of them write the same
# text, what "the same" means in bfloat16, and how to look at modes that promise a law and not a text. Needs nothing but
# the embedded model and what is shipped with it; takes about a minute.

# %%
# %matplotlib inline
import tempfile
from pathlib import Path

import numpy as np
from IPython.display import Markdown

import switchsd
from activations.sampling import Sampling
from decoding import plots
from decoding.bench import Bench, BenchConfig
from decoding.fidelity import log_probabilities, mean_interval
from decoding.modes import MODES
from decoding.suite import load_suite
from decoding.summary import OVERALL
from decoding.tables import as_markdown, steps_table

PROMPTS, TOKENS, TEMPERATURE = 6, 32, 0.7

decoder = switchsd.load("smollm2")
modes = [[m.name, m.summary, "yes" if m.lossless else "no"] for m in MODES.values()]
Markdown(as_markdown(["mode", "what it does", "lossless"], modes))

# %% [markdown]
# ## One run
#
# Held-out embedded prompts, one at a time. The columns take turns on each prompt, and the order
# rotates, so that none has the better moment. `smcsd` samples only, so it stands beside `ar` at its own temperature.
# `switchsd` decides by expected tokens per millisecond here, `switchsd/gate=probe` by SwitchSD's own rule.

# %%
greedy = ("ar", "copy", "eagle", "ltd", "sd", "minedraft", "cospec", "switchsd", "switchsd/gate=probe")
warm = f"temperature={TEMPERATURE}"
columns = (*greedy, f"ar/{warm}", f"smcsd/{warm}")
suite = load_suite((), PROMPTS)
with tempfile.TemporaryDirectory() as folder:
    bench = Bench(decoder, suite, BenchConfig(columns, baselines=(), max_new_tokens=TOKENS), Path(folder))
    for _ in bench.run():
        pass
    result = bench.result()
rows = {(row.key, row.mode): row for row in bench.rows}
overall = [r for r in result["summary"] if r["group"] == OVERALL]

# %% [markdown]
# **Speed.** Tokens/s after the first token over those of `ar` on the same prompts, with 95 % intervals from a bootstrap
# over prompts. An interval that holds 1 shows no gain. `smcsd` is over `ar` at the same temperature.

# %%
plots.speed_ratios([r for r in overall if not r["mode"].startswith("ar")], "ar")

# %% [markdown]
# Where the speed comes from. *Tokens per step* is accepted length + 1. It is not the speed: a step costs what was
# drafted and verified. A particle of `smcsd` keeps every drafted token, so its steps are long by construction.

# %%
Markdown(as_markdown(*steps_table(overall)))

# %% [markdown]
# ## The same text?
#
# A lossless mode writes the text of `ar`. In float32 that holds to the letter, and is tested. In bfloat16 the order of
# a sum depends on how many tokens are verified at once; where two tokens are all but equally likely they may change
# places, and from there on the text is another one. So for every text that differs, the benchmark feeds the target
# with what both share and looks how near the two tokens were: a *near-tie* is a gap of at most 4 units in the last
# place.

# %%
same = result["equality"]["modes"]
told = []
for name, found in same.items():
    lossless = MODES[name.split("/")[0]].lossless
    ties = f"{found['near_ties']} of {found['different']}" if lossless and found["different"] else "–"
    equal = f"{found['prompts'] - found['different']} of {found['prompts']}"
    told.append([name, "yes" if lossless else "no", found["reference"], equal, ties])
Markdown(as_markdown(["mode", "lossless", "beside", "equal texts", "differences that are near-ties"], told))

# %% [markdown]
# ## Speed against fidelity
#
# How often a text is equal says little once one token differs. A finer measure is what the target itself makes of the
# text: its log-probability of each token, in nats, beside that of `ar` on the same prompt.
#
# **How to read the picture.** To the right is faster. On the level line a mode's texts are as likely to the target as
# its own. Lossless modes lie on it, up to near-ties; the bars are 95 % intervals over prompts. A mode below it gave up
# some of the target's text for its speed, or for something else: see `cospec`.

# %%
prompts = {p.key: decoder.target.encode_messages(p.messages) for p in suite}


nats = {
    (k, m): log_probabilities(decoder.target, prompts[k], rows[k, m].tokens).mean() for k in prompts for m in greedy
}
speed = {r["mode"]: r["over_ar"]["estimate"] for r in overall if "over_ar" in r}
true = {m: mean_interval([nats[k, m] - nats[k, "ar"] for k in prompts]) for m in greedy if m != "ar"}
plots.fidelity({m: (speed[m], true[m]) for m in true}, "Greedy modes", "log-probability over ar (nats a token)")

# %% [markdown]
# `cospec` is below the line by design: where draft model and target disagree, a learned policy may keep the draft's
# token. That pays on what the pair was trained for, and costs elsewhere. One question of each kind:

# %%
for question in ("What is 37 + 45? Say only the number.", "Why do leaves fall in autumn? Answer in one sentence."):
    print(question)
    for mode in ("ar", "cospec"):
        text = decoder.generate(question, mode=mode, max_new_tokens=40).text
        print(f"  {mode:7} {text.strip()}")

# %% [markdown]
# ## A law, not a text
#
# `smcsd` writes several texts side by side (*particles*), keeps every drafted token, and weighs and resamples the texts
# so that they follow the target's law the better, the more there are. No text is right or wrong then; what can be
# compared is how likely its texts are to the target at that temperature, over prompts and seeds, beside texts that were
# sampled from the target itself. `sd` is the control: at the same seed it writes the text of `ar`, up to near-ties.
#
# **How to read the picture.** Mean log-probability of a token over that of the target's own samples, paired over
# prompts and seeds. The first line is the yardstick: other samples of the target itself. A column whose interval lies
# below 0 writes texts that the target would rather not.

# %%
few = sorted(prompts.values(), key=len)[:4]  # short ones, for time
law = Sampling(temperature=TEMPERATURE)


def sampled(mode, seeds, **options):
    """Nats per token of each prompt's text at each seed."""
    found = []
    for seed in seeds:
        made = decoder.generate(few, mode=mode, temperature=TEMPERATURE, seed=seed, max_new_tokens=24, **options)
        texts = zip(few, (one.tokens for one in made), strict=True)
        found += [log_probabilities(decoder.target, ids, tokens, law).mean() for ids, tokens in texts]
    return np.array(found)


seeds, others = (1, 2), (3, 4)
own = sampled("ar", seeds)
differences = {
    "ar, other seeds": sampled("ar", others) - own,
    "sd": sampled("sd", seeds) - own,
    "smcsd, 1 particle": sampled("smcsd", seeds, particles=1) - own,
    "smcsd, 4 particles": sampled("smcsd", seeds, particles=4) - own,
    "smcsd, 8 particles, 2 tokens": sampled("smcsd", seeds, particles=8, draft_tokens=2) - own,
}
laws = {name: mean_interval(values) for name, values in differences.items()}
plots.gap(laws, "ar", "Samples", "log-probability of a token over ar's own samples (nats)", zero=0.0)

# %% [markdown]
# ## What we saw

# %%
ratios = {r["mode"]: r["over_ar"] for r in overall if "over_ar" in r}
faster = [m for m, r in ratios.items() if r["lower"] is not None and r["lower"] > 1]
unclear = [m for m in ratios if m not in faster and not m.startswith("ar")]
wrong = [m for m in same if MODES[m.split("/")[0]].lossless and same[m]["near_ties"] != same[m]["different"]]
below = [m for m, value in true.items() if value.upper < 0]
print("- Faster than ar on these prompts:", ", ".join(faster) or "none", "(the whole interval is above 1).")
print("- Not shown to be faster:", ", ".join(unclear) or "none")
print("- Lossless modes whose text differs other than at near-ties:", ", ".join(wrong) or "none")
print("- Greedy modes whose texts are less likely to the target than its own:", ", ".join(below) or "none")
for name, value in laws.items():
    print(f"- {name}: {value:+.2f} nats a token beside samples of ar")

# %% [markdown]
# **What this means.** On prompts that repeat themselves, what copies is fast, and a gate has to be better than copying
# everywhere. A head or a draft model at every step gains less on a model that is this small: its own forward is cheap,
# so there is little time to save. `minedraft` drafts in a process of its own and needs many requests and a device or
# core to spare; one request at a time, as here, shows its overhead. `smcsd` is as good as its draft model: a particle
# that is never rejected has to come from drafts that the target could have written, and the shipped one is a small
# model that knows short answers and little else. More particles and shorter drafts bring its texts nearer to the
# target's, and cost some of its speed.
#
# **Limits.**
#
# - Six prompts: the intervals say how little that is, and an interval that just misses 1 is no verdict.
# - One small model on one CPU, where the times of a step are not those of a GPU.
# - Log-probability under the target is no judgement of quality: the likeliest text is not the best one, and `cospec` is
#   right where the target is not on the questions that it knows.
# - A mean log-probability that agrees does not prove that two laws do; exact tests on a small vocabulary stand in
#   `tests/decoding`.
#
# **What to try next.**
#
# - `switchsd bench --suite your.jsonl` runs the same on prompts of your own, with Hugging Face `generate` beside it.
# - `PROMPTS = 40` in the first cell, for intervals that decide something.
# - `decoder.generate(prompts, mode="minedraft", neural="draft", batch=16)`, and `switchsd simulate` for other machines.
# - `particles=8, lookahead=0.3` in `sampled("smcsd", ...)`.
