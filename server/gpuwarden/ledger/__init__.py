"""The append-only log of all events, from which every state is computed."""
