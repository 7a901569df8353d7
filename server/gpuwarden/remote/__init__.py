"""What reaches a machine: the runner that is shipped there, and what is needed to launch it and to read its answers."""
