"""Check whether a ledger is complete, based on its head file and the other files in its folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from gpuwarden.core.sanitize import line
from gpuwarden.ledger.chain import HeadFile
from gpuwarden.ledger.database import Database
from gpuwarden.ledger.traces import traces

Code = Literal["moved", "truncated", "replaced", "lost", "read_only", "behind"]


@dataclass(frozen=True)
class Trouble:
    """An integrity problem with a ledger. `parameters` depends on `code`.

    `moved`: the file at the path is missing or is a different file. `truncated`: the last event has the number `found`,
    but the head file contains the higher number `recorded`. `replaced`: the event with the number `seq` differs from
    the one in the head file. `lost`: the ledger is empty or new, but its folder contains files from earlier jobs,
    which `beside` lists. `read_only` and `behind`: the ledger can't be written to, for the reason `why`; if `behind`,
    the newest events may also be missing.
    """

    code: Code
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def incomplete(self) -> bool:
        """Return whether events may be missing or replaced. Machines that are not in the ledger may then be billed."""
        return self.code != "read_only"

    @property
    def message(self) -> str:
        """Return a one-line description of the problem."""
        return line(_MESSAGES[self.code].format_map(self.parameters), 400)

    @property
    def hint(self) -> str:
        """Return the next step for the user."""
        return _HINTS.get(self.code, _LOOK)


_MESSAGES: Final[dict[Code, str]] = {
    "moved": "the ledger was moved, removed or replaced while it was open",
    "truncated": "events are missing from the ledger: {recorded} were recorded, but it has only {found}",
    "replaced": "the ledger was replaced by another one: event {seq} differs from the recorded event",
    "lost": "the ledger is new or empty, but earlier jobs left files in its folder (see {beside})",
    "behind": "the ledger can't be written ({why}), and its newest events can't be read",
    "read_only": "the ledger can't be written ({why}); no events are recorded",
}
_LOOK: Final = (
    "Check every platform's console: machines that this ledger does not list may be billed. Restore a backup of the "
    "ledger. If you have none and the consoles show no machine, remove the file ledger.head next to the ledger to "
    "continue with this ledger."
)
_HINTS: Final[dict[Code, str]] = {
    "moved": "Restore the file, then restart gpuwarden. Machines may be billed; check the platforms' consoles.",
    "behind": "Free some disk space, then try again. Machines may be billed; check the platforms' consoles.",
    "read_only": "Free some disk space, or check the permissions of the ledger's folder.",
}


def integrity_problem(db: Database, file: HeadFile) -> Trouble | None:
    """Return a ledger's integrity problem, or None. The head is read before the events, so it is not newer."""
    if not db.in_place():
        return Trouble("moved")
    head, home = file.read(), file.path.parent
    ((last,),) = db.rows("SELECT coalesce(max(seq), 0) FROM events")
    if (head is not None and head.lost) or (last == 0 and head is None and traces(home)):
        return Trouble("lost", {"beside": ", ".join(traces(home))})
    if db.behind:
        return Trouble("behind", {"why": db.readable_only or ""})
    if head is not None and head.seq > last:
        return Trouble("truncated", {"recorded": str(head.seq), "found": str(last)})
    if head is not None and head.seq and db.rows("SELECT hash FROM events WHERE seq = ?", head.seq) != [(head.hash,)]:
        return Trouble("replaced", {"seq": str(head.seq)})
    if db.readable_only is not None:
        return Trouble("read_only", {"why": db.readable_only})
    return None
