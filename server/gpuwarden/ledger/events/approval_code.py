"""Events of one-time codes, with which a person approves on the page what they said yes to at a terminal."""

from __future__ import annotations

from typing import Literal

from gpuwarden.ledger.events.base import Body


class ApprovalCodeMade(Body):
    """A terminal showed a person a code for the facts of `digest` and one browser `session`.

    `code` is its salted, slow hash: the code itself is stored nowhere.
    """

    event: Literal["approval_code.made"] = "approval_code.made"
    code: str
    digest: str
    session: str
    expires_at: float
    by: str = ""


class ApprovalCodeWrong(Body):
    """The browser session of a code sent another one. `made` is the number of the event that the code was made with."""

    event: Literal["approval_code.wrong"] = "approval_code.wrong"
    made: int


class ApprovalCodeUsed(Body):
    """The code came back from its browser session; the token allows that once."""

    event: Literal["approval_code.used"] = "approval_code.used"
    digest: str
