"""Simulated worlds in which agents act."""
