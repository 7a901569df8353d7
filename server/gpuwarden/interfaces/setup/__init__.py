"""`gpuwarden setup`: enter the server and the guard into the configuration of the clients that are installed here."""
