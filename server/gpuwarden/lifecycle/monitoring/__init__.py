"""Observe jobs, meters, balances and deadlines; raise alerts."""
