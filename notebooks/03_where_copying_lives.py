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
# # Where copying lives
#
# **Which parts of the target do the copying, and is what a probe reads of it also what the target uses?**
#
# You will see which heads look for repetitions, by this project's reader and by TransformerLens; where they look at a
# genuine and at an accidental match; how the candidate rises through the blocks; and what remains of copying
# when the heads, or the probe's direction, are taken away, with random controls of the same size. About a minute on
# two cores, in float32: interventions are small differences.

# %%
# %matplotlib inline
# %config InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "dpi": 80}
import tempfile
from pathlib import Path

import numpy as np
import torch
from IPython.display import Markdown

from activations import plots
from activations.capture import CaptureConfig, capture
from activations.corpus import load_corpus, spread
from activations.figures import forest
from activations.heads import attention_from, induction_scores, previous_token_scores, repeated_tokens, top_heads
from activations.labels import LabelConfig
from activations.lens import Lens
from activations.logit_lens import logit_lens
from activations.target import load_target
from activations.texts import stored_text
from probes import plots as probe_plots
from probes.anchors import Clusters, anchored
from probes.artifact import Probe
from probes.causality import CausalityConfig, Study
from probes.direction import choose_anchors
from probes.evaluation import evaluate
from probes.induction import random_heads
from probes.intent import copy_intent

target = load_target("smollm2", dtype="float32")
probe = Probe.from_pretrained("smollm2/best", target)

# %% [markdown]
# ## Two kinds of heads
#
# Random tokens, and the same ones again: nothing but copying can foretell the second half. An *induction head* looks
# from a token to what followed it the first time; its score is the attention that it pays there. A *previous-token
# head* looks one token back. The first kind needs the second (Olsson et al. 2022, arXiv 2209.11895). The eight
# strongest induction heads are framed.

# %%
tokens = repeated_tokens(target, length=50, rows=4)
induction, previous = induction_scores(target, tokens), previous_token_scores(target, tokens)
leading = top_heads(induction, 8)
plots.heads(induction, "Induction heads", "attention to the source (share)", leading)

# %%
plots.head_kinds(previous, induction, "previous-token score", "induction score", "Every head (block.head)")

# %% [markdown]
# Few heads do either, and hardly one does both. TransformerLens has a detector of its own, on a wrapped copy of the
# same target. It counts the attention of all queries, the first half's too, so that its numbers are smaller; which
# heads lead should be the same.

# %%
lens = Lens(target)
theirs = lens.head_scores(tokens[0].tolist(), "induction")
same = set(leading) & set(top_heads(theirs, 8))
correlation = torch.corrcoef(torch.stack([theirs.flatten(), induction.flatten()]))[0, 1]
Markdown(
    f"{len(same)} of the 8 leading induction heads are TransformerLens's too; over all {induction.numel()} heads the "
    f"two scores correlate with {correlation:.3f}. The strongest induction head is {leading[0]}, the strongest "
    f"previous-token head {top_heads(previous, 1)[0]}."
)

# %% [markdown]
# ## Where they look at a match
#
# The target's answers to some short prompts, and their anchors with a suffix match of two tokens or more. At such an
# anchor the target has just written the pending token for the second time. Its *source* is where that token stood the
# first time: behind the earlier place of the anchor's own token, which is where an induction head looks. Everything
# here is read at the anchor, before the draft.

# %%
asked = LabelConfig(kappa=1)
short = [p for p in load_corpus("validation") if len(target.encode_messages(p.messages)) < 100]
prompts = spread(short, 16)
folder = tempfile.TemporaryDirectory()
config = CaptureConfig(sites=(probe.config.site,), max_new_tokens=40, batch=16, labels=asked)
store = capture(target, prompts, Path(folder.name) / "store", config)
rows = store.rows()
texts = [anchored(stored_text(target, rows, n, prompt), rows, asked, kappa=2) for n, prompt in enumerate(prompts)]
texts = [text for text in texts if text.anchors]
keys = zip(rows["document"].tolist(), rows["position"].tolist(), strict=True)
gaps = dict(zip(keys, rows["distance"].tolist(), strict=True))


def source(text, anchor):
    return anchor.position + 1 - gaps[text.document, anchor.position]


