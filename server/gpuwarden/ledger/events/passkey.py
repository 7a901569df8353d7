"""Events of passkeys: the user allows a registration; a passkey is registered in a browser, used, and removed."""

from __future__ import annotations

from typing import Literal

from gpuwarden.ledger.events.base import Body


class PasskeyAllowed(Body):
    """The user allowed the registration of one passkey at a terminal. `code` is the digest of the code to type."""

    event: Literal["passkey.allowed"] = "passkey.allowed"
    code: str
    expires_at: float
    by: str = ""
    person: str = ""


class PasskeyRegistered(Body):
    """A browser registered a passkey for pages of the host `site`. `credential` and `public_key` are base64url."""

    event: Literal["passkey.registered"] = "passkey.registered"
    credential: str
    public_key: str
    site: str
    sign_count: int = 0
    person: str = ""


class PasskeyUsed(Body):
    """A passkey signed a challenge with the facts of `digest`."""

    event: Literal["passkey.used"] = "passkey.used"
    digest: str
    sign_count: int = 0


class PasskeyRemoved(Body):
    """The user removed a passkey at a terminal."""

    event: Literal["passkey.removed"] = "passkey.removed"
    by: str = ""
