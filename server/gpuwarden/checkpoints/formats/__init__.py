"""One file format per module: `NAME`, `LOAD`, `claims(name, head)` and `read(source, limits)`.

`LOAD` says what stands for loading it: "parsed" where reading its structure parses all of it, "tensors" where its
tensors are loaded in a process of their own, "" where nothing here can load it.
"""
