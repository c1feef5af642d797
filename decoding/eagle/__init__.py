"""The EAGLE drafter: heads of every published kind, on the target's own states."""
