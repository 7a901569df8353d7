"""Scores what agents did with GPUs: transcripts against cases, in money and data saved or lost.

Scoring needs the standard library only and imports nothing from the server, so that a shared mistake can't hide itself.
Start at `python -m evals --help`, or at README.md in this folder.
"""
