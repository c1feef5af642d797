"""Speculative decoding: draft trees, drafters, gates, verifiers, and the modes that are choices of them."""
