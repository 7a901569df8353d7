"""Code that rents and releases instances and reads the meter, one file per provider."""
