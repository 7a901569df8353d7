"""Events of one-time codes: a terminal shows a code, and the user enters it in the browser to approve there."""

from __future__ import annotations

from typing import Literal

from gpuwarden.ledger.events.base import Body


class ApprovalCodeMade(Body):
    """A terminal showed the user a code for the facts of `digest` and one browser `session`.

    `code` is the salted, slow hash of the code: the code itself is not stored.
    """

    event: Literal["approval_code.made"] = "approval_code.made"
    code: str
    digest: str
    session: str
    expires_at: float
    by: str = ""


class ApprovalCodeWrong(Body):
    """The browser session sent a wrong code. `made` is the number of the event that recorded the expected code."""

    event: Literal["approval_code.wrong"] = "approval_code.wrong"
    made: int


class ApprovalCodeUsed(Body):
    """The browser session sent the correct code; the token allows that once."""

    event: Literal["approval_code.used"] = "approval_code.used"
    digest: str
