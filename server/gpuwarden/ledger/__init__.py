"""The append-only record that everything else is a view of."""
