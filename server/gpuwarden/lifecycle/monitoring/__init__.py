"""Observe jobs, billing, balances and deadlines, and raise alerts."""
