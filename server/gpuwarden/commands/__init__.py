"""The commands, a file a family. Each adds its own to the group in base.py."""
