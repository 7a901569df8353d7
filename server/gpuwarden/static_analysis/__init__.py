"""Read training scripts without running them, and estimate what they need."""
