"""What a copied token is: labels for the states of a text that the target wrote.

`span` labels a token by the text alone: it is copied iff it lies in a window of `span_n` tokens that occurs
earlier. `follow` labels an anchor with a suffix match: how many tokens of the best candidate the target then
wrote. Both come from the finished text, without the model.

`span` is the label of SwitchSD (arXiv 2609.20186), with n = 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig

UNKNOWN = -1
"""A label that the text does not decide."""


@dataclass(frozen=True)
class LabelConfig:
    """How copied tokens are labelled."""

    span_n: int = 5
    """Shortest verbatim span, in tokens, that counts as copied."""
    nonoverlap: bool = False
    """The earlier occurrence of a span must end before the span begins."""
    ignore_runs: bool = False
    """Windows that repeat one token do not count."""
    ignore_template: bool = False
    """Windows made of the chat template's tokens alone do not count."""
    kappa: int = 5
    """Shortest suffix match, pending token included."""
    candidates: int = 10
    """Most candidates tried at an anchor: the longest matches, the most recent of equals first."""
    depth: int = 20
    """Tokens of a candidate, and so the largest accepted length."""
    follow_m: int = 1
    """`follow` is 1 if at least this many tokens of a candidate are accepted."""

    def __post_init__(self) -> None:
        if self.span_n < 1:
            raise ValueError(f"span_n is {self.span_n}; it must be 1 or more")
        if not 1 <= self.follow_m <= self.depth:
            raise ValueError(f"follow_m is {self.follow_m}; it must lie between 1 and depth ({self.depth})")
        _ = self.match  # the matcher checks its own settings

    @property
    def match(self) -> MatchConfig:
        """The matcher's settings."""
        return MatchConfig(self.kappa, self.candidates, self.depth, max_length=max(32, self.kappa))


def span_labels(
    ids: Sequence[int],
    n: int = 5,
    start: int = 0,
    nonoverlap: bool = False,
    ignore_runs: bool = False,
    ignore: frozenset[int] = frozenset(),
) -> np.ndarray:
    """Booleans [len(ids)]: is token j in a window of `n` tokens that occurs earlier in the text?

    Tokens before `start` are sources but get no label (False). An earlier occurrence may overlap its copy unless
    `nonoverlap`. Windows that repeat one token are left out with `ignore_runs`, and those made of tokens in
    `ignore` alone always. The label looks ahead: the first tokens of a span are copied although no match of n
    tokens is visible yet when they are written.
    """
    ids = list(ids)
    labels = np.zeros(len(ids), dtype=bool)
    first: dict[tuple[int, ...], int] = {}
    for begin in range(len(ids) - n + 1):
        window = tuple(ids[begin : begin + n])
        source = first.setdefault(window, begin)
        if source == begin or (nonoverlap and source + n > begin):
            continue
        if ignore_runs and n > 1 and len(set(window)) == 1:
            continue
        if ignore and ignore.issuperset(window):
            continue
        labels[begin : begin + n] = True
    labels[:start] = False
    return labels


def follow_labels(match_length: np.ndarray, accepted: np.ndarray, censored: np.ndarray, m: int) -> np.ndarray:
    """int8 [rows]: 1 if at least `m` tokens were accepted, 0 if fewer, -1 without a match or if undecided."""
    labels = (accepted >= m).astype(np.int8)
    labels[(match_length == 0) | (censored & (accepted < m))] = UNKNOWN
    return labels


