"""Run agents: their tools, recording and subprocesses."""
