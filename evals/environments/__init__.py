"""Simulated environments ("worlds") in which agents are tested."""
