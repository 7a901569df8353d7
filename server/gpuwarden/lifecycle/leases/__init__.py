"""The billing status of each instance, the limits on its cost, and its orders: automatic teardown and self-stop."""
