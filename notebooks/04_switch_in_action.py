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
# # The switch in action
#
# **At which steps does SwitchSD copy, what does a wrong copy cost, and how much better could a gate be?**
#
# You will see one answer step by step, where its milliseconds went, how the threshold τ, the shortest suffix match κ
# and the depth D of a copy change the speed, and how far all of this is from an oracle that knows the text.
#
# A *step* is one forward of the target: it verifies what was drafted and adds one token of its own. Needs nothing but
# the embedded model; takes about a minute.

# %%
# %matplotlib inline
import tempfile
from functools import partial
from pathlib import Path

from IPython.display import Markdown

import switchsd
from activations.corpus import load_corpus, spread
from activations.matching.match import MatchConfig
from decoding import plots
from decoding.bench import Bench, BenchConfig
from decoding.budgets import FixedBudget, PricedBudget
from decoding.gates import COPY, Always, Choice, MatchLengthGate, Never, ProbeGate
from decoding.outcomes import false_copies, outcomes
from decoding.replay import options, oracle, replay, speedup
from decoding.replay_log import log_answers
from decoding.suite import load_suite
from decoding.summary import OVERALL
from decoding.tables import as_markdown, step_table

PROMPT = """Here is a function:

```python
def total_price(items, tax):
    total = 0
    for item in items:
        total += item.price * item.count
    return total * (1 + tax)
```

Rename "items" to "lines" everywhere and show the whole function again."""

decoder = switchsd.load("smollm2")
probe = decoder.probe.config
print(f"The probe reads {probe.site} and says how likely the target follows a copy ({probe.label}).")
print(f"The switch copies from τ = {probe.threshold} on, where the last κ = {probe.kappa} tokens occurred before.")

# %% [markdown]
# ## One answer
#
# `gate="probe"` is SwitchSD's own rule. (Where there is a length head, as for this target, `generate` weighs expected
# tokens against milliseconds instead: `gate="cost"`.) The prompt asks for a copy with a change: it repeats words that
# the answer will repeat, and words after which the answer has to go on differently.

# %%
rule = {"gate": "probe", "max_new_tokens": 120}
plain = decoder.generate(PROMPT, mode="ar", max_new_tokens=120)
answer = decoder.generate(PROMPT, mode="switchsd", **rule)
trace = decoder.trace
print(answer.text)
print(f"\n{answer.tokens_per_step:.2f} tokens per step; {answer.copy_share:.0%} of the steps copied.")
if answer.tokens == plain.tokens:
    print("The target alone writes the same text.")
else:
    print("The target alone writes another text: in bfloat16 two all but equally likely tokens may change places.")
    exact = switchsd.load("smollm2", dtype="float32")
    pair = exact.generate(PROMPT, mode="ar", max_new_tokens=120), exact.generate(PROMPT, mode="switchsd", **rule)
    print("In float32 both write", "the same text." if pair[0].tokens == pair[1].tokens else "different texts, too.")

# %% [markdown]
# The trace holds every step. Shown by itself it is the viewer of `switchsd view`: each token in the colour of who
# drafted it; hover or click for what was drafted and rejected, and for the place that was copied from.

# %%
trace

# %% [markdown]
# The same as a table, the first steps. *pending* is the token that the step started from; *match* is the length of the
# longest suffix match; *intent* is what the probe said, one position before the pending token. The head drafts a tree,
# of which the table shows the first branch: what was accepted may stand in another.

# %%
heads, rows = step_table(trace)
Markdown(as_markdown(heads, rows[:20]))

# %% [markdown]
# **How to read the picture.** Above: copy intent at each step, and the threshold τ. An empty circle means that there
# was nothing to copy, whatever the probe said. Below: how many tokens deep the draft was (pale) and how many were
# accepted. A cross marks a copy of which nothing was accepted: the match was accidental, and the probe did not say so.

# %%
plots.steps(trace)

# %% [markdown]
# ## What a false copy costs
#
# A copy costs nothing to draft, but the target has to verify it, and a forward of many tokens takes longer than that of
# one. A *false copy* (nothing accepted) gives one token, like a step without a draft, in more time. The cost table of
# this machine says what the step without a draft would have taken.

