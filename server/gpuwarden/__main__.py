"""`python -m gpuwarden`, and the entry point of the command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    import gc

    gc.set_threshold(300_000, 20, 20)  # imports make objects that stay: looking through them took a fifth of a command
    from gpuwarden.interfaces.cli.main import run

    code = run()
    gc.freeze()  # the interpreter's last collection would look through them too: a fifth of a command again
    sys.exit(code)


if __name__ == "__main__":
    main()
