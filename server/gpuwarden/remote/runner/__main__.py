"""Runs the rooms where they lie, for jobs of this machine: `python -I -S .../remote/runner VERB [DIR]`."""

from __future__ import annotations

import os
import sys
from types import ModuleType

PACKAGE = "gpuwarden.remote.runner"


def run() -> None:
    """Import the rooms and none of the packages above them, which take longer than a verb does."""
    rooms = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    rooms.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.path.pop(0)  # the same folder: a plain `import post` must not find a room
    from gpuwarden.remote.runner.verbs import main

    main(sys.argv[1:])


if __name__ == "__main__":
    run()
