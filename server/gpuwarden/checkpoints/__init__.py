"""Proof that a checkpoint is whole, sane and resumable. Nothing here ever runs code that a checkpoint brings.

`verify.verify` is the front door. Below it two sorts of plug-ins, each found by its file's name: `formats/` read
one file, `layouts/` judge one folder. Almost everything imports the standard library only, so that it can be shipped
to the machine where the bytes are; `ship.py` lists the few modules that stay at home.
"""
