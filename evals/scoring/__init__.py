"""Cases, checks and verdicts."""
