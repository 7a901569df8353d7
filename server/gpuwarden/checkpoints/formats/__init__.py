"""One file format per module; `checkpoints.plugins` says what each offers."""
