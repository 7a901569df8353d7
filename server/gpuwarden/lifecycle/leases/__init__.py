"""The billing status of each instance, the limits on its cost, and the orders about its end."""
