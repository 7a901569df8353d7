"""Read and write transcripts of many formats."""
