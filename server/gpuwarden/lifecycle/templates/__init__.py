"""Fill, write and feed the shipped trainers: settings from a look at the Hub, rows in the form that they read."""
