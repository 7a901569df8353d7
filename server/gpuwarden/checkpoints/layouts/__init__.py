"""One folder layout per module. Each module has `NAME`, `claims(folder)` and `judge(folder, found)`."""
