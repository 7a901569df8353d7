"""Many runs of one script: accept a plan, keep its machines busy within a budget, and prove every cell."""
