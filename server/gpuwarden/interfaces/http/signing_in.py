"""Let people sign in to the page at their organisation's OpenID Connect provider. The session that it opens only reads.

The authorization code flow with PKCE. An attempt belongs to the browser that began it, works once, and ends after ten
minutes; its state and nonce are of this attempt alone. Who signed in is in the ledger. Where the policy names no
provider there are no such routes.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import httpx2
from anyio import to_thread
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from gpuwarden.core.errors import AuthFailed, NotSupported, Refused
from gpuwarden.core.policy import Address, SignIn
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.http.access import SIGN_IN, cookie_name
from gpuwarden.interfaces.http.serving import Serving, host_name
from gpuwarden.interfaces.http.session_routes import ENTERED
from gpuwarden.interfaces.http.tokens import SESSION_S
from gpuwarden.ledger.events import SessionOpened
from gpuwarden.private import read_private

if TYPE_CHECKING:
    from authlib.integrations.httpx_client import AsyncOAuth2Client

logger = logging.getLogger(__name__)
CALLBACK: Final = f"{SIGN_IN}/callback"
ATTEMPT: Final = "gpuwarden_signin"
ATTEMPT_S: Final = 600.0
MAX_ATTEMPTS: Final = 200
"""Attempts that are open; the oldest is dropped for a new one."""
TIMEOUT_S: Final = 10.0
LEEWAY_S: Final = 60
ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "Ed25519",
    "EdDSA",
)
"""Signatures with a key that the provider alone has: no shared secret, and never none."""
_ADDRESS: Final[TypeAdapter[str | None]] = TypeAdapter(Address)
_AGAIN: Final = f"Open {SIGN_IN} again."


@dataclass(frozen=True)
class Attempt:
    """One sign-in that began in a browser."""

    state: str
    nonce: str
    verifier: str
    begun: float


def routes(serving: Serving) -> list[BaseRoute]:
    """Return the routes with which people sign in; none where the policy names no provider."""
    if serving.ctx.policy.sign_in.issuer is None:
        return []
    if find_spec("authlib") is None:
        raise NotSupported(
            "the policy lets people sign in, and authlib is not installed here",
            "Install it: pip install 'gpuwarden[oidc]'.",
        )
    pages = SigningIn(serving)
    return [Route(SIGN_IN, pages.begin, methods=["GET"]), Route(CALLBACK, pages.finish, methods=["GET"])]


class SigningIn:
    """The sign-ins at one server. Attempts are kept in memory only: a restart voids them."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.policy: SignIn = serving.ctx.policy.sign_in
        self.attempts: OrderedDict[str, Attempt] = OrderedDict()
        base = serving.settings.public_url.rstrip("/") or serving.settings.local_url
        self.callback = f"{base}{CALLBACK}"

    async def begin(self, request: Request) -> Response:
        """GET: send the browser to the provider, with a cookie that ties the attempt to it."""
        handle, state, nonce = (secrets.token_urlsafe(32) for _ in range(3))
        attempt = Attempt(state, nonce, secrets.token_urlsafe(48), time.monotonic())
        async with self._client() as client:
            described = await self._described(client)
            url, _ = client.create_authorization_url(
                described["authorization_endpoint"],
                state=attempt.state,
                nonce=attempt.nonce,
                code_verifier=attempt.verifier,
            )
        self.attempts[handle] = attempt
        while len(self.attempts) > MAX_ATTEMPTS:
            self.attempts.popitem(last=False)
        response = RedirectResponse(url, 303)
        # Lax and not strict: the provider's page leads back here, and a browser sends no strict cookie along then.
        _set(response, request, ATTEMPT, handle, path=SIGN_IN, lasts_s=ATTEMPT_S, samesite="lax")
        return response

    async def finish(self, request: Request) -> Response:
        """GET: take the provider's answer, check who that is, and open a session."""
        attempt = self.attempts.pop(request.cookies.get(ATTEMPT, ""), None)
        answer = request.query_params
        if attempt is None or time.monotonic() - attempt.begun > ATTEMPT_S:
            raise AuthFailed("this sign-in was not begun in this browser, was used, or took too long", _AGAIN)
        if not hmac.compare_digest(answer.get("state", "").encode(), attempt.state.encode()):
            raise AuthFailed("the answer is to another sign-in", _AGAIN)
        if answer.get("iss", self.policy.issuer) != self.policy.issuer or "code" not in answer:
            raise AuthFailed("the provider did not let you in, or another one answered", _AGAIN)
        claims = await self._claims(answer["code"], attempt)
        person = self._person(claims)
        grant, session = await to_thread.run_sync(self.serving.tokens.sign_in, person)
        self.serving.ctx.ledger.add(
            f"session/{grant.id}", SessionOpened(person=person, issuer=self.policy.issuer or "", channel="oidc")
        )
        response = HTMLResponse(ENTERED)  # as after a one-time link: a redirect would come without the strict cookie
        _set(response, request, cookie_name(self.serving), session, path="/", lasts_s=SESSION_S, samesite="strict")
        response.delete_cookie(ATTEMPT, path=SIGN_IN)
        return response

    async def _claims(self, code: str, attempt: Attempt) -> Mapping[str, Any]:
        """Return what the provider says of a person, once its signature and its purpose are checked."""
        from authlib.common.errors import AuthlibBaseError
        from authlib.oidc.core import CodeIDToken
        from joserfc import jwt
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        try:
            async with self._client() as client:
                described = await self._described(client)
                token = await client.fetch_token(described["token_endpoint"], code=code, code_verifier=attempt.verifier)
                keys = (await client.request("GET", described["jwks_uri"], withhold_token=True)).raise_for_status()
            signed = jwt.decode(token["id_token"], KeySet.import_key_set(keys.json()), algorithms=list(ALGORITHMS))
            claims = CodeIDToken(
                signed.claims,
                signed.header,
                options={"iss": {"essential": True, "value": self.policy.issuer},
                         "aud": {"essential": True, "value": self.policy.client_id}},
                params={"nonce": attempt.nonce, "client_id": self.policy.client_id,
                        "access_token": token.get("access_token")},
            )  # fmt: skip
            claims.validate(now=int(self.serving.clock.now()), leeway=LEEWAY_S)
        except (httpx2.HTTPError, AuthlibBaseError, JoseError, ValueError, KeyError, TypeError) as error:
            logger.warning("a sign-in could not be checked: %s", type(error).__name__)
            raise AuthFailed(f"the provider's answer could not be checked ({type(error).__name__})", _AGAIN) from None
        return dict(claims)

    def _person(self, claims: Mapping[str, Any]) -> str:
        """Return the name of the person. Raises Refused where the policy does not let them in."""
        person = claims.get(self.policy.claim)
        if self.policy.claim == "email" and claims.get("email_verified") is not True:
            raise Refused("the provider has not verified your address", 'Let the policy take another claim: "sub".')
        if not isinstance(person, str) or not person or line(person, 120) != person:
            raise Refused(f"the provider says nothing usable as your {self.policy.claim}")
        if not any(fnmatchcase(_folded(person), _folded(pattern)) for pattern in self.policy.allowed):
            raise Refused("the policy does not let you in", "Ask whoever runs this server to list you in [sign_in].")
        return person

    def _client(self) -> AsyncOAuth2Client:
        """Return a client of the provider."""
        from authlib.integrations.httpx_client import AsyncOAuth2Client

        policy = self.policy
        secret = read_private(policy.client_secret_file, "client secret") if policy.client_secret_file else ""
        return AsyncOAuth2Client(
            policy.client_id,
            secret.strip() or None,
            token_endpoint_auth_method="client_secret_basic" if secret else "none",
            scope="openid email profile",
            redirect_uri=self.callback,
            code_challenge_method="S256",
            timeout=TIMEOUT_S,
            trust_env=False,
        )

    async def _described(self, client: AsyncOAuth2Client) -> dict[str, str]:
        """Return what the provider says of itself. Raises AuthFailed where it is not the policy's, or not safe."""
        issuer = self.policy.issuer or ""
        try:
            address = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
            answer = (await client.request("GET", address, withhold_token=True)).raise_for_status().json()
            names = ("authorization_endpoint", "token_endpoint", "jwks_uri")
            found = {name: str(_ADDRESS.validate_python(answer[name] or "none")) for name in names}
            if answer["issuer"] != issuer:
                raise ValueError("another issuer")
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            logger.warning("the provider %s can't be used: %s", issuer, type(error).__name__)
            raise AuthFailed(
                f"the provider {issuer} can't be used ({type(error).__name__})", "Compare [sign_in] with its settings."
            ) from None
        return found


def _folded(name: str) -> str:
    """Return a name in small letters. Of ASCII only: the Kelvin sign would become the letter k of another person."""
    return "".join(c.lower() if c.isascii() else c for c in name)


def _set(
    response: Response, request: Request, name: str, value: str, *, path: str, lasts_s: float, samesite: Any
) -> None:
    local = host_name(request.headers["host"]) in {"localhost", "127.0.0.1", "[::1]"}
    response.set_cookie(
        name, value, max_age=int(lasts_s), path=path, httponly=True, samesite=samesite, secure=not local
    )
