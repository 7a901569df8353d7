"""Record the policy file in use, next to the ledger, and build notices if a variable names another file.

An environment variable can name any file, and the program that starts a process sets its variables. The file is
therefore recorded at first use, and it stays active until the user accepts another file at a terminal (`gpuwarden
policy use`).

A new ledger has no record. It uses the record of the account's usual ledger, if that ledger has one. Without this, a
variable that names an empty folder would reset both the policy and today's spending. The usual ledger is also compared
with the ledgers that this account's servers have used, because a client may drop the variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import platformdirs

from gpuwarden.core.errors import LedgerError
from gpuwarden.core.guidance import Action, NextStep, do
from gpuwarden.core.models import Frozen
from gpuwarden.core.policy import Policy
from gpuwarden.core.sanitize import line
from gpuwarden.private import write_private
from gpuwarden.running_servers import known_homes

RECORD: Final = "policy.json"
"""Name of the record in the ledger folder."""
WRONG_PINS: Final = "wrong_pins"
"""Name of the file with the times of wrong PINs, in the policy file's folder."""


@dataclass(frozen=True)
class Notice:
    """A notice about the policy, the ledger or the watch, which replies show to the user.

    - `looser`, `file_only`: the variable `name` is ignored, and the setting `about` keeps the value `kept`.
    - `other_policy`: a variable names the policy file `name`, but the file `kept` is active.
    - `other_ledger`: a variable names the ledger folder `name`, but the usual folder is `kept`.
    - `unnamed_ledger`: no variable names a folder, so the ledger is in `name`. This account uses the ledger in `kept`,
      and the policy `about` is active.
    - `other_server`: the server `name` uses the ledger in `kept` and the policy `about`.
    - `broken`: the policy can't be read at present; `name` is the error.
    - `unwatched`: automatic teardown is on, but no watch is running.
    """

    kind: Literal[
        "looser", "file_only", "other_policy", "other_ledger", "unnamed_ledger", "other_server", "broken", "unwatched"
    ]
    name: str
    kept: str = ""
    about: str = ""
    may: str = ""

    @property
    def question(self) -> str:
        """Return the reason why all spending needs approval; empty if the notice is only a warning."""
        if self.kind == "other_policy":
            return f"a variable names a policy file other than the recorded file: {line(self.name, 200)}"
        if self.kind == "other_ledger":
            return f"a variable names a ledger other than the usual ledger: {line(self.name, 200)}"
        if self.kind == "unnamed_ledger":
            return f"no ledger folder is set, but this account uses the ledger in {line(self.kept, 200)}"
        return ""

    @property
    def text(self) -> str:
        """Return the warning: the problem, the active policy or ledger, and the consequence."""
        name, kept = line(self.name, 200), line(self.kept, 200)
        if self.kind == "looser":
            return f"{name} is ignored: a variable may only {self.may} {self.about}. The policy file's value is {kept}."
        if self.kind == "file_only":
            return f"{name} is ignored: only the policy file sets {self.about}."
        if self.kind == "other_policy":
            return (
                f"A variable names the policy file {name}, but the recorded file {kept} stays active. All spending "
                "needs approval until the user accepts the new file."
            )
        if self.kind == "broken":
            return f"Launches, approvals and automatic teardown are suspended: {name}."
        if self.kind == "unwatched":
            return "Automatic teardown is on, but no watch is running: machines are still billed after their jobs end."
        if self.kind == "other_server":
            return f"{name} uses another ledger: {kept}, with the policy {line(self.about, 200)}."
        if self.kind == "unnamed_ledger":
            return (
                f"GPUWARDEN_HOME is not set in this process, so the ledger is in {name}. This account uses the ledger "
                f"in {kept}. The active policy is {line(self.about, 200)}, and all spending needs approval."
            )
        return (
            f"This account's ledger is in {kept}, but this process uses the one in {name}. All spending needs approval "
            "until the user accepts the new ledger."
        )

    @property
    def next_steps(self) -> tuple[NextStep, ...]:
        """Return the steps to accept another policy file or ledger, or to start a watch; empty for other notices."""
        if self.kind == "unwatched":
            return (do(Action.WATCH, install=True),)
        if self.kind == "other_policy":
            return (do(Action.USE_POLICY, file=self.name),)
        if self.kind == "unnamed_ledger":
            return (
                do(Action.SETUP, "so that the client passes GPUWARDEN_HOME to the server"),
                do(Action.USE_POLICY, alternative=True),
            )
        return (do(Action.USE_POLICY),) if self.kind == "other_ledger" else ()


