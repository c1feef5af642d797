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
# # Training a probe, and not fooling oneself
#
# **How does one get from prompts to a probe that a decoder can use, and what must be checked before its number is
# believed?**
#
# You will see the whole way: the target answers prompts and its states are kept; a probe is fitted at every captured
# site; the best site is chosen; the probe is put beside baselines and controls; a leak is shown on purpose; a threshold
# is chosen; the artifact is saved, loaded and decodes. About a minute on two cores. The commands `switchsd capture` and
# `switchsd train probe` do the same on more text.
#
# Which rows decide what, so that the last number is an honest one:
#
# | part | what it decides |
# |---|---|
# | fit: 80 % of the train prompts | the weights |
# | selection: the other 20 % | site, penalty, calibration, threshold |
# | test: the validation prompts | nothing: it is measured once |

# %%
# %matplotlib inline
import tempfile
from pathlib import Path

import numpy as np
from IPython.display import Markdown

import switchsd
from activations.capture import CaptureConfig, capture
from activations.corpus import load_corpus, spread
from activations.labels import LabelConfig
from activations.target import load_target
from activations.texts import stored_text
from probes import plots
from probes.anchors import anchored, margins_behind
from probes.artifact import Probe
from probes.evaluation import evaluate
from probes.intent import copy_intent
from probes.reading import logits_at
from probes.study import StudyConfig
from probes.task import LabelOf, task_of
from probes.thresholds import f1_threshold, precision_threshold
from probes.train import TrainConfig, train

target = load_target("smollm2")
target.speed_up()
folder = tempfile.TemporaryDirectory()

# %% [markdown]
# ## Capture
#
# Three kinds of sites at every fourth block: what attention adds (`attn_out`), the state behind that addition
# (`resid_mid`) and behind the block (`resid_post`). Beside the states, every row says how long the suffix match at
# this anchor is, and how many tokens of a candidate the target then wrote (`accepted`).

# %%
SITES = ["embed"] + [f"{kind}.{k}" for kind in ("attn_out", "resid_mid", "resid_post") for k in range(2, 30, 4)]
prompts = [*spread(load_corpus("train"), 96), *spread(load_corpus("validation"), 32)]
asked = LabelConfig(kappa=1)
config = CaptureConfig(sites=tuple(SITES), max_new_tokens=40, batch=64, labels=asked)
store = capture(target, prompts, Path(folder.name) / "store", config)

# %%
rows = store.rows()
matched = rows["match_length"] > 0
Markdown(
    f"{len(store)} anchors of {len(prompts)} answers, {matched.sum()} of them with a suffix match. At "
    f"{(rows['follow'][matched] == 1).mean():.0%} of these the target followed a candidate for at least one token: "
    "the base rate, beside which every number below must be read."
)

# %% [markdown]
# ## Fit at every site, choose on the selection part
#
# The label is `follow`: is the accepted length at least 1? `measured` asks for the tests of a reviewer.

# %%
found = train(
    store,
    TrainConfig(label="follow", match=1, l2=(1e-3, 1e-2), resamples=500),
    measured=StudyConfig(folds=3, transfer=False),
)
report = found.report.to_dict()
probe = found.probes["best"]

# %% [markdown]
# A cell is a probe: the kind of site downwards, the block to the right, brighter is better. These are AUCs of the
# *selection* part. The brightest of them is chosen, and just because it is the brightest of so many, its number is
# too good: it is not a result.

# %%
plots.sweep_map(report, "follow_1", "linear")

# %% [markdown]
# ## Beside what needs no probe
#
# On the test part, with intervals from drawing whole documents again (rows of one document are alike). The picture
# shows differences on the same rows: right of zero the probe is ahead, left of it the other score is. *Surface* is
# what the text alone says of the match; *logits* is how sure the target was of the pending token. *Leak check* does
# not count, and comes below.

# %%
plots.behind(report, "match")

# %% [markdown]
# ## Controls
#
# Each control is the same probe with one thing taken away, and the grey line is the probe. Labels shuffled within
# documents leave only what the document gives away. A *control task* is a random label for each token id: a probe that
# learns it well could be memorising tokens (its distance to the line is the probe's selectivity). Embeddings know the
# token and nothing of the context. Random directions know nothing that was learnt. Rows split at random instead of by
# document would let near-duplicates help: right of the line by as much as they do. The closer any other control comes
# to the line, the less the probe has shown. The leak check lies right of the line, where nothing honest can be.

# %%
plots.controls(report)

# %% [markdown]
# ## The leak
#
# One position later everything is easy: once the pending token has been fed, the target's own logits say what it will
# write, and the margin of the candidate (its logit less that of the best other token) tells genuine from accidental
# but for rounding. A probe on that state would look marvellous. It would also be useless: to have that state, the
# target must already have run the forward that the draft was meant for. So an AUC above 0.99 for `follow` is a sign of
# an error in what was read, not of copy intent. Both scores on the same anchors of the test part:

