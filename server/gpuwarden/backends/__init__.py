"""Code that runs jobs, one file per backend."""
