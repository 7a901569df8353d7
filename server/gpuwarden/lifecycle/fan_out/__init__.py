"""Run one script many times: accept a plan, launch its cells within a budget, and verify the outputs of each cell."""
