"""Where the end of a context occurs earlier in it, and what followed there.

One behaviour (`Matches` says which), three back ends: `SuffixIndex` on the host, whose cost does not depend on the
length of the context; `kernel.find_matches` on a GPU, without a host sync (it imports Triton, so it is imported where
it is used); `reference.find_matches` in plain torch, for any other device. `DeviceMatcher` picks by device.
`SharedStore` looks in other requests' finished texts.

Copying from suffix matches is prompt lookup decoding (Saxena 2023); others look them up by a hash of the last tokens
(CopySpec, arXiv 2502.08923) or in a suffix automaton (SAM-Decoding, arXiv 2411.10666).
"""

from activations.matching.device import DeviceMatcher
from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig, Matches
from activations.matching.shared import SharedConfig, SharedMatches, SharedStore
from activations.matching.tensors import TensorMatches

__all__ = [
    "DeviceMatcher",
    "MatchConfig",
    "Matches",
    "SharedConfig",
    "SharedMatches",
    "SharedStore",
    "SuffixIndex",
    "TensorMatches",
]
