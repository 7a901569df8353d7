"""Define a ledger event and its typed body."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from gpuwarden.ledger.events import Body, decode
from gpuwarden.ledger.failures import damaged

B_co = TypeVar("B_co", bound=Body, covariant=True)


@dataclass(frozen=True)
class Event(Generic[B_co]):
    """One ledger event. Its fields are the stored columns. Other packages read the body only through `data`."""

    seq: int
    at: float
    subject: str
    kind: str
    version: int
    state: str | None
    token: str | None
    actor: str
    text: str

    @cached_property
    def body(self) -> dict[str, Any]:
        """Return the body in its stored and exported format."""
        try:
            value = json.loads(self.text)
        except ValueError as error:
            raise damaged(f"event {self.seq} of {self.subject}", error) from error
        if not isinstance(value, dict):
            raise damaged(f"event {self.seq} of {self.subject}", "it is not a JSON object")
        return value

    @cached_property
    def data(self) -> B_co:
        """Return the body as a model. Raises `LedgerError` if the body is invalid."""
        try:
            return cast("B_co", decode(self.kind, self.version, self.body))
        except ValueError as error:
            raise damaged(f"event {self.seq} of {self.subject}", type(error).__name__) from error

    def as_dict(self) -> dict[str, Any]:
        """Return the event as a JSON object, for an export."""
        return {
            "seq": self.seq,
            "at": self.at,
            "subject": self.subject,
            "kind": self.kind,
            "state": self.state,
            "actor": self.actor,
            "body": self.body,
        }
