"""One file format per module: `NAME`, `claims(name, head)` and `read(source, limits)`."""
