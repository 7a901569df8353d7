"""One file format per module; `checkpoints.plugins` defines the interface."""
