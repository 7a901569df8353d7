"""Probe a machine before a job runs there."""
