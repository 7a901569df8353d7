"""Fill the shipped trainers with settings from the Hub's metadata, and convert rows to the form that they read."""
