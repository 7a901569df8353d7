"""Observe jobs, billing, balances and deadlines; raise alerts."""
