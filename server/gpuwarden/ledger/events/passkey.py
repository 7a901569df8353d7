"""Events of passkeys: a person lets one be registered, it is registered in a browser, used, and removed."""

from __future__ import annotations

from typing import Literal

from gpuwarden.ledger.events.base import Body


class PasskeyAllowed(Body):
    """A person at a terminal allowed one passkey to be registered. `code` is the digest of what they type."""

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
    """A passkey signed a challenge that named the facts of `digest`."""

    event: Literal["passkey.used"] = "passkey.used"
    digest: str
    sign_count: int = 0


class PasskeyRemoved(Body):
    """A person at a terminal removed a passkey."""

    event: Literal["passkey.removed"] = "passkey.removed"
    by: str = ""
