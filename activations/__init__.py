"""Hidden states of a frozen target: where they are, how they are read, labelled, stored and written to."""
