"""Test the scorer on witnesses and mutated transcripts."""
