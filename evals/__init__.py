"""Score how agents used GPUs: compare transcripts with cases, and count the money and data saved or lost.

Scoring needs only the standard library and imports nothing from the server, because the scorer could not detect a bug
in code that it shares with the server. See `python -m evals --help` and README.md in this folder.
"""