# %% [markdown]
# One anchor of each kind whose source is near enough to be drawn. A row is a head, a column a token of the text up to
# the anchor, and the frame is the source. The anchor's own token is the last column. Attention on the first token of a
# text, where heads rest that find nothing, is outside the picture.


# %%
def draw(genuine):
    text, anchor = max(
        ((t, a) for t in texts for a in t.anchors if a.genuine == genuine and 6 < gaps[t.document, a.position] < 34),
        key=lambda one: one[1].match_length,
    )
    shown = slice(max(source(text, anchor) - 4, 0), anchor.position + 1)
    seen = attention_from(target, text.ids, [anchor.position])[0]
    tokens = plots.named([target.decode([i], skip_special_tokens=False) for i in text.ids])
    kind = "A genuine" if genuine else "An accidental"
    title = f"{kind} match of {anchor.match_length}: pending {tokens[anchor.position + 1]!r}"
    return plots.attention(
        [seen[h.block, h.head, shown].tolist() for h in leading], [str(h) for h in leading], tokens[shown],
        [source(text, anchor) - shown.start], title,
    )  # fmt: skip


draw(genuine=True)

# %%
draw(genuine=False)

# %% [markdown]
# Over all anchors: the attention to the source, by the eight leading induction heads and by eight random other heads
# of the same blocks.

# %%
paid = []
for text in texts:
    at = [a.position for a in text.anchors]
    seen = attention_from(target, text.ids, at)
    paid.append(seen[range(len(at)), :, :, [source(text, a) for a in text.anchors]])
paid = torch.cat(paid).numpy()  # [anchors, blocks, heads]
genuine = np.array([a.genuine for text in texts for a in text.anchors])
documents = np.array([text.document for text in texts for _ in text.anchors])
groups = {"induction heads": leading, "random heads": random_heads(induction, leading, seed=0)}
means = {name: paid[:, [h.block for h in heads], [h.head for h in heads]].mean(1) for name, heads in groups.items()}
named = [
    (f"{name}, {kind} ({where.sum()})", Clusters(documents[where], 500, 0).mean(score[where]).to_dict())
    for name, score in means.items()
    for kind, where in (("genuine", genuine), ("accidental", ~genuine))
]
forest(named, f"{len(genuine)} anchors of {len(texts)} texts", "attention to the source (share), mean of 8 heads", 0.0)

# %% [markdown]
# Does where they look tell genuine from accidental? On the same anchors, beside copy intent and the match length
# (AUC; 0.5 knows nothing). All three are known before the draft.

# %%
lengths = np.array([a.match_length for text in texts for a in text.anchors])
intent = [copy_intent(target, [probe], text.ids)[0, [a.position for a in text.anchors]] for text in texts]
scores = {"attention of 8 induction heads": means["induction heads"], "attention of 8 random heads":
          means["random heads"], "copy intent": np.concatenate(intent), "match length": lengths}  # fmt: skip
areas = {name: evaluate(genuine, score, documents, resamples=500).roc_auc for name, score in scores.items()}
probe_plots.areas(areas, "Genuine or accidental?")

# %% [markdown]
# ## How the candidate rises
#
# The logit lens ends the target after a block: final norm, output matrix, and what probability has the candidate's
# first token? This is read one position later, with the pending token fed: it is the copy being made, and no probe
# may look there. Lines are medians over anchors, bands the middle half.

# %%
few = choose_anchors(texts, 2, seed=0)  # at most two of each class a text: the output matrix is large
rises = [
    logit_lens(target, text.ids, [a.position + 1 for a in text.anchors], [a.candidate for a in text.anchors]).numpy()
    for text in few
]
rises, kind = np.concatenate(rises, axis=1), np.array([a.genuine for text in few for a in text.anchors])
plots.lens({"genuine": rises[:, kind], "accidental": rises[:, ~kind]}, "The candidate's first token, by depth")

# %%
curve = np.median(rises[:, kind], axis=1)
lowest = int(curve.argmin())
half = lowest + int(np.argmax(curve[lowest:] >= (curve[lowest] + curve[-1]) / 2))
Markdown(
    f"A genuine candidate is least likely behind block {lowest} and has won half of the way behind block {half} of "
    f"{target.blocks} (medians, in nats); the eight leading induction heads stand in blocks "
    f"{min(h.block for h in leading)} to {max(h.block for h in leading)}."
)

