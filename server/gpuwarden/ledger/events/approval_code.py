"""Events for one-time codes. A terminal shows a code, which the user enters in the browser to approve a request."""

from __future__ import annotations

from typing import Literal

from gpuwarden.ledger.events.base import Body


class ApprovalCodeMade(Body):
    """A terminal showed the user a code that is valid for the facts with this `digest` and for one browser `session`.

    `code` is a slow, salted hash of the code. The code itself is not stored.
    """

    event: Literal["approval_code.made"] = "approval_code.made"
    code: str
    digest: str
    session: str
    expires_at: float
    by: str = ""


class ApprovalCodeWrong(Body):
    """A wrong code was entered in the browser. `made` is the number of the event that recorded the expected code."""

    event: Literal["approval_code.wrong"] = "approval_code.wrong"
    made: int


class ApprovalCodeUsed(Body):
    """The correct code was entered in the browser. The event's token ensures that this happens only once."""

    event: Literal["approval_code.used"] = "approval_code.used"
    digest: str
