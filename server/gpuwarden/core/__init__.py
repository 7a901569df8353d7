"""Pure words and laws: models, states, rules, errors. Standard library and pydantic only; no I/O."""