# %%
costs = decoder.costs("eagle")
wide = 1 + decoder.settings.copy_nodes
seen = [r.verify_ms for r in trace if len(r.tokens) == wide - 1]
print(f"Forward of 1 token: {costs.verify(1, 128):.1f} ms. Of {wide}: {costs.verify(wide, 128):.1f} ms by the table,")
print(f"{sum(seen) / len(seen):.1f} ms in this trace. A tree of the head: {costs.draft('eagle', 2):.1f} ms to draft.")
if not 0.67 < costs.verify(wide, 128) * len(seen) / sum(seen) < 1.5:
    print("The two do not fit: the machine was busy at one of the times. `switchsd profile` measures the table again.")

# %%
plots.time_spent(outcomes(trace))

# %%
false = false_copies(trace, costs)
share = false.milliseconds / sum(o.milliseconds for o in outcomes(trace))
print(f"{false.steps} of {false.copy_steps} copying steps were false. They took {share:.0%} of the time, and lost")
print(f"{false.lost_ms:.0f} ms beside drafting nothing there: time for {false.lost_tokens:.1f} tokens.")

# %% [markdown]
# One text is an anecdote. For settings we need many texts, and a way to change one setting and nothing else.
#
# ## τ, κ and D
#
# A *replay* does that: the target answers prompts once; at every position we log what the probe read and what both
# drafters would have drafted. A gate is then driven over the logged texts with the cost table for a clock. Nothing is
# random, and a setting takes milliseconds to try. The prompts are embedded ones that no probe was fitted on.

# %%
prompts = [decoder.target.encode_messages(p.messages) for p in spread(load_corpus("validation"), 24)]
eagle = decoder.neural["eagle"]
texts = log_answers(decoder.target, eagle, prompts, limit=64, ahead=8, depth=4, sites=probe.sites)
print(f"{len(texts)} texts, {sum(t.steps for t in texts)} positions")

head = Choice("eagle", PricedBudget.of(costs, "eagle", decoder.settings.neural_nodes, decoder.settings.neural_depth))
copy = Choice(COPY, FixedBudget(decoder.settings.copy_nodes, decoder.settings.depth))


def run(gate, kappa=probe.kappa):
    """Walk a gate over all texts."""
    return replay(texts, gate, costs, MatchConfig(kappa=kappa), probe=decoder.probe)


def switch(tau=probe.threshold, depth=None, kappa=probe.kappa):
    """SwitchSD's rule at other settings."""
    copied = copy if depth is None else Choice(COPY, FixedBudget(depth, depth))
    return run(partial(ProbeGate, copied, head, tau), kappa)


def match(kappa=probe.kappa, depth=None):
    """Copy at every suffix match of κ tokens, whatever the probe says."""
    copied = copy if depth is None else Choice(COPY, FixedBudget(depth, depth))
    return run(partial(MatchLengthGate, copied, head, kappa), kappa)


alone, neural = run(Never), run(partial(Always, head))
levels = {"target alone": alone.rate, "head at every step": neural.rate}

# %% [markdown]
# **τ.** At τ = 0 the switch copies at every suffix match; at τ = 1 it never copies. A good probe has its best τ in
# between, above both ends. The dashed line is the threshold in use, which was chosen on other texts.

# %%
taus = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
by_tau = [(tau, switch(tau).rate) for tau in taus]
plots.rates({"switch": by_tau}, "The threshold", "τ (copy intent)", levels=levels, mark=probe.threshold)

# %% [markdown]
# **κ.** The shortest suffix match that is copied from. A longer match is more often genuine, but a matcher that waits
# for it starts each copy later. With a small κ the probe has something to do; with a large one, a match alone says
# nearly all that a probe could.

# %%
kappas = [1, 2, 3, 4, 5, 8]
by_kappa = {
    "switch": [(k, switch(kappa=k).rate) for k in kappas],
    "every match": [(k, match(k).rate) for k in kappas],
}
plots.rates(by_kappa, "The shortest match", "κ (tokens)", levels=levels, mark=probe.kappa)

# %% [markdown]
# **D.** How many tokens are copied at once. A deep copy is a bet: it pays where the target goes on copying, and widens
# a forward that is then thrown away where it does not.

# %%
depths = [1, 2, 3, 4, 6, 8, 12, 16, 24, 31]
by_depth = {
    "switch": [(d, switch(depth=d).rate) for d in depths],
    "every match": [(d, match(depth=d).rate) for d in depths],
}
plots.rates(by_depth, "The depth of a copy", "D (tokens)", levels=levels, mark=decoder.settings.copy_nodes)

