"""Test the scorer with witnesses (transcripts that must pass) and mutated transcripts."""
