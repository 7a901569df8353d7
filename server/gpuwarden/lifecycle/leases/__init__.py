"""The billing status of each instance, the caps on its cost, and the orders for automatic teardown and self-stop."""
