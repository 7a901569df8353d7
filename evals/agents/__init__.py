"""Agents under test, one module each, found by name."""
