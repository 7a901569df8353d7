"""Verify that a checkpoint is complete, undamaged and resumable, without running any code in it.

`verify.verify` is the entry point. There are two kinds of plug-ins: a module in `formats/` reads one file, and a module
in `layouts/` checks one folder. Almost all modules import only the standard library, so that they can run on the
machine that stores the files; `archive.py` lists the exceptions.
"""
