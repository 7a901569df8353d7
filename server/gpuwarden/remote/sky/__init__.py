"""Access SkyPilot through its SDK, in SkyPilot's own interpreter."""
