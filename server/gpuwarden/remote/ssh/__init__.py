"""One machine over SSH: connect, run commands, stream data."""
