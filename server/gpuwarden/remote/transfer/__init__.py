"""Copy files to and from a machine. Copies can be resumed and are verified by digest."""
