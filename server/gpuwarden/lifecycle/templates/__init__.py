"""Fill, write and feed the shipped trainers: settings from the Hub's metadata, rows in the form that they read."""
