"""Arbitration at mismatches: the draft's token or the target's, chosen by a learned policy. Lossy by design."""