# %%
test = [n for n in np.unique(rows["document"]) if prompts[n].split == "validation"]
texts = [anchored(stored_text(target, rows, n, prompts[n]), rows, asked, kappa=1) for n in test]
texts = [text for text in texts if text.anchors]
genuine = np.array([a.genuine for text in texts for a in text.anchors])
documents = np.array([text.document for text in texts for _ in text.anchors])
intent = [copy_intent(target, [probe], text.ids)[0, [a.position for a in text.anchors]] for text in texts]
margin = [margins_behind(target, text).numpy() for text in texts]
both = {"copy intent, from the anchor": intent, "leak: margin of the candidate, one position later": margin}
areas = {name: evaluate(genuine, np.concatenate(s), documents).roc_auc for name, s in both.items()}
plots.areas(areas, f"{len(genuine)} matches of {len(texts)} test answers")

# %%
Markdown("; ".join(f"{name}: AUC **{area:.3f}**" for name, area in areas.items()) + ".")

# %% [markdown]
# ## The threshold
#
# From which copy intent on should the gate copy? That is chosen on the selection part as well. Two rules: the best F1,
# and the lowest threshold that is right in 80 % of the cases. The curves show what every threshold would reach *on the
# rows that choose it*.

# %%
task = task_of(store, LabelOf("follow", match=1), selection_share=0.2, resamples=500, seed=0)
score = 1 / (1 + np.exp(-logits_at(store, probe.config.site, len(rows["document"]), probe.logit)))
y, gate = task.y, task.gate
chosen = [f1_threshold(y[gate], score[gate])]
try:
    chosen.append(precision_threshold(y[gate], score[gate], 0.8))
except ValueError as error:  # no threshold is as precise: the message says how precise the best one is
    print(error)
plots.threshold_choice(y[gate], score[gate], chosen, f"{gate.sum()} rows of the selection part")

# %% [markdown]
# ## One look at the test part
#
# How copy intent is spread over genuine and accidental matches that decided nothing. Where the two overlap, no
# threshold can be right.

# %%
rule = chosen[0]
plots.distributions(score[task.test], y[task.test] == 1, rule.threshold, f"{task.test.sum()} rows of the test part")

# %% [markdown]
# ## Save it, load it, decode with it
#
# The artifact is a folder: weights, a config that says whose states it was fitted on and how, and a model card. It is
# refused by any other target. With a probe named, the gate of mode `switchsd` is SwitchSD's rule: copy where copy
# intent reaches the threshold and the last tokens occurred before. `neural="none"`: what does not copy is written by
# the target alone.

# %%
saved = probe.save_pretrained(Path(folder.name) / "probe")
print(sorted(file.name for file in saved.iterdir()))
decoder = switchsd.load(target, probe=saved, neural="none")
print(Probe.from_pretrained(saved, target).config.site, "->", decoder.probe.config.site)

# %%
PROMPT = (
    "Copy the note and add one sentence of thanks at the end.\n\nThe bus to Arlen leaves from the north gate at nine. "
    "The bus to Moss leaves from the south gate at ten."
)
alone = decoder.generate(PROMPT, mode="ar", max_new_tokens=64)
gated = decoder.generate(PROMPT, mode="switchsd", max_new_tokens=64)
print(gated.text)
same = gated.tokens == alone.tokens
Markdown(
    f"{gated.tokens_per_step:.2f} tokens a step instead of {alone.tokens_per_step:.2f}; {gated.copy_share:.0%} of the "
    f"{gated.steps} steps copied. The text is "
    + ("that of the target alone." if same else "another one than alone: in bfloat16, near-ties may fall differently.")
)

# %% [markdown]
# ## What we saw

# %%
measured = task.on(task.test, score, rule.threshold)
length = report["evaluations"]["match length"]["match"]["roc_auc"]["estimate"]
gap = found.report.findings.differences["match length"]["match"]["roc_auc"]
Markdown(
    f"The probe at {probe.config.site}, chosen among {len(store.sites)} sites, has an AUC "
    f"of {measured.roc_auc:.3f} on {measured.rows} test rows of {measured.documents} documents (base rate "
    f"{measured.base_rate.estimate:.2f}). At the threshold {rule.threshold:.2f} it calls with a precision of "
    f"{measured.precision:.2f} and finds {measured.recall:.2f} of the genuine matches. The match length alone has an "
    f"AUC of {length:.3f}; the probe's less that is {gap:.3f}: "
    + (
        "with this little text the probe is ahead."
        if gap.lower > 0
        else "with this little text the probe is behind a score that costs nothing."
        if gap.upper < 0
        else "with this little text neither is shown to be ahead."
    )
)

# %% [markdown]
# **Limits.**
# - Some thousand rows. The shipped probe was fitted on eight times as many, and FINDINGS.md tells what became of it:
#   level with surface features on this target. Wide intervals here mean "not known", not "no difference".
# - One label, one target, greedy answers. A probe for sampled text should be measured on sampled text.
# - The sweep looked at every fourth block only, and the selection part is small: another seed may choose another site.
#
# **What to try next.**
# - `TrainConfig(labels=("follow_4", "span_2"))`: labels beside the first one; a state may know more of a long copy.
# - `TrainConfig(estimators=("linear", "means", "mlp"))`: is a straight line enough?
# - `CaptureConfig(source_sites=("resid_post.14",), lookback=True)`: two more baselines from the literature.
# - `switchsd report FOLDER` after `switchsd train probe` makes one page of all of this.

# %%
folder.cleanup()
