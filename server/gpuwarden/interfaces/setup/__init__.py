"""`gpuwarden setup`: add the server and the guard to the installed clients' configuration."""
