"""Replays gates over a log of both drafters: which gate gives the most tokens per millisecond, and what could be had.

switchsd capture STORE --kappa 1 --sites ...           (texts of the embedded prompts)
python -m benchmarks.replay log LOG --store STORE --suite gsm8k.jsonl --suite humaneval.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from activations.corpus import load_corpus, prompts_hash, read_prompts, spread
from activations.generation import Request as Answer
from activations.generation import complete
from activations.sites import eagle_sites
from activations.store import CaptureStore
from activations.target import Target, load_target
from decoding.eagle.drafter import EagleDrafter
from decoding.eagle.head import load_head
from decoding.replay_log import log_text
from switchsd.artifacts import shipped

SITES = (
    "resid_mid.12", "resid_mid.16", "resid_mid.18", "resid_mid.20", "resid_mid.22", "resid_mid.24", "resid_mid.27",
    "resid_post.14", "resid_post.19", "resid_post.24", "resid_post.26", "resid_post.29",
)  # fmt: skip
AHEAD = 24
"""Tokens written beyond the logged ones, so that it is known how far drafts are followed."""


def stored_texts(
    store: CaptureStore, target: Target, split: str, count: int
) -> Iterator[tuple[str, list[int], int, bool]]:
    """Key, ids, prompt length and whether it stopped, of evenly spread documents of a split."""
    rows, prompts = store.rows(), load_corpus()
    if store.manifest.get("prompts") != prompts_hash(prompts):  # documents are numbers of prompts
        raise SystemExit(f"{store.folder} was not captured from the whole embedded corpus as it is now: do so first")
    documents = np.unique(rows["document"][rows["split"] == split])
    for number in documents[np.linspace(0, len(documents) - 1, min(count, len(documents))).round().astype(int)]:
        mine = rows["document"] == number
        prompt = target.encode_messages(prompts[number].messages)
        ids = prompt + rows["pending"][mine].tolist()
        yield f"{split}-{number:04}", ids, len(prompt), bool(rows["span_0"][mine][-1] >= 0)


def written_texts(
    target: Target, file: Path, count: int, limit: int, rows: int
) -> Iterator[tuple[str, list[int], int, bool]]:
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
    sources = {
        s: stored_texts(store, target, s, n) for s, n in (("validation", given.validation), ("train", given.train))
    }
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
