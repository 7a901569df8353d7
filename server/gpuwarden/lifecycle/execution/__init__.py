"""Provision a machine, launch the job on it, and track the job until it ends."""
