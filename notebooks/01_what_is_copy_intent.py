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
# # What is copy intent?
#
# **When the end of a text occurred before, will the target go on as it did then, and does its own state say so before
# anything is drafted?**
#
# What followed the earlier place is a free draft: a *candidate*. Where the target then follows it, the match is
# *genuine*; where the words only happen to be the same, it is *accidental*.
#
# You will see one answer token by token: the suffix matches, what the target did with them, and what probes at several
# depths read. Then the same for many answers at once, with intervals, beside what needs no probe at all. About a
# minute on two cores.
#
# What is read when, at one step:
#
# ```
# tokens    x_1 ... x_t    x_t+1                x_t+2
#           the anchor     the pending token    what the candidate guesses
# state     h_t            none yet
# ```
#
# A probe reads h_t and nothing later. The state of x_t+1 would nearly be the answer itself: notebook 02 shows by how
# much.

# %%
# %matplotlib inline
# %config InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "dpi": 80}
import tempfile
from pathlib import Path

import numpy as np
from IPython.display import Markdown

import switchsd
from activations.capture import CaptureConfig, capture
from activations.corpus import load_corpus, spread
from activations.labels import LabelConfig, follow_rows, outcomes
from activations.plots import matches, named
from probes import plots
from probes.evaluation import auc_difference, evaluate
from probes.intent import copy_intent
from probes.train import TrainConfig, train

decoder = switchsd.load("smollm2")
target, shipped = decoder.target, decoder.probe

# %% [markdown]
# ## One prompt, and what the target answers
#
# This small target does the task badly, which is what makes the answer worth a look: it first talks about the note,
# and then copies it.

# %%
PROMPT = (
    "Correct the spelling in this note and change nothing else.\n\n"
    "The ferry to Arlen leaves at nine from the north quay. The ferry to Moss leaves at ten from the suoth quay. "
    "Pleese be there an hour before the ferry leaves."
)
answer = decoder.generate(PROMPT, mode="ar", max_new_tokens=64)
print(answer.text)

# %% [markdown]
# ## Where it could have copied
#
# Each column is an anchor; its label is the pending token and, behind it, the token that the target wrote next. The
# bar says how many tokens before that place, the pending one included, occurred earlier. Green: the first candidate
# began with the right token. Hatched: no candidate did. Grey: another candidate than the first did.

# %%
prompt = target.encode(PROMPT)
ids = [*prompt, *answer.tokens]
asked = LabelConfig(kappa=1)  # a single token is a match
rows = follow_rows(ids, len(prompt), asked, answer.stopped)
rows = {name: column[:-1] for name, column in rows.items()}  # nothing was written behind the last anchor
kinds = outcomes(ids, rows)
pieces = named([target.decode([i], skip_special_tokens=False) for i in ids])
labels = [f"{pieces[t + 1]} {pieces[t + 2]}" for t in rows["position"]]
matches(labels, rows["match_length"], kinds, "Suffix matches of the answer")

# %% [markdown]
# ## Probes at several depths
#
# Small linear probes behind every fourth block, fitted here on the answers to some embedded prompts. They are asked
# whether the target will follow a candidate for at least one token. The shipped probe was fitted on far more answers.
# None of them has seen the prompt above.

# %%
SITES = tuple(f"resid_post.{block}" for block in range(1, target.blocks, 4))
prompts = [*spread(load_corpus("train"), 96), *spread(load_corpus("validation"), 32)]
config = CaptureConfig(sites=(*SITES, shipped.config.site), max_new_tokens=40, batch=64, labels=asked)
folder = tempfile.TemporaryDirectory()
store = capture(target, prompts, Path(folder.name), config)
fitted = train(store, TrainConfig(label="follow", match=1, sites=SITES, keep=SITES, l2=(1e-2,), resamples=200))
probes = [*(fitted.probes[site] for site in SITES), shipped]

# %% [markdown]
# The same anchors again, with the copy intent of every probe below them. A row is a probe, from the first blocks to
# the last; the shipped one is at the bottom. Look for columns where the bar is hatched and the map is dark: the
# probe was right not to trust the match. Bright under a hatched bar is a false alarm.

# %%
intents = copy_intent(target, probes, ids)[:, rows["position"]]
names = [*SITES, f"shipped, {shipped.config.site}"]
plots.intent_map(intents, names, labels, rows["match_length"], kinds, "Copy intent at every anchor of the answer")

# %% [markdown]
# ## Genuine beside accidental
#
# Two anchors with a match of the same length look the same from outside. What do the probes say? These are all
# anchors of the answer with a match of two or three tokens.

