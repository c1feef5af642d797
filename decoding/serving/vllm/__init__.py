"""vLLM: a plug-in that gates copying over its own EAGLE-3 drafter, and a proposer that only copies."""
