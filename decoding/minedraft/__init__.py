"""Two batches that take turns, and a drafter in a process of its own."""
