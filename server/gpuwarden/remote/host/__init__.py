"""Probe a machine before running a job on it."""
