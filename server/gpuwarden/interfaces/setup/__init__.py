"""`gpuwarden setup`: add the server and the guard to the configuration of the installed clients."""
