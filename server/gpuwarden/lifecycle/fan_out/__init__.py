"""Many runs of one script: accept a plan, keep its machines busy inside a budget, prove every cell."""
