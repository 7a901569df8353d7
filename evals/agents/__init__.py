"""Agents under test. Each agent is a module, which is loaded by name."""
