"""Record which policy file a person uses, beside the ledger, and build the notices for another file.

A variable can name any file, and whoever starts a process sets its variables. So the first use records the file, and
from then on the recorded file stays in force until a person accepts another one at a terminal (`gpuwarden policy use`).
A new ledger has no record. It uses the record of the account's usual ledger where there is one, or a
variable that names an empty folder would forget both the policy and what was spent today. The usual ledger is compared
with those that this account's servers used, or a client that drops the variables would do the same.
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
from gpuwarden.running_servers import known_homes

RECORD: Final = "policy.json"
"""The record's name in the folder of the ledger."""


@dataclass(frozen=True)
class Notice:
    """One notice about the policy for the reader of a reply.

    `looser` and `file_only`: the variable `name` is ignored, and `about` (a setting) stays at `kept`.
    `other_policy`: the file `name` is named and `kept` is in force. `other_ledger`: the folder `name` is named and
    `kept` is the usual one. `unnamed_ledger`: no folder is named, so it is the ledger in `name`, `kept` is the one that
    this account uses, and `about` is the policy in force. `other_server`: the server `name` works with the ledger in
    `kept` and the policy `about`. `broken`: `name` is the error of a policy that can't be read now. `unwatched`:
    automatic teardown is on, and no watch runs.
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
        """Return why a person is asked before anything is spent; empty for a mere warning."""
        if self.kind == "other_policy":
            return f"another policy file is named than the recorded one: {line(self.name, 200)}"
        if self.kind == "other_ledger":
            return f"another ledger is named than the usual one: {line(self.name, 200)}"
        if self.kind == "unnamed_ledger":
            return f"no ledger is named here, and this account uses another one: {line(self.kept, 200)}"
        return ""

    @property
    def text(self) -> str:
        """Return the warning: what happened, what is in force, what to do."""
        name, kept = line(self.name, 200), line(self.kept, 200)
        if self.kind == "looser":
            return f"{name} is ignored: a variable may only {self.may} {self.about}. The policy file has {kept}."
        if self.kind == "file_only":
            return f"{name} is ignored: only the policy file sets {self.about}."
        if self.kind == "other_policy":
            return (
                f"The policy file {name} is named, but {kept} is the recorded one and stays in force. A person "
                "is asked about any spending until one accepts the new file."
            )
        if self.kind == "broken":
            return f"Nothing is launched, approved or ended automatically for now: {name}."
        if self.kind == "unwatched":
            return "Automatic teardown is on, but no watch runs to carry it out: machines bill on after their jobs."
        if self.kind == "other_server":
            return f"{name} uses another ledger: {kept}, with the policy {line(self.about, 200)}."
        if self.kind == "unnamed_ledger":
            return (
                f"GPUWARDEN_HOME did not arrive here, so the ledger is the one in {name}. This account uses the one in "
                f"{kept}. The policy in force is {line(self.about, 200)}, and a person is asked about any spending."
            )
        return (
            f"The ledger in {name} is not the usual one, which is in {kept}. A person is asked about any spending "
            "until one accepts it."
        )

    @property
    def next_steps(self) -> tuple[NextStep, ...]:
        """Return how a person accepts another policy file or another ledger, or starts a watch; else nothing."""
        if self.kind == "unwatched":
            return (do(Action.WATCH, install=True),)
        if self.kind == "other_policy":
            return (do(Action.USE_POLICY, file=self.name),)
        if self.kind == "unnamed_ledger":
            return (do(Action.SETUP, "so that the client passes it on"), do(Action.USE_POLICY, alternative=True))
        return (do(Action.USE_POLICY),) if self.kind == "other_ledger" else ()


@dataclass(frozen=True)
class InForce:
    """The policy at one moment, the file that it comes from with the digest of its text, and the notices about it.

    A policy from no file has the digest of its values.
    """

    policy: Policy
    digest: str
    notices: tuple[Notice, ...] = ()
    file: Path | None = None


class Record(Frozen):
    """The policy file in use, the digest of its text, and since when. `chosen`: by a person, not at first use."""

    path: str
    digest: str
    at: float
    chosen: bool = False


@dataclass(frozen=True)
class Standing:
    """The file in force, the ledger's own record where it has one, and the notices."""

    file: Path
    own: Record | None = None
    notices: tuple[Notice, ...] = ()


