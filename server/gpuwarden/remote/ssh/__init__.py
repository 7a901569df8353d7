"""Connect to a machine over SSH, run commands on it, and stream data."""
