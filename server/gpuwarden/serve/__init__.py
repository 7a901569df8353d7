"""The doors that agents and people come through."""
