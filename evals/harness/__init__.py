"""Run an agent: tools, recording, subprocesses."""
