"""Draft models: small causal LMs that share the target's vocabulary."""
