"""Pure domain types: models, states, rules, errors. Standard library and pydantic only; no I/O."""