@dataclass(frozen=True)
class ActivePolicy:
    """The policy at one moment, its file, the digest of that file's text, and the notices about it.

    Without a file, the digest is computed from the policy's values.
    """

    policy: Policy
    digest: str
    notices: tuple[Notice, ...] = ()
    file: Path | None = None


class Record(Frozen):
    """The policy file in use, the digest of its text, and the time of the record.

    `chosen`: the user accepted the file; otherwise it was recorded at first use.
    """

    path: str
    digest: str
    at: float
    chosen: bool = False


@dataclass(frozen=True)
class PolicyStatus:
    """The active policy file, the ledger's own record if it has one, and the notices."""

    file: Path
    own: Record | None = None
    notices: tuple[Notice, ...] = ()


def decide(home: Path, named: Path | None, default: Path) -> PolicyStatus:
    """Choose the policy file for the ledger in `home`.

    `named` is the file that a variable names, `default` the usual file. Raises LedgerError if the record can't be read.
    """
    own = read_record(home)
    here = absolute(home)
    others = [] if own else [other for other in usual_homes() if other != here]
    usual = next(((other, found) for other in others if (found := read_record(other)) is not None), None)
    in_use = _in_use(here, own) if usual is None and here in usual_homes() else None
    other = usual or in_use
    record = own or (other[1] if other else None)
    if record is None:
        return PolicyStatus(absolute(named or default))
    follows = record.chosen or (own is None and in_use is not None)
    wanted = absolute(named or (Path(record.path) if follows else default))
    notices = []
    if os.path.normcase(wanted) != os.path.normcase(record.path):
        notices.append(Notice("other_policy", str(wanted), record.path))
    if other:
        kind: Literal["other_ledger", "unnamed_ledger"] = "other_ledger" if usual else "unnamed_ledger"
        notices.append(Notice(kind, str(here), str(other[0]), about=record.path))
    return PolicyStatus(Path(record.path), own, tuple(notices))


def _in_use(here: Path, own: Record | None) -> tuple[Path, Record] | None:
    """Return the ledger that this account used last, and its record, if it takes precedence over the ledger `here`.

    The other ledger takes precedence if the ledger `here` has no record, or if the other's policy was chosen later.
    """
    for home in known_homes():
        with contextlib.suppress(LedgerError):
            found = read_record(home) if home != here else None
            if found and (own is None or (found.chosen and found.at > own.at)):
                return home, found
    return None


def absolute(path: Path) -> Path:
    """Make a path absolute without following links, because notes and profiles are next to the named file."""
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - resolve() would follow links


def digest_of(content: bytes) -> str:
    """Return the digest to record for a policy file; an absent file counts as empty."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def read_record(home: Path) -> Record | None:
    """Read the record next to a ledger; None if no record exists. Raises LedgerError if it can't be read."""
    file = home / RECORD
    try:
        return Record.model_validate_json(file.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise LedgerError(
            f"the record of the policy in use can't be read: {file}",
            "Remove that file; the policy file in use is then recorded again.",
        ) from error


def write_record(home: Path, record: Record) -> None:
    """Replace the record next to a ledger, with mode 0600. Raises LedgerError."""
    try:
        write_private(home / RECORD, record.model_dump_json())
    except OSError as error:
        raise LedgerError(
            f"the policy in use can't be recorded in {home}: {error.strerror or error}",
            "Check its permissions, or set GPUWARDEN_HOME to a folder that you can write to.",
        ) from error


def usual_homes() -> list[Path]:
    """Return the default folders of this account's ledger. A variable can name another folder.

    The second entry comes from the account database, because a client can also set HOME and the XDG variables.
    """
    homes = [absolute(Path(platformdirs.user_data_dir("gpuwarden", appauthor=False)))]
    if (account := account_home()) is not None:
        data = "Library/Application Support" if sys.platform == "darwin" else ".local/share"
        homes.append(account / data / "gpuwarden")
    return list(dict.fromkeys(homes))


def account_home() -> Path | None:
    """Return this account's home folder from the account database; None if the database has no entry."""
    if sys.platform == "win32":
        return None
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container may run under a user id without an account
        return None
