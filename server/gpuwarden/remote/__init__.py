"""Upload and launch the runner on remote machines, and copy files in both directions."""
