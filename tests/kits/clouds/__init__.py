"""The six platforms' interfaces, played over rehearsal clouds, for tests over real HTTP on loopback."""
