"""One folder layout per module: `NAME`, `claims(folder)` and `judge(folder, found)`."""
