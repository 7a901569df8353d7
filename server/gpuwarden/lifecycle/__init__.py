"""The use cases: what a person or an agent can ask for. Each leaves the ledger in a state that the next call finishes."""
