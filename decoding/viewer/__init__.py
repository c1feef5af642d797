"""The trace viewer: a trace as one HTML page that needs nothing else."""

from decoding.viewer.page import compared, page

__all__ = ["compared", "page"]
