"""`python -m gpuwarden`, and the entry point of the command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    from gpuwarden.interfaces.cli.main import run

    sys.exit(run())


if __name__ == "__main__":
    main()
