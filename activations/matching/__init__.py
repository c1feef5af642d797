"""Where the end of a context occurs earlier in it, and what followed there.

One behaviour, two back ends: `SuffixIndex` on the host, O(1) a token; `kernel.find_matches` on a GPU, without a
host sync (it imports Triton, so it is imported where it is used). `DeviceMatcher` picks by device.
"""

from activations.matching.device import DeviceMatcher
from activations.matching.index import SuffixIndex
from activations.matching.match import MatchConfig, Matches
from activations.matching.tensors import TensorMatches

__all__ = ["DeviceMatcher", "MatchConfig", "Matches", "SuffixIndex", "TensorMatches"]
