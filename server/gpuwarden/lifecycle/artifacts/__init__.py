"""Pull a job's outputs and prove the copies."""
