"""Many runs of one script: accept a roster, keep its machines busy inside a budget, prove every cell."""
