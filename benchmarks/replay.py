"""Replays gates over a log of both drafters: which gate gives the most tokens per millisecond, and what could be had.

switchsd capture STORE --kappa 1 --sites ...           (texts of the embedded prompts)
python -m benchmarks.replay log LOG --store STORE --suite gsm8k.jsonl --suite humaneval.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from activations.corpus import load_corpus, read_prompts, spread
from activations.generation import Request as Answer
from activations.generation import complete
from activations.sites import eagle_sites
from activations.store import CaptureStore
from activations.target import Target, load_target
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.head import load_head
from decoding.lengths import stored_texts
from decoding.replay_log import log_text
from switchsd.artifacts import shipped

SITES = (
    "resid_mid.12", "resid_mid.16", "resid_mid.18", "resid_mid.20", "resid_mid.22", "resid_mid.24", "resid_mid.27",
    "resid_post.14", "resid_post.19", "resid_post.24", "resid_post.26", "resid_post.29",
)  # fmt: skip
AHEAD = 24
"""Tokens written beyond the logged ones, so that it is known how far drafts are followed."""


Text = tuple[str, list[int], int, bool]
"""Key, ids, prompt length, and whether it stopped."""


def embedded_texts(store: CaptureStore, target: Target, split: str, count: int) -> Iterator[Text]:
    """Evenly spread texts of a split of a store of the embedded prompts."""
    texts = [t for t in stored_texts(store, load_corpus(), target.encode_messages) if t.split == split]
    for i in np.linspace(0, len(texts) - 1, min(count, len(texts))).round().astype(int).tolist():
        yield f"{split}-{i:04}", texts[i].ids, texts[i].prompt, texts[i].stopped


def written_texts(target: Target, file: Path, count: int, limit: int, rows: int) -> Iterator[Text]:
    prompts = read_prompts(file)
    prompts = spread(prompts, min(count, len(prompts)))
    requests = (Answer(i, target.encode_messages(p.messages), limit + AHEAD) for i, p in enumerate(prompts))
    for done in complete(target, requests, rows=rows):
        prompt = done.request.prompt
        yield f"{file.stem}-{done.request.number:04}", [*prompt, *done.tokens], len(prompt), done.stopped


def log(given: argparse.Namespace) -> None:
    target = load_target(given.target)
    head = given.head or shipped("eagle", given.target)
    drafter = EagleDrafter(target, load_head(head, target.vocab_size), sites=eagle_sites(target.blocks))
    store = CaptureStore.open(given.store)
    counts = (("validation", given.validation), ("train", given.train))
    sources = {split: embedded_texts(store, target, split, count) for split, count in counts}
    sources |= {f.stem: written_texts(target, f, given.limit, given.max_new_tokens, 16) for f in given.suite}
    given.log.mkdir(parents=True, exist_ok=True)
    for source, texts in sources.items():
        if source not in ("train", "validation") and len(list(given.log.glob(f"{source}-*"))) >= given.limit:
            continue
        for key, ids, prompt, stopped in texts:
            file = given.log / f"{key}.safetensors"
            if file.is_file() or len(ids) - prompt < 3:
                continue
            log_text(
                target, drafter, ids, prompt, key=key, source=source, stopped=stopped,
                limit=given.max_new_tokens, depth=given.depth, sites=SITES,
            ).save(file)  # fmt: skip
            print(key, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = commands.add_parser("log", help="log both drafters over the target's own texts; resumes")
    made.add_argument("log", type=Path)
    made.add_argument("--store", type=Path, required=True, help="capture store of the embedded prompts")
    made.add_argument("--suite", type=Path, action="append", default=[], help="more prompts, never reported ones")
    made.add_argument("--limit", type=int, default=30, help="prompts of each suite")
    made.add_argument("--train", type=int, default=100)
    made.add_argument("--validation", type=int, default=60)
    made.add_argument("--max-new-tokens", type=int, default=96)
    made.add_argument("--depth", type=int, default=4)
    made.add_argument("--target", default="smollm2")
    made.add_argument("--head", type=Path)
    made.set_defaults(run=log)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
