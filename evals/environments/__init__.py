"""Simulated scenarios in which agents are tested."""