# %% [markdown]
# ## Taking things away
#
# Two experiments. **Heads**: the leading induction heads give their mean over these texts instead of what they found,
# and as many random heads of the same blocks as a control. **The probe's direction**: the anchor's state is moved
# along it, so that its component becomes the mean of the other class (*ablate*) or that of an anchor of the other
# class (*interchange*); the control moves the same state as far along random directions. What is measured is the
# margin: the logit of the candidate's first token less that of the best other one, one position later.

# %%
small = CausalityConfig(anchors=1, directions=4, heads=(2, 8), resamples=500)
study = Study(target, probe, store, prompts, small)
result = study.run().to_dict()

# %%
probe_plots.ablations(result["induction"], "margin")

# %%
probe_plots.ablations(result["induction"], "intent")

# %% [markdown]
# A red line below the grey one: these heads do more for it than others. Now the direction; a red point away from its
# grey one is an effect of the direction itself. First the prediction that the changed state makes itself, that of the
# pending token: it shows whether the change reaches anything at all. Where even that hardly moves, the distance is too
# small for the second picture to say much.

# %%
probe_plots.direction(result["direction"], "own")

# %%
probe_plots.direction(result["direction"], "next")

# %% [markdown]
# ## What we saw


# %%
def clear(interval):
    return interval["lower"] is not None and (interval["lower"] > 0 or interval["upper"] < 0)


def told(interval):
    return f"{interval['estimate']:+.2f} [{interval['lower']:+.2f}, {interval['upper']:+.2f}]"


most = [a for a in result["induction"]["ablations"] if a["which"] == "top"][-1]
over = most["over_random"]
effects = [e for e in result["direction"] if e["where"] == "anchor"]
beyond = [e for e in effects if clear(e["next"]["difference"])]
largest = max(effects, key=lambda e: abs(e["next"]["difference"]["estimate"]))
Markdown(
    f"Without the {len(most['heads'])} leading induction heads the candidate's margin "
    f"moves by {told(most['margin_change'])} logits, and copy intent by {told(most['intent_change'])}; beside what as "
    f"many random heads do, that is {told(over['margin'])} and {told(over['intent'])}. "
    + (
        "Copying does rest on these heads"
        if clear(over["margin"])
        else "That copying rests on these heads is not shown"
    )
    + (", and so does copy intent. " if clear(over["intent"]) else "; that copy intent does is not shown. ")
    + f"The direction: moved by {largest['displacement']:.1f}, where the norm of the states is {largest['norm']:.0f}, "
    f"it changes the candidate's margin otherwise than random directions do in {len(beyond)} of {len(effects)} "
    f"experiments; the largest difference is {told(largest['next']['difference'])} logits. "
    + (
        "So it is not quite idle, but hardly a lever: compare its size with that of the heads."
        if beyond
        else "That the target uses what the probe reads is not shown: copy intent is a sign here, not a lever."
    )
)

# %% [markdown]
# **Limits.**
# - Four experiments with the direction, and nothing is corrected for their number.
# - Sixteen short answers of one small target. Anchors of one text are alike, so the intervals draw whole texts again.
# - The score on random tokens finds heads that copy by position. Heads that copy by meaning, or that only look when
#   something is to be copied, are not among them.
# - Ablating a head breaks whatever else it does; the random heads of the same blocks are a rough measure of that.
# - The direction is one of many along which the classes differ; an effect of zero does not say that the state is not
#   used, and the pending token's own forward can find the match again by itself.
# - A logit lens reads states in the middle with a matrix that was made for the last one.
#
# **What to try next.**
# - `Probe.from_pretrained("smollm2/serving", target)`: the probe at a block boundary.
# - `where="suffix"` in `probe_plots.direction`: every token of the match is changed, not the anchor alone.
# - `previous` instead of `induction` in `top_heads`: what do previous-token heads carry?
# - `switchsd causality PROBE STORE` does the last part on a whole store; `switchsd parity` compares every site of a
#   target with TransformerLens.

# %%
folder.cleanup()
