"""Each instance's billing status, cost caps, and orders for automatic teardown and self-stop."""
