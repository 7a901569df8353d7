"""Provision a machine, launch the job there, follow it to its end."""
