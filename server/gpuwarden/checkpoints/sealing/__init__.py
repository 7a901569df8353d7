"""Record digests right after a save, so that every copy can be compared with them."""
