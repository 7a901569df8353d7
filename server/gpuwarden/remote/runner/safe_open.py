"""Open files without following links."""

from __future__ import annotations

import errno
import os
import stat


class SafeOpener:
    """Opens regular files by their real path without following links.

    The last folder is kept open, because manifests list files folder by folder.
    """

    def __init__(self) -> None:
        self.folder, self.at = "", -1

    def open(self, real: str) -> int:
        """Open one file; return its descriptor."""
        return self.open_in(*os.path.split(real))

    def open_in(self, folder: str, name: str) -> int:
        """Open one file in a folder, given by its real path; return its descriptor."""
        if folder != self.folder or self.at < 0:
            at = open_folder(folder)
            self.close()
            self.folder, self.at = folder, at
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", folder + "/" + name)
        return fd

    def close(self) -> None:
        """Close the folder."""
        if self.at >= 0:
            os.close(self.at)
            self.at = -1


def open_folder(real: str) -> int:
    """Open a folder by its real path without following links; return its descriptor."""
    step = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
    at = os.open("/", step)
    try:
        for part in real.split("/"):
            if part:
                nearer = os.open(part, step, dir_fd=at)
                os.close(at)
                at = nearer
    except OSError:
        os.close(at)
        raise
    return at
