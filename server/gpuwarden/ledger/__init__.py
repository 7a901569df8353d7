"""The append-only record of all events, from which every other state is derived."""
