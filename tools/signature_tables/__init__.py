"""Read the signatures of released wheels and write them as tables; `tools/build_signatures.py` is the command."""
