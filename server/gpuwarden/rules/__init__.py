"""The rules, one file each: `pf_*.py` check a submit, `td_*.py` check a teardown."""
