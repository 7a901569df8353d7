"""Events for passkeys: the user allows a registration; a browser registers a passkey; a passkey is used or removed."""

from __future__ import annotations

from typing import Literal

from gpuwarden.ledger.events.base import Body


class PasskeyAllowed(Body):
    """At a terminal, the user allowed the registration of one passkey. `code` is the digest of the required code."""

    event: Literal["passkey.allowed"] = "passkey.allowed"
    code: str
    expires_at: float
    by: str = ""
    person: str = ""


class PasskeyRegistered(Body):
    """A browser registered a passkey for the host `site`. `credential` and `public_key` are encoded as base64url."""

    event: Literal["passkey.registered"] = "passkey.registered"
    credential: str
    public_key: str
    site: str
    sign_count: int = 0
    person: str = ""


class PasskeyUsed(Body):
    """A passkey signed a challenge that contains the digest of the facts."""

    event: Literal["passkey.used"] = "passkey.used"
    digest: str
    sign_count: int = 0


class PasskeyRemoved(Body):
    """At a terminal, the user removed a passkey."""

    event: Literal["passkey.removed"] = "passkey.removed"
    by: str = ""
