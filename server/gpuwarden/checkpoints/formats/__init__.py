"""One file format per module: `NAME`, `LOAD`, `claims(name, head)` and `read(source, limits)`.

`LOAD` says how a load is proven: "parsed" where reading its structure parses all of it, "tensors" where its tensors
are loaded in a separate process, "" where nothing here can load it.
"""
