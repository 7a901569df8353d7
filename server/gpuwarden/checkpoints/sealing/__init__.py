"""Record digests immediately after a save, so that copies can be compared with the saved files."""
