"""Learning to Draft: policies that decide how deep an EAGLE tree grows and how many of its nodes are verified."""
