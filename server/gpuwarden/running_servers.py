"""List this account's running servers, each with its ledger, policy file and version.

A client may drop the variables that set the ledger and policy paths. Its server then uses a different ledger than the
user's shell, and the shell can't find the server's tickets. Therefore each server registers itself in an account folder
whose path does not depend on any GPUWARDEN variable. An entry is a file that the server locks while it is running. The
kernel releases the lock when the process ends, and the next listing removes the entry.

The ledger folders of servers that have ended are remembered, so that a new ledger can be compared with those in use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import platformdirs
from pydantic import ValidationError

from gpuwarden.core.models import Frozen
from gpuwarden.core.sanitize import line
from gpuwarden.private import private_folder, write_private

MOST: Final = 64
"""Maximum number of entries read. An account is expected to run fewer servers."""
MOST_HOMES: Final = 16
MOST_BYTES: Final = 20_000


class ServerEntry(Frozen):
    """A running server. `client` is the name in the client's configuration; empty if there is none."""

    client: str
    home: str
    policy: str
    version: str
    pid: int

    @property
    def title(self) -> str:
        """Return a display name: the server's client, or its process id."""
        if self.client == "http":
            return "The HTTP server"
        names = {"claude": "Claude Code", "codex": "Codex", "gemini": "Gemini", "vscode": "VS Code"}
        name = names.get(self.client, line(self.client, 40).capitalize())
        return f"{name}'s server" if name else f"The server with process id {self.pid}"


class HomeEntry(Frozen):
    """A folder with a ledger that a server has used."""

    home: str


def folder() -> Path:
    """Return the folder that contains the entries, in the account's state folder."""
    return Path(platformdirs.user_state_dir("gpuwarden", appauthor=False)) / "servers"


@contextmanager
def entered(client: str, home: Path, policy: Path) -> Iterator[None]:
    """Register this process as a server while the context is open.

    If the folder is not writable or a path is not valid Unicode, the process is not registered.
    """
    from filelock import FileLock, Timeout

    from gpuwarden import __version__

    entry = ServerEntry(client=client[:40], home=str(home), policy=str(policy), version=__version__, pid=os.getpid())
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, Timeout, ValueError):
            running()  # removes the entries of ended servers
            name = private_folder(folder()) / os.urandom(8).hex()
            stack.callback(_remove, name)
            stack.enter_context(FileLock(name.with_suffix(".lock"), mode=0o600).acquire(blocking=False))
            write_private(name.with_suffix(".json"), entry.model_dump_json())
            remember(home)
        yield


def running() -> list[ServerEntry]:
    """Return the running servers, oldest first, and remove the entries of ended servers."""
    files = _newest(folder(), MOST)[::-1]
    if not files:
        return []
    from filelock import FileLock, Timeout

    found = []
    for file in files:
        lock = FileLock(file.with_suffix(".lock"), mode=0o600)
        try:
            with lock.acquire(blocking=False):
                _remove(file)
        except Timeout:
            with contextlib.suppress(OSError, ValidationError):
                found.append(ServerEntry.model_validate_json(_text(file)))
        except OSError:  # the folder is not writable
            continue
    return found


def elsewhere(home: Path, policy: Path) -> list[ServerEntry]:
    """Return the running servers that use a different ledger or policy file."""
    here = (os.path.normcase(home), os.path.normcase(policy))
    return [s for s in running() if (os.path.normcase(s.home), os.path.normcase(s.policy)) != here]


def remember(home: Path) -> None:
    """Record a folder whose ledger is in use. Raises OSError."""
    file = private_folder(folder() / "homes") / f"{hashlib.sha256(str(home).encode()).hexdigest()[:16]}.json"
    if file.exists():
        os.utime(file, (now := time.time(), now))
    else:
        write_private(file, HomeEntry(home=str(home)).model_dump_json())
    for old in _newest(file.parent, 10 * MOST_HOMES)[MOST_HOMES:]:
        old.unlink(missing_ok=True)


def known_homes() -> list[Path]:
    """Return the folders of the ledgers that servers have used, most recent first."""
    found = []
    for file in _newest(folder() / "homes", MOST_HOMES):
        with contextlib.suppress(OSError, ValidationError):
            found.append(Path(HomeEntry.model_validate_json(_text(file)).home))
    return found


def _newest(where: Path, most: int) -> list[Path]:
    """Return up to `most` entries in a folder, sorted by modification time, newest first.

    Links, pipes and files owned by other accounts are not entries. Entries removed in the meantime are skipped.
    """
    dated = []
    with contextlib.suppress(OSError), os.scandir(where) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                own = os.name != "posix" or info.st_uid == os.geteuid()
                if own and entry.name.endswith(".json") and stat.S_ISREG(info.st_mode):
                    dated.append((info.st_mtime_ns, entry.path))
    return [Path(path) for _, path in sorted(dated, reverse=True)[:most]]


def _text(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MOST_BYTES)


def _remove(name: Path) -> None:
    for suffix in (".json", ".lock"):
        with contextlib.suppress(OSError):
            name.with_suffix(suffix).unlink(missing_ok=True)
