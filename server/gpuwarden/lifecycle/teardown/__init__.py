"""The teardown gate: prove the outputs, get approval, stop or terminate, observe the end."""
