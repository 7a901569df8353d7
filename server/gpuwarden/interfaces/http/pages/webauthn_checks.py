"""Challenges for passkeys, and checks of the signed responses.

A challenge is valid for one session and one purpose, and can be used once.
"""

from __future__ import annotations

import hashlib
import json
import secrets as random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from gpuwarden.core.errors import BadRequest, Refused
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.http.serving import Settings
from gpuwarden.ledger.events import PasskeyRegistered
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.teardown.passkeys import Passkey

CHALLENGE_S: Final = 120.0
MOST: Final = 200
"""Maximum number of open challenges. A new challenge replaces the oldest one."""
AGAIN: Final = "Reload the page, check the facts, then approve."


@dataclass(frozen=True)
class Site:
    """The origin of a page in a browser, and the host to which passkeys for that page are bound."""

    origin: str
    host: str

    @classmethod
    def of(cls, origin: str, settings: Settings) -> Site:
        """Return the site of an origin. Raises Refused for an address at which browsers do not support passkeys."""
        host = urlsplit(origin).hostname or ""
        if origin.lower() not in settings.origins or host in {"", "127.0.0.1", "::1"}:
            raise Refused(
                "passkeys need a host name in the address",
                f"Open {settings.local_url}, or the https address of your reverse proxy.",
            )
        return cls(origin.lower(), host)


@dataclass(frozen=True)
class Challenge:
    """A challenge that an authenticator signs. It contains random bytes and a digest of the facts shown to the user."""

    bytes: bytes
    about: str
    digest: str
    expires_at: float


class Challenges:
    """A server's open challenges. They are kept in memory only, so a restart invalidates them."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._open: OrderedDict[tuple[str, str], Challenge] = OrderedDict()

    def make(self, session: str, about: str, digest: str) -> Challenge:
        """Return a new challenge for one session and one subject.

        The challenge replaces any earlier one for the same session and subject.
        """
        shown = hashlib.sha256(f"{about}\n{digest}".encode()).digest()
        made = Challenge(random.token_bytes(32) + shown, about, digest, self.ctx.clock.now() + CHALLENGE_S)
        self._open[session, about] = made
        if len(self._open) > MOST:
            self._open.popitem(last=False)
        return made

    def take(self, session: str, about: str) -> Challenge:
        """Consume a challenge. Raises Refused if it has been used, has expired, or never existed."""
        found = self._open.pop((session, about), None)
        if found is None or self.ctx.clock.now() > found.expires_at:
            raise Refused("the challenge has already been used or has expired", AGAIN)
        return found


def registration_options(site: Site, name: str, challenge: Challenge, known: list[Passkey]) -> dict[str, Any]:
    """Return the options that a browser needs to create a passkey."""
    from webauthn import generate_registration_options, options_to_json
    from webauthn.helpers import base64url_to_bytes
    from webauthn.helpers import structs as kinds

    made = generate_registration_options(
        rp_id=site.host,
        rp_name="gpuwarden",
        user_name=name,
        challenge=challenge.bytes,
        exclude_credentials=[kinds.PublicKeyCredentialDescriptor(base64url_to_bytes(one.credential)) for one in known],
        authenticator_selection=kinds.AuthenticatorSelectionCriteria(
            user_verification=kinds.UserVerificationRequirement.REQUIRED
        ),
    )
    options: dict[str, Any] = json.loads(options_to_json(made))
    return options


def registered(site: Site, challenge: Challenge, credential: object) -> PasskeyRegistered:
    """Verify a browser's registration and return its passkey. Raises BadRequest."""
    from webauthn import verify_registration_response
    from webauthn.helpers import bytes_to_base64url
    from webauthn.helpers.exceptions import WebAuthnException

    try:
        found = verify_registration_response(
            credential=_as_dict(credential),
            expected_challenge=challenge.bytes,
            expected_rp_id=site.host,
            expected_origin=site.origin,
            require_user_verification=True,
        )
    except (WebAuthnException, ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"this passkey can't be registered: {line(error)}") from error
    return PasskeyRegistered(
        credential=bytes_to_base64url(found.credential_id),
        public_key=bytes_to_base64url(found.credential_public_key),
        site=site.host,
        sign_count=found.sign_count,
    )


def approval_options(site: Site, challenge: Challenge, known: list[Passkey]) -> dict[str, Any]:
    """Return the options that a browser needs to sign a challenge with a registered passkey."""
    from webauthn import generate_authentication_options, options_to_json
    from webauthn.helpers import base64url_to_bytes
    from webauthn.helpers import structs as kinds

    made = generate_authentication_options(
        rp_id=site.host,
        challenge=challenge.bytes,
        allow_credentials=[kinds.PublicKeyCredentialDescriptor(base64url_to_bytes(one.credential)) for one in known],
        user_verification=kinds.UserVerificationRequirement.REQUIRED,
    )
    options: dict[str, Any] = json.loads(options_to_json(made))
    return options


def signed_by(site: Site, challenge: Challenge, credential: object, known: list[Passkey]) -> tuple[Passkey, int]:
    """Return the passkey that signed a challenge, and its new signature counter. Raises Refused."""
    from webauthn import verify_authentication_response
    from webauthn.helpers import base64url_to_bytes
    from webauthn.helpers.exceptions import WebAuthnException

    given = _as_dict(credential)
    passkey = next((one for one in known if one.credential == given.get("id") and one.site == site.host), None)
    if passkey is None:
        raise Refused("this passkey is not registered here", "Register it in a terminal: gpuwarden passkey add NAME.")
    try:
        found = verify_authentication_response(
            credential=given,
            expected_challenge=challenge.bytes,
            expected_rp_id=site.host,
            expected_origin=site.origin,
            credential_public_key=base64url_to_bytes(passkey.public_key),
            credential_current_sign_count=passkey.sign_count,
            require_user_verification=True,
        )
    except (WebAuthnException, ValueError, KeyError, TypeError) as error:
        raise Refused(f"the passkey's signature is invalid: {line(error)}", AGAIN) from error
    return passkey, found.new_sign_count


def _as_dict(credential: object) -> dict[str, Any]:
    if not isinstance(credential, dict):
        raise BadRequest("credential is not an object")
    return credential
