"""A cloud and a Hub on this machine, for demos, evals and tests: real processes and files, pretend money."""
