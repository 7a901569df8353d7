"""Define the base class for event bodies. A body has a kind, a version, and optionally a new state for its subject."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from gpuwarden.core.reasons import Code, Reason, known_code


class StoredReason(BaseModel):
    """A stored reason with its code and parameters. A code written by a later version may be unknown."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    code: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class Body(BaseModel):
    """Base class for all event bodies. `why` is a sentence for display. `reason` is the same reason as a code with
    parameters.

    A subclass sets `event`, its kind in the ledger, and `MOVES_TO`, the new state of its subject, if any.
    Fields that may be missing in an older ledger have defaults. If the meaning of a field changes, `VERSION` must be
    increased and `upcast` must be extended.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True, defer_build=True)

    VERSION: ClassVar[int] = 1
    MOVES_TO: ClassVar[StrEnum | None] = None

    why: str = ""
    reason: StoredReason | None = None

    @property
    def gist(self) -> str:
        """Return a short description of this event for a timeline."""
        return str(self.why or getattr(self, "verdict", "") or getattr(self, "by", ""))

    @property
    def reason_code(self) -> Code | None:
        """Return the reason's code; None if no code was recorded or this version does not know it."""
        return known_code(self.reason.code) if self.reason else None

    def because(self, reason: Reason) -> Self:
        """Return a copy of this event with a reason, both as a code and as a sentence."""
        stored = StoredReason(code=str(reason.code), parameters=dict(reason.parameters))
        return self.model_copy(update={"why": reason.text, "reason": stored})

    @classmethod
    def kind(cls) -> str:
        """Return the kind under which this event is stored."""
        return str(cls.model_fields["event"].default)

    @classmethod
    def upcast(cls, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Convert a stored body from an older version to the current version."""
        return body

    def stored(self) -> dict[str, Any]:
        """Return the stored form of the body: the JSON values of the fields that were set explicitly."""
        whole = self.model_dump(mode="json", by_alias=True, exclude={"event"})
        given = {
            f.serialization_alias or name
            for name, f in type(self).model_fields.items()
            if name in self.model_fields_set
        }
        return {name: value for name, value in whole.items() if name in given}


class Unrecognized(Body):
    """An event of an unknown kind. It is exported and counted but does not change any record."""
