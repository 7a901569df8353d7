"""Score how agents used GPUs: compare transcripts with cases, and count the money and data saved or lost.

Scoring needs the standard library only and imports nothing from the server, so that a mistake in shared code can't hide
itself. Start at `python -m evals --help`, or at README.md in this folder.
"""