def decide(home: Path, named: Path | None, default: Path) -> Standing:
    """Choose the policy file for the ledger in `home`. `named` is what a variable names, `default` the usual place.

    Raises LedgerError for a record that can't be read.
    """
    own = read_record(home)
    here = absolute(home)
    others = [] if own else [other for other in usual_homes() if other != here]
    usual = next(((other, found) for other in others if (found := read_record(other)) is not None), None)
    in_use = _in_use(here, own) if usual is None and here in usual_homes() else None
    other = usual or in_use
    record = own or (other[1] if other else None)
    if record is None:
        return Standing(absolute(named or default))
    follows = record.chosen or (own is None and in_use is not None)
    wanted = absolute(named or (Path(record.path) if follows else default))
    notices = []
    if os.path.normcase(wanted) != os.path.normcase(record.path):
        notices.append(Notice("other_policy", str(wanted), record.path))
    if other:
        kind: Literal["other_ledger", "unnamed_ledger"] = "other_ledger" if usual else "unnamed_ledger"
        notices.append(Notice(kind, str(here), str(other[0]), about=record.path))
    return Standing(Path(record.path), own, tuple(notices))


def _in_use(here: Path, own: Record | None) -> tuple[Path, Record] | None:
    """Return the ledger that this account used last, and its record, unless the one `here` is as good.

    A ledger without a record of its own is new. One with a record is put in doubt by a ledger whose policy a person
    chose later.
    """
    for home in known_homes():
        with contextlib.suppress(LedgerError):
            found = read_record(home) if home != here else None
            if found and (own is None or (found.chosen and found.at > own.at)):
                return home, found
    return None


def absolute(path: Path) -> Path:
    """Make a path absolute by its text. Links are not followed: notes and profiles are read from beside the file."""
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - resolve() would follow links


def digest_of(content: bytes) -> str:
    """Return the digest under which a policy file is recorded; an absent file counts as an empty one."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def read_record(home: Path) -> Record | None:
    """Read the record beside a ledger, None where there is none. Raises LedgerError when it can't be read."""
    file = home / RECORD
    try:
        return Record.model_validate_json(file.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise LedgerError(
            f"the record of the policy in use can't be read: {file}",
            "Remove that file; the policy file that is then in use is recorded again.",
        ) from error


def write_record(home: Path, record: Record) -> None:
    """Replace the record beside a ledger, for the user's eyes only. Raises LedgerError."""
    part = home / f"{RECORD}.{os.getpid()}.part"
    try:
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
            stream.write(record.model_dump_json())
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(home / RECORD)
    except OSError as error:
        raise LedgerError(
            f"the policy in use can't be recorded in {home}: {error.strerror or error}",
            "Check its permissions, or set GPUWARDEN_HOME to a folder that you can write to.",
        ) from error


def usual_homes() -> list[Path]:
    """List where this account's ledger is unless a variable names another place.

    The second entry comes from the account itself, because HOME and the XDG variables can be set by a client too.
    """
    homes = [absolute(Path(platformdirs.user_data_dir("gpuwarden", appauthor=False)))]
    if (account := account_home()) is not None:
        data = "Library/Application Support" if sys.platform == "darwin" else ".local/share"
        homes.append(account / data / "gpuwarden")
    return list(dict.fromkeys(homes))


def account_home() -> Path | None:
    """Return the home folder that the system records for this account; None where it records none."""
    if sys.platform == "win32":
        return None
    import pwd

    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:  # a container may run under a number that has no account
        return None
