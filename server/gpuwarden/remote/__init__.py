"""Talking to machines: SSH, the shipped runner, and moving files. Never touches the ledger."""
