"""Simulated worlds in which agents are tested."""
