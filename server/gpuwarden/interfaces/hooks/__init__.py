"""Shell hooks of coding agents: the guard and its installation."""
