"""Copy a command's output from the pipe to the log."""

from __future__ import annotations

import os
from typing import Callable

from gpuwarden.remote.runner.log import Log
from gpuwarden.remote.runner.redact import Redactor


class Output:
    """Copies output from the pipe to the log and masks secrets. `read` is called with each piece."""

    def __init__(self, log: Log, redactor: Redactor, read: Callable[[bytes], None]) -> None:
        self.log, self.redactor, self.read = log, redactor, read
        self.pipe = -1

    def copy(self, times: int) -> bool:
        """Copy up to `times` pieces of output to the log; return whether any was copied."""
        came = False
        for _ in range(times):
            try:
                data = os.read(self.pipe, 1 << 16)
            except OSError:
                break  # no more output yet
            if not data:
                self.close()
                break
            self._pass_on(self.redactor.feed(data))
            came = True
        return came

    def drain(self) -> bool:
        """Copy the remaining output, and close the pipe, because another process may keep the other end open.

        Return whether output was copied.
        """
        came = self.pipe >= 0 and self.copy(64)
        self.close()
        self._pass_on(self.redactor.finish())
        self.read(b"\n")  # the last line may have no newline
        return came

    def _pass_on(self, data: bytes) -> None:
        self.log.write(data)
        self.read(data)

    def close(self) -> None:
        """Close the pipe."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
