"""Emulators of the six platforms' APIs over rehearsal clouds, for tests over real HTTP on loopback."""
