"""The teardown gate: prove, ask, stop or terminate, observe the end."""
