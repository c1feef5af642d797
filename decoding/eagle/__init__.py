"""The EAGLE-3 drafter: a one-block head on the target's own features."""
