"""What reaches a machine: the runner that is shipped there, how it is launched, and how files come back."""
