"""Tokens from the user's own OAuth issuer: a real issuer over HTTP, real keys, and the SDK's OAuth client."""

from __future__ import annotations

import hmac
import json
import threading
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock
from urllib.parse import parse_qs

import httpx2
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.client import Client

from doors import quick_warden
from gpuwarden.core.policy import Http
from gpuwarden.lifecycle.context import Context
from http_kit import JSON, bearer, call, client, listening, opened, serving, transport
from talk_kit import ERAS, TOOLS
from waiting import real_time

pytestmark = pytest.mark.anyio
METADATA = "/.well-known/oauth-protected-resource/mcp"
RESOURCE = "http://localhost:8741/mcp"


class Issuer(ThreadingHTTPServer):
    """An OAuth authorization server: metadata, keys, and tokens for client credentials."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.keys = {"one": rsa.generate_private_key(65537, 2048)}
        self.metadata: dict[str, Any] = {
            "issuer": self.address,
            "authorization_endpoint": f"{self.address}/authorize",
            "token_endpoint": f"{self.address}/token",
            "jwks_uri": f"{self.address}/keys",
            "response_types_supported": ["code"],
        }
        self.requests: list[str] = []
        self.down = False

    def key_set(self) -> dict[str, Any]:
        return {"keys": [json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())) | {"kid": kid, "use": "sig"}
                         for kid, key in self.keys.items()]}  # fmt: skip

    def token(self, *, kid: str = "one", headers: dict[str, Any] | None = None, **changes: Any) -> str:
        """Return a token, with some claims changed; None removes a claim."""
        claims = {"iss": self.address, "aud": RESOURCE, "sub": "alice", "client_id": "laptop", "scope": "read openid",
                  "iat": int(real_time()), "exp": int(real_time()) + 600} | changes  # fmt: skip
        kept = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(kept, self.keys[kid], "RS256", headers={"kid": kid} if headers is None else headers)


class Handler(BaseHTTPRequestHandler):
    server: Issuer

    def _reply(self, body: dict[str, Any] | None) -> None:
        self.server.requests.append(self.path)
        raw = json.dumps(body or {}).encode()
        self.send_response(503 if self.server.down else 200 if body is not None else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        pages = {"/.well-known/oauth-authorization-server": self.server.metadata, "/keys": self.server.key_set()}
        self._reply(pages.get(self.path))

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        token = self.server.token(aud=form["resource"][0], scope=form["scope"][0])
        self._reply({"access_token": token, "token_type": "Bearer", "expires_in": 600})

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, issuer: Issuer) -> Context:
    monkeypatch.chdir(tmp_path)
    ctx = quick_warden(tmp_path / "home")
    ctx.policy = ctx.policy.model_copy(update={"http": Http(oauth_issuer=issuer.address)})
    return ctx


@pytest.mark.parametrize("mode", ERAS)
async def test_sdk_client_discovers_the_issuer_and_calls_with_its_token(
    ctx: Context, issuer: Issuer, mode: str
) -> None:
    with listening(ctx) as (parts, _):
        provider = ClientCredentialsOAuthProvider(
            parts.settings.endpoint,
            AsyncMock(get_tokens=AsyncMock(return_value=None)),  # the client stores nothing on disk
            client_id="laptop",
            client_secret="secret",
            scope="read submit",
            issuer=issuer.address,
        )
        async with (
            httpx2.AsyncClient(auth=provider, timeout=300) as http,
            Client(transport(parts, http), mode=mode) as mcp,  # type: ignore[arg-type]
        ):
            assert {tool.name for tool in (await mcp.list_tools()).tools} == TOOLS
            assert (await mcp.call_tool("list_instances", {})).structured_content["ok"] is True  # type: ignore[index]
    assert issuer.requests.count("/token") == 1 and issuer.requests.count("/keys") == 1


async def test_a_token_acts_for_its_subject_within_its_scopes(ctx: Context, issuer: Issuer) -> None:
    async with serving(ctx) as parts, client(parts, JSON | {"Authorization": f"Bearer {issuer.token()}"}) as http:
        assert (await call(http, "list_instances"))["ok"] is True
        refused = await call(http, "cancel_job", job_id="j" + "0" * 16)
        assert refused["code"] == "refused"
        (who,) = parts.issuer.valid_ids()  # type: ignore[union-attr]
        assert who.startswith("oauth-")
        found = await parts.issuer.principal(Connection(issuer.token(scope=None, scp=["submit", "admin"])))  # type: ignore[union-attr, arg-type]
        assert found is not None and found.scopes == {"submit"}
        assert found.person == f"alice@{issuer.address.removeprefix('http://')}"


class Connection:
    """The part of a connection that the SDK reads."""

    def __init__(self, token: str) -> None:
        self.headers = {"authorization": f"Bearer {token}"}


@pytest.mark.attack("http", "presents a token that its issuer did not issue for this server")
@pytest.mark.parametrize("changes", [
    {"aud": "http://localhost:8741/other"}, {"aud": None}, {"iss": "https://other.example.org"}, {"iss": None},
    {"exp": 1}, {"exp": None}, {"exp": float("inf")}, {"nbf": 4_000_000_000}, {"sub": None}, {"sub": "a\u202eb"},
    {"sub": "a" * 121}, {"sub": 7}, {"client_id": {"a": 1}}, {"headers": {"kid": "two"}}, {"headers": {"crit": ["x"]}},
    {"padding": "a" * 9_000},
], ids=str)  # fmt: skip
async def test_token_not_issued_for_this_server_is_refused(
    ctx: Context, issuer: Issuer, changes: dict[str, Any]
) -> None:
    async with serving(ctx) as parts, client(parts, JSON) as http:
        for token, status in ((issuer.token(**changes), 401), (issuer.token(), 200)):
            answer = await http.post("/mcp", json=opened(), headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == status, answer.text
        assert issuer.requests.count("/keys") == 1


def with_public_key_as_secret(claims: dict[str, Any], public: str) -> str:
    """Sign a token with HS256 and the public key, which PyJWT refuses to do."""
    header = {"alg": "HS256", "kid": "one"}
    signed = ".".join(urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in (header, claims))
    return f"{signed}.{urlsafe_b64encode(hmac.digest(public.encode(), signed.encode(), 'sha256')).decode().rstrip('=')}"


@pytest.mark.attack("http", "signs a token with another algorithm or another key")
async def test_token_not_signed_by_the_issuer_is_refused(ctx: Context, issuer: Issuer) -> None:
    claims = jwt.decode(issuer.token(), options={"verify_signature": False})
    public = json.dumps(issuer.key_set()["keys"][0])
    stranger = rsa.generate_private_key(65537, 2048)
    forged = [
        jwt.encode(claims, "", "none", headers={"kid": "one"}),
        with_public_key_as_secret(claims, public),
        jwt.encode(claims, stranger, "RS256", headers={"kid": "one"}),
        jwt.encode(claims, stranger, "RS256", headers={"kid": "one", "jwk": {"kty": "RSA"}, "jku": issuer.address}),
        issuer.token()[:-8] + "AAAAAAAA",
        "a.b.c",
        "..",
    ]
    async with serving(ctx) as parts, client(parts, JSON) as http:
        for token in forged:
            answer = await http.post("/mcp", json=opened(), headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 401, token


async def test_refusal_points_to_the_issuer_metadata(ctx: Context, issuer: Issuer) -> None:
    async with serving(ctx) as parts, client(parts, JSON) as http:
        asked = (await http.post("/mcp", json=opened())).headers["www-authenticate"]
        assert f'resource_metadata="http://localhost:8741{METADATA}"' in asked and 'scope="read submit"' in asked
        found = (await http.get(METADATA)).json()
        assert found["resource"] == RESOURCE and found["authorization_servers"] == [issuer.address]
        assert found["scopes_supported"] == ["read", "submit"]


async def test_metadata_is_absent_and_issuer_tokens_are_refused_without_an_issuer(ctx: Context, issuer: Issuer) -> None:
    ctx.policy = ctx.policy.model_copy(update={"http": Http()})
    async with serving(ctx) as parts, client(parts, JSON) as http:
        answer = await http.post("/mcp", json=opened(), headers={"Authorization": f"Bearer {issuer.token()}"})
        assert answer.status_code == 401 and "resource_metadata" not in answer.headers["www-authenticate"]
        assert (await http.get(METADATA)).status_code == 404
        assert issuer.requests == []


async def test_new_keys_are_found_with_rate_limited_requests(
    ctx: Context, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(ctx) as parts, client(parts, JSON) as http:

        async def status(token: str) -> int:
            return (await http.post("/mcp", json=opened(), headers={"Authorization": f"Bearer {token}"})).status_code

        assert await status(issuer.token()) == 200
        issuer.keys["two"] = rsa.generate_private_key(65537, 2048)
        for _ in range(3):
            assert await status(issuer.token(kid="two")) == 401
        assert issuer.requests.count("/keys") == 1, "an unknown key is not looked for each time"
        monkeypatch.setattr("gpuwarden.interfaces.http.oauth.PAUSE_S", -1.0)
        assert await status(issuer.token(kid="two")) == 200 and issuer.requests.count("/keys") == 2
        issuer.down = True
        assert await status(issuer.token(kid="two")) == 200, "known keys stay in use for a while"
        monkeypatch.setattr("gpuwarden.interfaces.http.oauth.FRESH_S", -1.0)
        monkeypatch.setattr("gpuwarden.interfaces.http.oauth.USABLE_S", -1.0)
        assert await status(issuer.token()) == 503
        own = await http.post("/mcp", json=opened(), headers=bearer(parts, "read"))
        assert own.status_code == 200, "the server's own tokens need no issuer"


@pytest.mark.parametrize("metadata", [
    {"issuer": "https://other.example.org"}, {"jwks_uri": None}, {"jwks_uri": "http://keys.example.org/"},
    {"jwks_uri": "file:///etc/passwd"},
], ids=str)  # fmt: skip
async def test_issuer_with_invalid_metadata_is_not_asked_for_keys(
    ctx: Context, issuer: Issuer, metadata: dict[str, Any]
) -> None:
    issuer.metadata |= metadata
    async with serving(ctx) as parts, client(parts, JSON) as http:
        answer = await http.post("/mcp", json=opened(), headers={"Authorization": f"Bearer {issuer.token()}"})
        assert answer.status_code == 503 and answer.json()["code"] == "unreachable"
        assert "/keys" not in issuer.requests


async def test_a_session_ends_when_its_token_expires(
    ctx: Context, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(ctx) as parts:
        assert parts.issuer is not None
        found = await parts.issuer.principal(Connection(issuer.token()))  # type: ignore[arg-type]
        assert found is not None and parts.issuer.valid_ids() == {found.id}
        monkeypatch.setattr(ctx.clock, "now", lambda: real_time() + 700)
        assert parts.issuer.valid_ids() == frozenset()


async def test_both_kinds_of_credentials_together_are_refused(ctx: Context, issuer: Issuer) -> None:
    async with serving(ctx) as parts, client(parts, JSON) as http:
        key = bearer(parts, "read")["Authorization"].removeprefix("Bearer ")
        both = {"Authorization": f"Bearer {issuer.token()}", "X-Api-Key": key}
        assert (await http.post("/mcp", json=opened(), headers=both)).status_code == 401
