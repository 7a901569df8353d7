"""Read training scripts without running them, and estimate their requirements."""
