"""Test the scorer with reference transcripts, which must pass, and mutated transcripts."""
