"""List the MCP servers of this account that run now, each with its ledger, its policy file and its version.

A client may drop the variables that name the ledger and the policy. Its server then works with another ledger than the
one that a person looks at, and a ticket made there can't be found here. So each server enters itself into a folder of
the account that no GPUWARDEN variable moves. An entry is a file that its server locks for as long as it runs. The
kernel releases the lock of a process that ended, and whoever looks next removes the entry.

The homes that servers used stay known after they ended, so that a new ledger is compared with the ones in use.
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
"""Entries that are looked at; an account runs fewer servers."""
MOST_HOMES: Final = 16
MOST_BYTES: Final = 20_000


class ServerEntry(Frozen):
    """One server that runs. `client` is what its configuration says; empty where it says nothing."""

    client: str
    home: str
    policy: str
    version: str
    pid: int

    @property
    def title(self) -> str:
        """Return who the server belongs to, as a person reads it."""
        names = {"claude": "Claude Code", "codex": "Codex", "gemini": "Gemini", "vscode": "VS Code"}
        name = names.get(self.client, line(self.client, 40).capitalize())
        return f"{name}'s server" if name else f"The server of process {self.pid}"


class HomeEntry(Frozen):
    """A folder whose ledger a server used."""

    home: str


def folder() -> Path:
    """Return the folder of the entries, in the account's state folder."""
    return Path(platformdirs.user_state_dir("gpuwarden", appauthor=False)) / "servers"


@contextmanager
def entered(client: str, home: Path, policy: Path) -> Iterator[None]:
    """List this process as a server for as long as the context is open.

    A folder that can't be written lists none; nor does a path that is not text.
    """
    from filelock import FileLock, Timeout

    from gpuwarden import __version__

    entry = ServerEntry(client=client[:40], home=str(home), policy=str(policy), version=__version__, pid=os.getpid())
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, Timeout, ValueError):
            running()  # removes what ended servers left
            name = private_folder(folder()) / os.urandom(8).hex()
            stack.callback(_remove, name)
            stack.enter_context(FileLock(name.with_suffix(".lock"), mode=0o600).acquire(blocking=False))
            write_private(name.with_suffix(".json"), entry.model_dump_json())
            remember(home)
        yield


def running() -> list[ServerEntry]:
    """Return the servers that run, the oldest first, and remove the entries of those that ended."""
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
        except OSError:  # a folder that can't be written
            continue
    return found


def elsewhere(home: Path, policy: Path) -> list[ServerEntry]:
    """Return the servers that run with another ledger or another policy file than these."""
    here = (os.path.normcase(home), os.path.normcase(policy))
    return [s for s in running() if (os.path.normcase(s.home), os.path.normcase(s.policy)) != here]


def remember(home: Path) -> None:
    """Note a folder whose ledger is in use. Raises OSError."""
    file = private_folder(folder() / "homes") / f"{hashlib.sha256(str(home).encode()).hexdigest()[:16]}.json"
    if file.exists():
        os.utime(file, (now := time.time(), now))
    else:
        write_private(file, HomeEntry(home=str(home)).model_dump_json())
    for old in _newest(file.parent, 10 * MOST_HOMES)[MOST_HOMES:]:
        old.unlink(missing_ok=True)


def known_homes() -> list[Path]:
    """Return the folders whose ledgers servers used, the latest first."""
    found = []
    for file in _newest(folder() / "homes", MOST_HOMES):
        with contextlib.suppress(OSError, ValidationError):
            found.append(Path(HomeEntry.model_validate_json(_text(file)).home))
    return found


def _newest(where: Path, most: int) -> list[Path]:
    """Return the entries of a folder by the time at which they were written, the latest first, bounded.

    A link, a pipe and another account's file are not entries. One that is removed meanwhile hides no other.
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
