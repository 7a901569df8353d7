"""Run the runner from its source modules, for jobs on this machine: `python -I -S .../remote/runner VERB [DIR]`."""

from __future__ import annotations

import os
import sys
from types import ModuleType

PACKAGE = "gpuwarden.remote.runner"


def run() -> None:
    """Import the modules without their parent packages, because importing those takes longer than running a command."""
    package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.path.pop(0)  # remove this folder, so that an import can't find a module here by its short name
    from gpuwarden.remote.runner.verbs import main

    main(sys.argv[1:])


if __name__ == "__main__":
    run()
