"""Analyze pickles symbolically, without importing or calling anything."""