def follow_rows(
    ids: Sequence[int],
    prompt_length: int,
    config: LabelConfig | None = None,
    stopped: bool = True,
    template: frozenset[int] = frozenset(),
) -> dict[str, np.ndarray]:
    """One row for each anchor of a generated text that has a pending token, as columns of equal length.

    `ids` is prompt and completion. `stopped` is False if the token limit, not a stop token, ended it.
    `template` are the chat template's token ids, for `ignore_template`. At anchor t the context is ids[:t+2].

    position      t, from the last prompt token on
    token         ids[t]
    pending       ids[t+1]
    match_length  of the longest suffix match (up to 32), 0 if there is none
    occurrences   of the last kappa tokens earlier in the context
    distance      tokens from the first candidate's start to the end of the context
    agreement     share of candidates whose first token is the first one's
    source        'prompt' or 'output', where the first candidate starts; '' without a match
    accepted      most tokens of a candidate that the target then wrote
    censored      the text was cut while a candidate still agreed: `accepted` is only a lower bound
    follow        `accepted` >= follow_m; -1 without a match or if undecided
    span_0..2     span labels of tokens t, t+1, t+2; -1 behind the end, and where a window crosses a cut

    Raises ValueError if `prompt_length` does not lie within the text.
    """
    config = config or LabelConfig()
    ids = list(ids)
    if not 1 <= prompt_length <= len(ids):
        raise ValueError(f"prompt_length is {prompt_length}; it must lie between 1 and the text's {len(ids)} tokens")
    positions = np.arange(prompt_length - 1, len(ids) - 1)
    rows = len(positions)
    columns = {
        "position": positions.astype(np.int32),
        "token": np.asarray(ids[prompt_length - 1 : -1], dtype=np.int32),
        "pending": np.asarray(ids[prompt_length:], dtype=np.int32),
        "match_length": np.zeros(rows, np.int32),
        "occurrences": np.zeros(rows, np.int32),
        "distance": np.zeros(rows, np.int32),
        "agreement": np.zeros(rows, np.float32),
        "source": np.zeros(rows, "<U6"),
        "accepted": np.zeros(rows, np.int32),
        "censored": np.zeros(rows, bool),
    }
    index = SuffixIndex(config.match, ids[:prompt_length])
    for row in range(rows):
        index.extend((ids[prompt_length + row],))
        matches = index.find()
        if not matches.count:
            continue
        columns["match_length"][row] = matches.longest
        columns["occurrences"][row] = matches.count
        columns["distance"][row] = matches.distance
        columns["agreement"][row] = matches.agreement
        columns["source"][row] = "prompt" if matches.in_prompt else "output"
        accepted, censored = _accepted(ids, matches.end, matches.starts, config.depth)
        columns["accepted"][row] = accepted
        columns["censored"][row] = censored and not stopped
    columns["follow"] = follow_labels(
        columns["match_length"], columns["accepted"], columns["censored"], config.follow_m
    )

    ignore = template if config.ignore_template else frozenset()
    copied = span_labels(ids, config.span_n, 0, config.nonoverlap, config.ignore_runs, ignore)
    # Near a cut both outcomes are unknown: keeping only the windows seen to be copied would bias the labels.
    known = len(ids) if stopped else max(len(ids) - config.span_n + 1, 0)
    span = np.full(len(ids) + 2, UNKNOWN, np.int8)
    span[:known] = copied[:known]
    for ahead in range(3):
        columns[f"span_{ahead}"] = span[positions + ahead]
    return columns


def outcomes(ids: Sequence[int], rows: Mapping[str, np.ndarray]) -> list[str]:
    """What became of each anchor's first candidate, for `rows` as `follow_rows` gives them for this text.

    genuine     the target wrote its first token
    accidental  it wrote a token that starts no candidate
    other       it wrote the first token of another candidate
    ''          there is no match, or the text ends before it is decided
    """
    found = []
    for position, distance, accepted in zip(rows["position"], rows["distance"], rows["accepted"], strict=True):
        written = int(position) + 2
        if not distance or written >= len(ids):
            found.append("")
        elif ids[written] == ids[written - int(distance)]:
            found.append("genuine")
        else:
            found.append("other" if accepted else "accidental")
    return found


def _accepted(ids: list[int], end: int, starts: tuple[int, ...], depth: int) -> tuple[int, bool]:
    """The longest common prefix of a candidate and ids[end:], and whether one still agreed at the text's end."""
    best, undecided = 0, False
    for start in starts:
        period = end - start  # a candidate that reaches the end goes on from its start
        length = 0
        while length < depth and end + length < len(ids) and ids[start + length % period] == ids[end + length]:
            length += 1
        best = max(best, length)
        undecided = undecided or (length < depth and end + length == len(ids))
    return best, undecided
