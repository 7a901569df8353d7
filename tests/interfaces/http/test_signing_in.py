"""Signing in to the page at an OpenID Connect provider: a real one over loopback, and one that lies."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from fakes import FakeClock
from gpuwarden.config import load_config
from gpuwarden.core.errors import NotSupported
from gpuwarden.core.policy import SignIn
from gpuwarden.interfaces.http.access import cookie_name
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.ledger.events import SessionOpened
from gpuwarden.lifecycle.context import Context
from http_kit import BASE, client, serving
from lifecycle_kit import clock_of_today
from page_kit import busy_world, open_world
from real_parts import need
from waiting import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.real("OpenID Connect provider")]
PEOPLE = (
    {"sub": "alice", "email": "alice@example.org", "email_verified": True},
    {"sub": "eve", "email": "alice@example.org", "email_verified": False},
    {"sub": "mallory", "email": "mallory@elsewhere.example", "email_verified": True},
)
FROM_PAGE = {"origin": BASE, "sec-fetch-site": "same-origin"}


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    """The issuer of a provider in a process of its own."""
    need("oidc-provider-mock", find_spec("oidc_provider_mock") is not None)
    need("authlib", find_spec("authlib") is not None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    people = [word for one in PEOPLE for word in ("--user-claims", json.dumps(one))]
    argv = [sys.executable, "-W", "ignore", "-m", "oidc_provider_mock", "-p", str(port), "-n", "true", *people]
    issuer = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None
        try:
            return bool(httpx2.get(f"{issuer}/jwks", trust_env=False))
        except httpx2.TransportError:
            return False

    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(answers)
            yield issuer
        finally:
            process.terminate()


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return busy_world(tmp_path / "home", clock_of_today()).ctx


@asynccontextmanager
async def served(ctx: Context, issuer: str, **more: Any) -> AsyncIterator[tuple[Serving, httpx2.AsyncClient]]:
    """A server whose people sign in at a provider, and a browser."""
    secret = ctx.home.parent / "secret"
    secret.write_text("sesame\n")
    secret.chmod(0o600)
    values = {"allowed": ("*@example.org",), "client_secret_file": str(secret)} | more
    ctx.policy = ctx.policy.model_copy(update={"sign_in": SignIn(issuer=issuer, **values)})
    async with serving(ctx) as parts, client(parts) as http:
        yield parts, http


async def begun(http: httpx2.AsyncClient) -> tuple[str, dict[str, str]]:
    """The address that a browser is sent to, and its query."""
    answer = await http.get("/signin")
    assert answer.status_code == 303, answer.text
    url = answer.headers["location"]
    return url, {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


async def let_in(url: str, sub: str) -> str:
    """Say at the provider who one is; the address that it sends the browser back to."""
    async with httpx2.AsyncClient(trust_env=False) as elsewhere:
        answer = await elsewhere.post(url, data={"sub": sub})
    assert answer.status_code == 302, answer.text
    back: str = answer.headers["location"]
    assert back.startswith(f"{BASE}/signin/callback?")
    return back.removeprefix(BASE)


async def signed_in(http: httpx2.AsyncClient, sub: str) -> httpx2.Response:
    url, _ = await begun(http)
    return await http.get(
        await let_in(url, sub), headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    )


async def test_a_person_signs_in_reads_and_approves_nothing(ctx: Context, provider: str) -> None:
    async with served(ctx, provider) as (parts, http):
        assert (await http.get("/")).status_code == 401
        opened = await http.get("/", headers={"sec-fetch-mode": "navigate", "accept": "text/html"})
        assert opened.status_code == 303 and opened.headers["location"] == "/signin"
        url, asked = await begun(http)
        assert asked["code_challenge_method"] == "S256" and asked["response_type"] == "code" and asked["nonce"]
        answer = await http.get(await let_in(url, "alice"), headers={"sec-fetch-site": "cross-site"})
        assert answer.status_code == 200, answer.text
        cookie = next(text for text in answer.headers.get_list("set-cookie") if text.startswith("gpuwarden_session"))
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert (await http.get("/")).status_code == 200
        who = parts.principal(http.cookies[cookie_name(parts)])
        assert who is not None and who.person == "alice@example.org" and who.scopes == {"read"}
        page = await http.post("/approve/r7mixt/challenge.json", json={"digest": "x"}, headers=FROM_PAGE)
        assert page.status_code == 403 and "no passkey" in page.json()["message"]
    (event,) = ctx.ledger.events(kind=SessionOpened)
    assert (event.data.person, event.data.issuer) == ("alice@example.org", provider)


@pytest.mark.attack("page", "signs in with an unverified address, or as somebody whom the policy does not list")
@pytest.mark.parametrize("sub", ["eve", "mallory"])
async def test_who_is_not_let_in_gets_no_session(ctx: Context, provider: str, sub: str) -> None:
    async with served(ctx, provider) as (_, http):
        answer = await signed_in(http, sub)
        assert answer.status_code == 403 and not any(name.startswith("gpuwarden_session") for name in http.cookies)
        assert (await http.get("/")).status_code == 401
    assert not ctx.ledger.events(kind=SessionOpened)


async def test_without_a_list_nobody_gets_in_and_another_claim_can_be_the_name(ctx: Context, provider: str) -> None:
    async with served(ctx, provider, allowed=()) as (_, http):
        assert (await signed_in(http, "alice")).status_code == 403
    async with served(ctx, provider, allowed=("eve",), claim="sub") as (parts, http):
        assert (await signed_in(http, "eve")).status_code == 200
        who = parts.principal(http.cookies[cookie_name(parts)])
        assert who is not None and who.person == "eve"


@pytest.mark.attack("page", "replays, swaps or forges the answer to a sign-in")
async def test_an_answer_belongs_to_one_attempt_of_one_browser(ctx: Context, provider: str) -> None:
    async with served(ctx, provider) as (parts, http), client(parts) as other:
        url, _ = await begun(http)
        back = await let_in(url, "alice")
        await begun(other)
        assert (await other.get(back)).status_code == 401, "another browser's cookie, as in a forged login"
        async with client(parts) as none:
            assert (await none.get(back)).status_code == 401
        assert (await http.get(back)).status_code == 200
        assert (await http.get(back)).status_code == 401, "once"
        for change in ("/signin/callback", "/signin/callback?error=access_denied", "/signin/callback?code=x&state="):
            await begun(http)
            assert (await http.get(change)).status_code == 401
        _, asked = await begun(http)
        forged = await http.get(f"/signin/callback?code=x&state={asked['state']}&iss=https://evil.example")
        assert forged.status_code == 401 and "another one" in forged.json()["message"]
        _, asked = await begun(http)
        assert (await http.get(f"/signin/callback?code=guessed&state={asked['state']}")).status_code == 401


# ------------------------------------------------------------------------------------------------- one that lies


class Liar:
    """A provider whose word about a person can be twisted; the signature, the claims or the metadata."""

    def __init__(self) -> None:
        from joserfc.jwk import RSAKey

        self.key, self.other = RSAKey.generate_key(2048), RSAKey.generate_key(2048)
        self.issuer, self.nonce = "", ""
        self.twist: Callable[[dict[str, Any]], object] = lambda claims: None
        self.signs, self.algorithm = self.key, "RS256"
        self.metadata: dict[str, Any] = {}
        self.instead: dict[str, Any] = {}
        """By the beginning of a path: what is answered there, whatever it is."""

    def answer(self, path: str) -> Any:
        from joserfc import jwt
        from joserfc.jwk import KeySet, OctKey

        for beginning, answer in self.instead.items():
            if path.startswith(beginning):
                return answer
        if path.startswith("/.well-known"):
            at = {"authorization_endpoint": "auth", "token_endpoint": "token", "jwks_uri": "jwks"}
            return {"issuer": self.issuer} | {k: f"{self.issuer}/{v}" for k, v in at.items()} | self.metadata
        if path == "/jwks":
            return {"keys": KeySet([self.key]).as_dict()["keys"]}
        now = int(FakeClock().now())
        claims: dict[str, Any] = {
            "iss": self.issuer, "sub": "alice", "aud": "gpuwarden", "iat": now, "exp": now + 60, "nonce": self.nonce,
            "email": "alice@example.org", "email_verified": True,
        }  # fmt: skip
        self.twist(claims)
        key: Any = (
            OctKey.import_key(json.dumps(self.key.as_dict(is_private=False)))
            if self.algorithm == "HS256"
            else self.signs
        )
        token = jwt.encode({"alg": self.algorithm}, claims, key, algorithms=[self.algorithm])
        return {"access_token": "a", "token_type": "Bearer", "id_token": token}


@contextmanager
def lying() -> Iterator[Liar]:
    found = Liar()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.dumps(found.answer(self.path)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the server's own name for it

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found.issuer = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def liar() -> Iterator[Liar]:
    need("authlib", find_spec("authlib") is not None)
    with lying() as found:
        yield found


@pytest.fixture
def quiet(tmp_path: Path) -> Context:
    return open_world(tmp_path / "quiet").ctx


async def told(ctx: Context, liar: Liar) -> httpx2.Response:
    async with served(ctx, liar.issuer) as (_, http):
        _, asked = await begun(http)
        liar.nonce = asked["nonce"]
        return await http.get(f"/signin/callback?code=c&state={asked['state']}")


@pytest.mark.attack("page", "forges what a provider says of a person")
@pytest.mark.parametrize(
    "lie",
    [
        lambda liar: setattr(liar, "signs", liar.other),
        lambda liar: setattr(liar, "algorithm", "HS256"),
        lambda liar: setattr(liar, "algorithm", "none"),
        lambda liar: setattr(liar, "twist", lambda c: c.update(aud="another")),
        lambda liar: setattr(liar, "twist", lambda c: c.update(aud=["gpuwarden", "another"], azp="another")),
        lambda liar: setattr(liar, "twist", lambda c: c.update(iss="https://evil.example")),
        lambda liar: setattr(liar, "twist", lambda c: c.update(nonce="old")),
        lambda liar: setattr(liar, "twist", lambda c: c.pop("nonce")),
        lambda liar: setattr(liar, "twist", lambda c: c.update(exp=c["iat"] - 3600)),
        lambda liar: setattr(liar, "twist", lambda c: c.pop("exp")),
        lambda liar: setattr(liar, "twist", lambda c: c.pop("email")),
        lambda liar: setattr(liar, "twist", lambda c: c.update(email_verified="true")),
        lambda liar: setattr(liar, "twist", lambda c: c.update(email="a@example.org\nb@example.org")),
        lambda liar: setattr(liar, "twist", lambda c: c.update(email=["alice@example.org"])),
    ],
)
async def test_no_lie_about_a_person_opens_a_session(quiet: Context, liar: Liar, lie: Callable[[Liar], object]) -> None:
    assert (await told(quiet, liar)).status_code == 200, "the truth does"
    lie(liar)
    answer = await told(quiet, liar)
    assert answer.status_code in {401, 403} and "set-cookie" not in answer.headers, answer.text
    assert len(quiet.ledger.events(kind=SessionOpened)) == 1


MALFORMED: list[dict[str, Any]] = [
    {"/.well-known": []}, {"/.well-known": None}, {"/.well-known": {"issuer": {}}}, {"/token": []}, {"/token": "x"},
    {"/token": None}, {"/token": {"id_token": 5}}, {"/token": {"id_token": "a.b.c"}}, {"/token": {"error": ["x"]}},
    {"/token": {"access_token": {}, "id_token": {}}}, {"/token": {"expires_in": "x", "id_token": "."}},
    {"/token": {"expires_at": [], "expires_in": {}}}, {"/jwks": []}, {"/jwks": "x"}, {"/jwks": {"keys": "x"}},
    {"/jwks": {"keys": [1]}}, {"/jwks": {"keys": []}}, {"/jwks": {"keys": [{"kty": "RSA", "n": 1, "e": []}]}},
    {"/jwks": {"keys": [{"kty": ["RSA"]}]}},
]  # fmt: skip


@pytest.mark.attack("page", "answers a sign-in with what is not of the expected shape")
async def test_a_malformed_answer_of_a_provider_is_one_clear_error(quiet: Context, liar: Liar) -> None:
    async with served(quiet, liar.issuer) as (_, http):
        for instead in MALFORMED:
            liar.instead = instead
            answer = await http.get("/signin")
            if answer.status_code == 303:
                asked = parse_qs(urlsplit(answer.headers["location"]).query)
                answer = await http.get(f"/signin/callback?code=c&state={asked['state'][0]}")
            assert answer.status_code == 401 and "the provider" in answer.json()["message"], (instead, answer.text)


WRONG: list[dict[str, Any]] = [
    {"exp": "soon"}, {"exp": float("inf")}, {"iat": []}, {"nbf": {}}, {"aud": 5}, {"aud": {"gpuwarden": 1}},
    {"iss": ["x"]}, {"nonce": 5}, {"at_hash": 5}, {"azp": []}, {"auth_time": "x"}, {"email": {}}, {"amr": 5},
]  # fmt: skip


@pytest.mark.attack("page", "signs in with claims of a wrong type")
async def test_a_claim_of_a_wrong_type_is_never_a_crash(quiet: Context, liar: Liar) -> None:
    async with served(quiet, liar.issuer) as (_, http):
        for wrong in WRONG:
            liar.twist = lambda claims, wrong=wrong: claims.update(wrong)  # type: ignore[misc]
            _, asked = await begun(http)
            liar.nonce = asked["nonce"]
            answer = await http.get(f"/signin/callback?code=c&state={asked['state']}")
            refused = {401, 403} if set(wrong) & {"exp", "aud", "iss", "nonce", "email"} else {200, 401, 403}
            assert answer.status_code in refused, (wrong, answer.text)


@pytest.mark.attack("page", "signs in by a name that looks like a listed one, and is it in small letters")
async def test_a_name_is_folded_in_ascii_only(quiet: Context, liar: Liar) -> None:
    for name, status in (("KATE@example.org", 200), ("\u212aate@example.org", 403)):  # the Kelvin sign
        liar.twist = lambda claims, name=name: claims.update(email=name)  # type: ignore[misc]
        async with served(quiet, liar.issuer, allowed=("kate@example.org",)) as (_, http):
            _, asked = await begun(http)
            liar.nonce = asked["nonce"]
            answer = await http.get(f"/signin/callback?code=c&state={asked['state']}")
            assert answer.status_code == status, name


@pytest.mark.attack("page", "describes a provider with other or unprotected addresses")
@pytest.mark.parametrize(
    "metadata",
    [{"issuer": "https://evil.example"}, {"token_endpoint": "http://login.example.org/token"}, {"jwks_uri": "file:///x"},
     {"authorization_endpoint": "javascript:alert(1)"}, {"jwks_uri": None}],
)  # fmt: skip
async def test_a_provider_that_is_not_the_policys_is_not_used(
    quiet: Context, liar: Liar, metadata: dict[str, Any]
) -> None:
    liar.metadata = metadata
    async with served(quiet, liar.issuer) as (_, http):
        answer = await http.get("/signin")
    assert answer.status_code == 401 and "can't be used" in answer.json()["message"]


async def test_a_provider_that_is_away_is_one_clear_error(quiet: Context, liar: Liar) -> None:
    async with served(quiet, "http://127.0.0.1:9") as (_, http):
        answer = await http.get("/signin")
        assert answer.status_code == 401 and "can't be used (ConnectError)" in answer.json()["message"]


async def test_without_a_provider_there_is_no_such_route(quiet: Context) -> None:
    async with serving(quiet) as parts, client(parts) as http:
        for path in ("/signin", "/signin/callback"):
            assert (await http.get(path)).status_code == 401


async def test_without_authlib_the_extra_is_named(quiet: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.interfaces.http.signing_in.find_spec", lambda _: None)
    with pytest.raises(NotSupported) as error:
        async with served(quiet, "https://login.example.org"):
            pass
    assert "gpuwarden[oidc]" in str(error.value.next_steps) + str(error.value)


@pytest.mark.attack("policy", "names another provider in a variable")
def test_no_variable_names_a_provider(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[sign_in]\nissuer = "https://login.example.org"\nallowed = ["*@example.org"]\n')
    file.chmod(0o600)
    env = {"GPUWARDEN_HOME": str(tmp_path / "h"), "GPUWARDEN_POLICY": str(file)}
    config = load_config({**env, "GPUWARDEN_SIGN_IN_ISSUER": "https://evil.example", "GPUWARDEN_SIGN_IN_ALLOWED": "*"})
    assert config.policy.sign_in == SignIn(issuer="https://login.example.org", allowed=("*@example.org",))
