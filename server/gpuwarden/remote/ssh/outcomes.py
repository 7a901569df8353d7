"""The outcome of a remote command: its output and exit code, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuwarden.core.errors import BadReply
from gpuwarden.remote.ssh.config import Endpoint


class NoShell(BadReply):
    """The account can't run commands: it has a forced command or a restricted shell, or allows only file transfer."""

    def __init__(self, endpoint: Endpoint, message: str, *, only_files: bool) -> None:
        if only_files:
            super().__init__(
                f"the account {endpoint} allows only file transfer (SFTP), so no job can run",
                "Use an account with a shell, or remove `ForceCommand internal-sftp` for this account.",
            )
        else:
            super().__init__(
                f"{endpoint} did not start the command; its shell printed: {message or 'nothing'}",
                "Check the login shell: a forced command, a restricted shell (rbash, git-shell, nologin) or an rc file "
                "that prints a lot of output prevents commands from running.",
            )


class CommandFailed(BadReply):
    """A remote command ended with a nonzero exit code, or was ended by a signal (`exit_code` is None)."""

    def __init__(self, argv: Sequence[str], code: int | None, err: bytes) -> None:
        self.exit_code = code
        self.err = err
        how = f"exit code {code}" if code is not None else "a signal"
        tail = err.decode("utf-8", "replace").strip()[-500:]
        super().__init__(f"{argv[0]} on the machine ended with {how}: {tail or 'no output'}")


@dataclass(frozen=True)
class CommandResult:
    """The result of a command. `code` is None if a signal ended it; `err` is the beginning of stderr."""

    code: int | None
    out: bytes
    err: bytes
