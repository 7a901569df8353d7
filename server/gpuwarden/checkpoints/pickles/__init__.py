"""Read pickles symbolically; nothing is imported or called."""
