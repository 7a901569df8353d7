"""Read and write transcripts in several formats."""
