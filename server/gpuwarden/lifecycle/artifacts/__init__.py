"""Pull a job's outputs and verify the copies."""
