"""Check the values inside a file: checksums, non-finite numbers, and statistics."""
