"""SkyPilot, reached through its own SDK in another interpreter."""
