"""Keep all processes of a rehearsal under one process, and kill them when the rehearsal ends.

    python -I -S keeper.py COMMAND...

Uses only the standard library. Landlock has no PID namespace, so a process in a new session would outlive the
rehearsal.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> NoReturn:
    """Run a command. Kill its descendants when it ends, on SIGTERM, or when the parent process ends."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: end_all())
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.execv(command[0], command)  # noqa: S606
    while os.waitpid(-1, 0)[0] != child:
        pass
    end_all()


def end_all() -> NoReturn:
    """Kill child processes until none is left. A killed process's children are reparented to this process."""
    own = str(os.getpid())
    while True:
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):  # not a process, or the process has exited
                parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1].decode()
                if parent == own:
                    os.kill(int(folder.name), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
