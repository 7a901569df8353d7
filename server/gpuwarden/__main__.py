"""Entry point for the `gpuwarden` command and `python -m gpuwarden`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    import gc

    gc.set_threshold(300_000, 20, 20)  # imported objects are never freed; scanning them took 20 % of the time
    from gpuwarden.interfaces.cli.main import run

    code = run()
    gc.freeze()  # the garbage collection at exit would take another 20 %
    sys.exit(code)


if __name__ == "__main__":
    main()
