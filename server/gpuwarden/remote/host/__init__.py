"""Learn what a machine is like before a job runs there."""
