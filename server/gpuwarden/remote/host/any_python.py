"""Start Python on a host that has not been probed yet: a shell on the host finds an interpreter that is new enough.

`host_info` finds the same interpreter, but requires another round trip and starts every Python on the host.
"""

from __future__ import annotations

from typing import Final

from gpuwarden.core.errors import NotSupported
from gpuwarden.remote.ssh.shell_quote import quote

ANY_PYTHON: Final = ""
"""Pass this as the interpreter's path to use any Python that is found."""
NO_PYTHON: Final = 95
"""The exit code if no Python is found."""
OLDEST: Final = (3, 8)
PLACES: Final = (
    "python3 python /opt/conda/bin/python $HOME/miniconda3/bin/python /venv/main/bin/python "
    "/usr/local/bin/python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8"
)
"""Names and paths of Python in common images, in order of preference."""

# Container images add their Python to the PATH of process 1, which SSH sessions do not inherit.
MORE_PATH: Final = r"""
first=$( (tr '\0' '\n' < /proc/1/environ | sed -n 's/^PATH=//p') 2>/dev/null)
""".strip()

# Runs the program, or exits with 96 if this Python is too old for it. A Python without the `-I` option is even older
# and exits with 2.
_GATE: Final = f"import sys; sys.version_info < {OLDEST} and sys.exit(96); exec(sys.argv.pop(1))"
_START: Final = rf"""
start() {{
  python=$(command -v "$1" 2>/dev/null) || return
  shift
  "$python" -I -S -c {quote(_GATE)} "$@"
  code=$?
  case $code in 2 | 96 | 126 | 127) ;; *) exit $code ;; esac
}}
start python3 "$@"
{MORE_PATH}
PATH="$PATH:$first:$HOME/.local/bin"
for place in {PLACES}; do start "$place" "$@"; done
exit {NO_PYTHON}
""".strip()


def python_command(python: str, source: str, *args: str) -> list[str]:
    """Return the command line that runs a program with `python` or, if that is empty, with any Python that is found.

    The program may use only the standard library.
    """
    return [python, "-I", "-S", "-c", source, *args] if python else ["/bin/sh", "-c", _START, "sh", source, *args]


def no_python(found: str = "none") -> NotSupported:
    """Return the error for a host without Python, or with a Python that is too old for the runner."""
    return NotSupported(
        f"the runner requires Python 3.8 or newer on the machine (found: {found})",
        "Choose an image with Python, or install python3 on the machine.",
    )
