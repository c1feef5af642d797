"""The trace viewer: a trace as one HTML page that needs nothing else."""

from decoding.viewer.page import compared, inline, page

__all__ = ["compared", "inline", "page"]
