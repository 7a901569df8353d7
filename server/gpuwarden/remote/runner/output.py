"""A command's output, on its way from the pipe to the log."""

from __future__ import annotations

import os
from typing import Callable

from gpuwarden.remote.runner.log import Log
from gpuwarden.remote.runner.redact import Redactor


class Output:
    """Move output from the pipe to the log, with secrets masked. `read` is handed each piece."""

    def __init__(self, log: Log, redactor: Redactor, read: Callable[[bytes], None]) -> None:
        self.log, self.redactor, self.read = log, redactor, read
        self.pipe = -1

    def copy(self, times: int) -> bool:
        """Move output to the log, a bounded number of times; return whether there was any."""
        came = False
        for _ in range(times):
            try:
                data = os.read(self.pipe, 1 << 16)
            except OSError:
                break  # nothing more for now
            if not data:
                self.close()
                break
            self._pass_on(self.redactor.feed(data))
            came = True
        return came

    def drain(self) -> bool:
        """Read the rest of the pipe, which an escaped process may keep open for ever. Return whether anything came."""
        came = self.pipe >= 0 and self.copy(64)
        self.close()
        self._pass_on(self.redactor.finish())
        self.read(b"\n")  # the last line may have no end
        return came

    def _pass_on(self, data: bytes) -> None:
        self.log.write(data)
        self.read(data)

    def close(self) -> None:
        """Close the pipe."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
