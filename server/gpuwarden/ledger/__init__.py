"""The append-only record of all events. Every other state is derived from it."""
