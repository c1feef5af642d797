"""Sequential Monte Carlo speculative decoding: particles that are weighed instead of rejected."""
