"""Choose settings for the shipped trainers from the Hub's metadata, and convert rows to the form that trainers read."""