# %% [markdown]
# ## Is the replay right?
#
# The replay's clock is a table. So we also decode for real, at a few thresholds, with the columns in turn on each
# prompt so that none has the better moment. Brackets are 95 % bootstrap intervals over prompts; so few prompts make
# wide ones.

# %%
real = ("ar", *(f"switchsd/gate=probe/tau={tau}" for tau in (0.0, probe.threshold, 0.9)))
with tempfile.TemporaryDirectory() as folder:
    bench = Bench(decoder, load_suite((), 6), BenchConfig(real, baselines=(), max_new_tokens=64), Path(folder))
    for _ in bench.run():
        pass
    measured = [r for r in bench.result()["summary"] if r["group"] == OVERALL]
plots.speed_ratios(measured[1:], "ar")

# %% [markdown]
# ## How much better could a gate be?
#
# An oracle sees the text before it is written. The *step oracle* takes, at each step, the option (nothing, the head's
# tree, a copy) with the most tokens per millisecond; the *path oracle* takes the cheapest way through the whole text.
# Nobody can have them; they say how much there is to have.

# %%
found = [options(t, MatchConfig(kappa=probe.kappa), [copy.budget], [head.budget]) for t in texts]
walks = {
    "head at every step": neural,
    "copy at every match": match(),
    "every match, κ = 2": match(2),
    "switch": switch(),
    "switch, κ = 2": switch(kappa=2),
    "step oracle": oracle(texts, found, costs),
    "path oracle": oracle(texts, found, costs, path=True),
}
plots.gap({name: speedup(walk, alone) for name, walk in walks.items()}, "the target alone")

# %%
plots.step_shares({name: walk for name, walk in walks.items() if "oracle" not in name})

# %% [markdown]
# False copies over all texts. *In vain* is the time of steps that copied alone and had nothing accepted; each of them
# still gave the one token of the target's own.

# %%
lines = [
    [name, f"{w.copies / w.steps:.0%}", f"{w.empty / max(w.copies, 1):.0%}", f"{w.wasted / sum(w.milliseconds):.1%}"]
    for name, w in walks.items()
    if "oracle" not in name
]
Markdown(as_markdown(["gate", "steps that copy", "of these false", "time in vain"], lines))

# %% [markdown]
# ## What we saw

# %%
best_tau = max(by_tau, key=lambda point: point[1])
ends = max(by_tau[0][1], by_tau[-1][1])
against = speedup(switch(), match())
tuned = speedup(switch(kappa=2), match(2))
had = (walks["switch"].rate - neural.rate) / (walks["step oracle"].rate - neural.rate)


def verdict(ratio):
    """What an interval of a ratio allows to be said."""
    return "faster" if ratio.lower > 1 else "slower" if ratio.upper < 1 else "not distinguishable"


print(f"- The best τ here is {best_tau[0]}: {best_tau[1] / ends - 1:+.0%} over the better of never and always copying.")
print(f"- At κ = {probe.kappa} the switch is {against:.3f} times as fast as every match: {verdict(against)}.")
print(f"- At κ = 2, where a match has to be longer, it is {tuned:.3f} times as fast: {verdict(tuned)}.")
print(f"- Of what the step oracle gains over the head alone, the switch has {had:.0%}.")

# %% [markdown]
# **What this means.** Copying pays on these prompts with any sensible gate; most of what the switch gains over the head
# alone comes from copying at all. The probe's own part is what it gains over copying at every match, and there is
# something to gain where matches are short, because many of those are accidental. A rule that only waits for a longer
# match is a strong baseline: look at the third line above before saying that a probe is needed.
#
# **Limits.**
#
# - Two dozen prompts of one small model on one machine, many of which ask for text that repeats.
# - The replay's texts and those that chose the threshold are of the same kind.
# - Intervals are over texts, not over machines: with another ratio of a forward's time to the head's, the best settings
#   are others.
#
# **What to try next.**
#
# - `PROMPT`: one of your own. Prompts that ask for free text show a switch that mostly abstains.
# - `rule`, under "One answer": `gate="cost"` instead of `"probe"`. There the length head also chooses how much to copy.
# - `switchsd bench --sweep tau=0,0.4,0.8 --modes ar,switchsd/gate=probe` measures the same on your own prompts.
# - `python -m benchmarks.replay` compares all gates on larger logs.
