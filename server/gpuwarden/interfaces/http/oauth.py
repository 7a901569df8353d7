"""Accept access tokens from the user's own OAuth issuer: the server acts as an OAuth resource server.

The SDK checks a token's resource and expiry, and serves the metadata that directs clients to the issuer (RFC 9728).
This module verifies the token itself (RFC 9068): signature, issuer and audience.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from typing import Any, Final, cast
from urllib.parse import urlsplit

import anyio
import jwt
from mcp.client.auth.utils import build_oauth_authorization_server_metadata_discovery_urls as metadata_urls
from mcp.server.auth.middleware.bearer_auth import BearerAuthBackend
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.routes import build_resource_metadata_url, create_protected_resource_routes
from pydantic import AnyHttpUrl, ConfigDict, TypeAdapter
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import Unreachable
from gpuwarden.core.policy import guarded
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.http.principals import GRANTED, Principal, Scope

logger = logging.getLogger(__name__)
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Public-key signatures only: with HS256, a public key could be used as the secret."""
FRESH_S: Final = 600.0
"""Seconds after which the issuer's keys are read again."""
USABLE_S: Final = 3_600.0
"""Seconds for which known keys remain in use while the issuer does not respond."""
PAUSE_S: Final = 30.0
"""Minimum seconds between two attempts to read the keys, because anyone can send a token with an unknown key."""
TIMEOUT_S: Final = 5.0
"""Seconds within which the issuer's metadata and keys must arrive."""
MAX_BYTES: Final = 256 << 10
MAX_TOKEN: Final = 8_192
MAX_NAME: Final = 120
_URL: Final[TypeAdapter[AnyHttpUrl]] = TypeAdapter(AnyHttpUrl, config=ConfigDict(url_preserve_empty_path=True))
"""Parses a URL without adding a slash to an empty path, because issuers are compared as strings."""


class Issuer:
    """Verifies the tokens that one issuer signs for one resource, the URL of the MCP endpoint."""

    def __init__(self, address: str, resource: str, clock: Clock) -> None:
        self.address = address
        self.resource = resource
        self.clock = clock
        self._backend = BearerAuthBackend(self, resource_server_url=_URL.validate_python(resource))
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._read_at = self._tried_at = -math.inf
        self._lock = anyio.Lock()
        self._expiries: dict[str, float] = {}

    @property
    def metadata_url(self) -> str:
        """Return the URL of the metadata, which a refused client needs."""
        return str(build_resource_metadata_url(_URL.validate_python(self.resource)))

    def routes(self) -> list[BaseRoute]:
        """Return the route for the metadata, which clients read before they have a token."""
        url, issuer = _URL.validate_python(self.resource), _URL.validate_python(self.address)
        return list(create_protected_resource_routes(url, [issuer], sorted(GRANTED), "gpuwarden"))

    def valid_ids(self) -> frozenset[str]:
        """Return the ids of the principals whose latest token has not expired."""
        now = self.clock.now()
        self._expiries = {who: end for who, end in self._expiries.items() if end > now}
        return frozenset(self._expiries)

    async def principal(self, connection: HTTPConnection) -> Principal | None:
        """Return the principal for a request's token; None if the token is invalid.

        Raises Unreachable if the issuer's keys are not available.
        """
        found = await self._backend.authenticate(connection)
        if found is None:
            return None
        token = found[1].access_token
        identity = json.dumps([token.client_id, self.address, token.subject])
        key = f"oauth-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        self._expiries[key] = max(token.expires_at or 0.0, self._expiries.get(key, 0.0))
        person = f"{token.subject}@{urlsplit(self.address).netloc}"
        return Principal("token", key, person, frozenset(cast("list[Scope]", token.scopes)), person=person)

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return the contents of a valid token. This is the SDK's TokenVerifier."""
        if len(token) > MAX_TOKEN:
            return None
        try:
            key = await self._key(jwt.get_unverified_header(token).get("kid"))
            if key is None:
                return None
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self.resource,
                issuer=self.address,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWTError, OverflowError):  # an expiry of Infinity overflows
            return None
        subject, client = claims["sub"], claims.get("client_id") or claims.get("azp") or ""
        named = isinstance(subject, str) and 0 < len(subject) <= MAX_NAME and line(subject, MAX_NAME) == subject
        if not named or not isinstance(client, str):
            return None
        scopes = claims.get("scope", claims.get("scp", ""))  # a list or a space-separated string
        words = scopes.split() if isinstance(scopes, str) else scopes if isinstance(scopes, list) else []
        return AccessToken(
            token="",  # the verified token itself is not needed any more
            client_id=client,
            scopes=sorted(GRANTED.intersection(word for word in words if isinstance(word, str))),
            expires_at=int(claims["exp"]),
            resource=self.resource,
            subject=subject,
            claims={"iss": self.address},
        )

    async def _key(self, key_id: str | None) -> jwt.PyJWK | None:
        """Return the issuer's key with this id; None if the issuer has no such key. Raises Unreachable."""
        now = self.clock.now()
        if key_id in self._keys and now - self._read_at <= FRESH_S:
            return self._keys[key_id]
        async with self._lock:
            if now - self._tried_at > PAUSE_S:
                self._tried_at = now
                try:
                    with anyio.fail_after(TIMEOUT_S):
                        self._keys, self._read_at = await self._read_keys(), now
                except (_Unusable, TimeoutError) as error:
                    logger.warning("the keys of %s could not be read: %s", line(self.address), line(error))
        if now - self._read_at > USABLE_S:
            raise Unreachable("the OAuth issuer's keys could not be read", "Try again in a minute.")
        return self._keys.get(key_id)

    async def _read_keys(self) -> dict[str | None, jwt.PyJWK]:
        """Return the issuer's keys by id. If there is only one key, the id None also refers to it. Raises _Unusable."""
        problem = _Unusable("the issuer publishes no metadata")
        for url in metadata_urls(self.address, self.resource):
            try:
                metadata = await _fetched(url)
                break
            except _Unusable as error:
                problem = error
        else:
            raise problem
        if metadata.get("issuer") != self.address:
            raise _Unusable("the metadata belongs to another issuer")
        try:
            address = guarded(str(metadata.get("jwks_uri") or ""))
            if address is None:
                raise _Unusable("the metadata names no keys")
            found = jwt.PyJWKSet.from_dict(await _fetched(address)).keys
        except (ValueError, AttributeError, TypeError, jwt.PyJWTError) as error:
            raise _Unusable("the issuer's keys are invalid") from error
        keys: dict[str | None, jwt.PyJWK] = {key.key_id: key for key in found if key.public_key_use in {None, "sig"}}
        return keys if len(keys) != 1 else {None: next(iter(keys.values())), **keys}


class _Unusable(Exception):
    """The issuer did not respond, or its response can't be used."""


async def _fetched(url: str) -> dict[str, Any]:
    """Return the JSON object at a URL. Redirects are not followed. Raises _Unusable."""
    import httpx2

    local = urlsplit(url).hostname in {"localhost", "127.0.0.1", "::1"}
    body = bytearray()
    try:
        async with (
            httpx2.AsyncClient(timeout=TIMEOUT_S, trust_env=not local, follow_redirects=False) as session,
            session.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                raise _Unusable(f"HTTP {response.status_code}")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise _Unusable("the response is too long")
        found = json.loads(body)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
        raise _Unusable(type(error).__name__) from error
    if not isinstance(found, dict):
        raise _Unusable("the response is not a JSON object")
    return found
