"""Run agents: provide their tools, record their calls and manage their subprocesses."""
