"""The rules, one per file: `pf_*.py` check a submission, and `td_*.py` check a teardown."""
