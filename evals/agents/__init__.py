"""Agents under test. Each is a module, loaded by its name."""
