"""Copy files to and from a machine. Transfers resume after an interruption and are verified by digest."""
