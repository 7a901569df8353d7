"""Read pickles symbolically, without importing or calling anything."""
