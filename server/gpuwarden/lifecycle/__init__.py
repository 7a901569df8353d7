"""The use cases: what a person or an agent can ask for. What a crash leaves open, the next call finishes."""
