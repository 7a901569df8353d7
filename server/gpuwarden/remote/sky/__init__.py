"""Access SkyPilot through its SDK, running in SkyPilot's interpreter."""
