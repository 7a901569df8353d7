"""Work on remote machines: upload and launch the runner, and copy files in both directions."""
