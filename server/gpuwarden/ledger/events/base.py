"""Define the base class of event bodies, with a kind, a version, and the state to which an event moves its subject."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field

from gpuwarden.core.reasons import Code, Reason, known_code


class Because(BaseModel):
    """A stored reason with its code and parameters. A later version may have written the code."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    code: str
    parameters: dict[str, Any] = Field(default_factory=dict)


class Body(BaseModel):
    """Base class of all event bodies. `why` is a sentence that is only displayed. `reason` is the same reason as a code
    with parameters.

    A subclass sets `event`, its kind in the ledger, and `MOVES_TO`, the state to which it moves its subject.
    Fields that may be missing in an older ledger have defaults. If the meaning of a field changes, `VERSION` must be
    increased and `upcast` extended.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, populate_by_name=True, defer_build=True)

    VERSION: ClassVar[int] = 1
    MOVES_TO: ClassVar[StrEnum | None] = None

    why: str = ""
    reason: Because | None = None

    @property
    def gist(self) -> str:
        """Return the text for this event in a timeline."""
        return str(self.why or getattr(self, "verdict", "") or getattr(self, "by", ""))

    @property
    def reason_code(self) -> Code | None:
        """Return the code of the reason, or None if no code was recorded or the code is unknown in this version."""
        return known_code(self.reason.code) if self.reason else None

    def because(self, reason: Reason) -> Self:
        """Return a copy of this event with a reason, stored as a code and as a sentence."""
        stored = Because(code=str(reason.code), parameters=dict(reason.parameters))
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
        """Return the stored form of the body, which contains the JSON values of the fields that were set explicitly."""
        whole = self.model_dump(mode="json", by_alias=True, exclude={"event"})
        given = {
            f.serialization_alias or name
            for name, f in type(self).model_fields.items()
            if name in self.model_fields_set
        }
        return {name: value for name, value in whole.items() if name in given}


class Unrecognized(Body):
    """An event of an unknown kind. It is exported and counted but does not change any record."""
