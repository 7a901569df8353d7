"""Find out whether a ledger is the whole record: against its head file, and against what else its folder keeps."""

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
    """Why a ledger may not tell the whole. `parameters` depend on the code.

    `moved`: another file, or none, is at the path that was opened. `truncated`: {recorded, found} numbers of the last
    event. `replaced`: {seq} event differs from the one recorded. `lost`: {beside} the ledger began, or is empty,
    beside the traces of earlier jobs. `read_only`, `behind`: {why} it can't be written; newest events may be missing.
    """

    code: Code
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def incomplete(self) -> bool:
        """Return whether events are missing or were replaced, so that unknown machines may bill."""
        return self.code != "read_only"

    @property
    def message(self) -> str:
        """Return what is known, on one line."""
        return line(_MESSAGES[self.code].format_map(self.parameters), 400)

    @property
    def hint(self) -> str:
        """Return what to do next."""
        return _HINTS.get(self.code, _LOOK)


_MESSAGES: Final[dict[Code, str]] = {
    "moved": "the ledger was moved, removed or replaced while it was open",
    "truncated": "events are missing from the ledger: {recorded} were recorded and {found} are there",
    "replaced": "the ledger is not the one that was written here: event {seq} differs from the one recorded",
    "lost": "the ledger is new or empty, and jobs were submitted from here before (see {beside})",
    "behind": "the ledger can't be written ({why}), and its newest events can't be read",
    "read_only": "the ledger can't be written ({why}); nothing new is recorded",
}
_LOOK: Final = (
    "Look at every platform's console: machines may be billing that this ledger does not know. Bring a copy of the "
    "ledger back; when none exists and the consoles are clear, remove ledger.head beside it to go on with this one."
)
_HINTS: Final[dict[Code, str]] = {
    "moved": "Bring the file back, then start gpuwarden again. Machines may be billing; see the platforms' consoles.",
    "behind": "Free some disk space, then look again. Machines may be billing; see the platforms' consoles.",
    "read_only": "Free some disk space, or check the permissions of its folder.",
}


def trouble_of(db: Database, file: HeadFile) -> Trouble | None:
    """Compare a ledger with its recorded head. The head is read first: it is never ahead of the ledger."""
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
