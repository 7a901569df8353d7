"""Report an unexpected exception: the modules and line numbers in its traceback, then the usual traceback."""

from __future__ import annotations

import sys
from typing import Any

HEADING = "# module: "  # precedes each module in the bundle


def report_crash(kind: Any, error: Any, trace: Any) -> None:
    """Print a traceback; used as `sys.excepthook`. Bundle lines are shown as module lines, such as `log.py:17`."""
    import linecache
    import traceback

    lines = linecache.getlines(__file__)
    steps = [module_line(lines, at) for frame, at in traceback.walk_tb(trace) if frame.f_code.co_filename == __file__]
    sys.stderr.write("".join(f"in {step}\n" for step in steps))
    sys.__excepthook__(kind, error, trace)


def module_line(lines: list[str], number: int) -> str:
    """Return the module that contains a line, and the line's number in that module, such as `log.py:17`."""
    for top in range(min(number, len(lines)), 0, -1):
        if lines[top - 1].startswith(HEADING):
            return f"{lines[top - 1][len(HEADING) :].strip()}.py:{number - top}"
    return f"line {number}"
