"""Other engines beside which modes are measured, each in a process and an environment of its own."""
