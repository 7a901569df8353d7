"""Prove that a checkpoint is whole, sane and resumable. Code that a checkpoint brings is never executed.

`verify.verify` is the entry point. Below it two sorts of plug-ins, each found by its file's name: `formats/` read
one file, `layouts/` judge one folder. Almost everything imports the standard library only, so that it can be shipped
to the machine where the bytes are; `archive.py` lists the few modules that stay at home.
"""
