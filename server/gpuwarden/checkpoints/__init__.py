"""Prove that a checkpoint is whole, sane and resumable, without running any code in it.

`verify.verify` is the entry point. Two kinds of plug-ins are found by their module names: each of `formats/` reads one
file, each of `layouts/` judges one folder. Almost all modules import only the standard library, so that they can be
shipped to the machine with the files; `archive.py` lists the exceptions.
"""