# %%
columns = ("ends in", "candidate", "the target wrote", "match length", "outcome", "copy intent")
lines = [" | ".join(columns), "|".join(["---"] * len(columns))]
for i, t in enumerate(rows["position"]):
    if rows["match_length"][i] in (2, 3) and kinds[i] in ("genuine", "accidental"):
        context, guess = " ".join(pieces[t + 2 - rows["match_length"][i] : t + 2]), pieces[t + 2 - rows["distance"][i]]
        lines.append(
            f"`{context}` | `{guess}` | `{pieces[t + 2]}` | {rows['match_length'][i]} | {kinds[i]} "
            f"| {intents[-1, i]:.2f}"
        )
Markdown("\n".join(lines))

# %%
kind = np.array(kinds)
genuine, accidental = kind == "genuine", kind == "accidental"
longest = max(np.flatnonzero(accidental), key=lambda i: rows["match_length"][i])
Markdown(
    f"In this answer the shipped probe gives the {genuine.sum()} genuine matches a copy intent of "
    f"{intents[-1, genuine].mean():.2f} on average and the {accidental.sum()} accidental ones "
    f"{intents[-1, accidental].mean():.2f}. The longest accidental match has {rows['match_length'][longest]} tokens; "
    f"its copy intent is {intents[-1, longest]:.2f}, with a threshold of {shipped.config.threshold:.2f}: "
    + ("a false alarm." if intents[-1, longest] >= shipped.config.threshold else "the gate would not have copied.")
)

# %% [markdown]
# ## Many answers
#
# One answer proves nothing. These are the answers to the validation prompts, which fitted no probe: at each depth the
# median copy intent (line) and the middle half (band) of genuine and of accidental matches. Two bands apart: the
# probe tells them apart. Lines on top of each other: it does not.

# %%
stored = store.rows()
held_out = (stored["split"] == "validation") & (stored["match_length"] > 0) & ~stored["censored"]
followed = stored["follow"][held_out] == 1
scores = np.stack([p.score(store.states(p.config.site)).numpy()[held_out] for p in probes])
blocks = [int(site.split(".")[1]) for site in SITES]
plots.by_block(scores[:-1], followed, blocks, "Copy intent by depth, validation prompts")

# %% [markdown]
# And as numbers: the chance that a genuine match scores above an accidental one (AUC), with an interval from drawing
# whole documents again; none of them was chosen by these numbers. Two scores that need no probe stand beside: the
# match length, and a logistic regression on all that the text alone tells of the match (its length, distance, number
# of occurrences, ...).

# %%
beside = fitted.report.findings.evaluations
documents = stored["document"][held_out]
areas = {name: evaluate(followed, s, documents).roc_auc for name, s in zip(names, scores, strict=True)}
areas |= {name: beside[name]["match"].roc_auc for name in ("match length", "surface, logistic")}
plots.areas(areas, f"{held_out.sum()} matches of {len(np.unique(documents))} validation answers")

# %% [markdown]
# ## What we saw

# %%
small, text_alone = max((areas[site] for site in SITES), key=lambda one: one.estimate), areas["match length"]
lengths = stored["match_length"][held_out]
with_probe, without = (evaluate(followed, s, documents) for s in (scores[-1], lengths))
gain = auc_difference(with_probe, without)
Markdown(
    f"{followed.mean():.0%} of the matches are genuine, so that copying wherever there is "
    f"a match is wrong in {1 - followed.mean():.0%} of the cases. The best of the small probes reaches an AUC of "
    f"{small:.3f} (the best of {len(SITES)}, and so a little too good), the shipped one {areas[names[-1]]:.3f}: the "
    "state before the draft knows something of what comes. But the length of the match alone, which costs nothing, "
    f"reaches {text_alone:.3f}. On the same rows the shipped probe is ahead of it by {gain:.3f}: "
    + (
        "more than chance."
        if gain.lower > 0
        else "copy intent can be read, but on this target and these prompts it is not shown to beat the match length."
    )
)

# %% [markdown]
# **Limits.**
# - One small target (135M parameters) that repeats itself a lot; a larger one may know more of what it is doing.
# - Short answers (40 tokens), few documents: the intervals are wide, and they are what counts.
# - The shipped probe's weights were fitted on other prompts, but its kind of label, shortest match and threshold were
#   chosen with the help of the validation prompts.
# - A probe that can be read is not yet a state that is used: notebook 03 changes the state and looks.
#
# **What to try next.**
# - A prompt of your own in `PROMPT`; a table to reformat, or a function to rename something in, copies a lot.
# - `kappa=3` in `asked`: fewer matches, and nearly all of them genuine. What is then left for a probe to do?
# - `label="span_2"` in `TrainConfig`: is the first drafted token part of a copied span?
# - Notebook 02 trains a probe properly, notebook 04 lets it switch.

# %%
folder.cleanup()
