"""Copy files to and from a machine, resumable and verified by digest."""
