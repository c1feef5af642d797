"""Copy-intent probes: estimators on captured states, their evaluation, and the artifact that decoding loads."""
