"""Choose settings for the bundled trainers from the Hub's metadata, and convert rows to the form that trainers read."""
