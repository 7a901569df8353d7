"""One file per rule, found by its name: `pf_*.py` guard a submit, `td_*.py` guard a teardown."""
