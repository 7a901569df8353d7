"""Track each instance's billing status and cost caps, and the orders for automatic teardown and self-stop."""
