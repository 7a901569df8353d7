"""Work on remote machines: ship and launch the runner, and copy files there and back."""
