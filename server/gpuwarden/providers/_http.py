"""The HTTP client for all providers, and the classification of replies.

- a reply with the expected shape is `Known`
- a definite refusal raises an exception; the request had no effect
- anything else is `Unknown`: no reply, a 5xx, a redirect, HTML, a truncated body, an unexpected shape. The request may
  have had an effect.

*Not found* and refusals are accepted only in the platform's own JSON; a page from a proxy is `Unknown`. A reply that
refuses a create request but names an instance does not count as a refusal.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeVar, cast
from urllib.parse import urlsplit

import anyio
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from gpuwarden import __version__
from gpuwarden.core.clock import Clock, retry_after_s
from gpuwarden.core.errors import AuthFailed, BadRequest, Conflict, RateLimited, WardenError
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Unknown
from gpuwarden.core.sanitize import line, redact
from gpuwarden.providers._account import base_url, is_loopback, read_key, salted

if TYPE_CHECKING:
    import ssl

    import httpx2

T = TypeVar("T")
CONNECT_S: Final = 15.0
REPLY_S: Final = 60.0
MAX_REPLY: Final = 16 << 20
PATIENT_TRIES: Final = 4
PATIENT_S: Final = 15.0
"""Maximum number of seconds to wait before retrying a rate-limited read. If the platform asks for a longer wait,
RateLimited is raised.
"""
AGENT: Final = f"gpuwarden/{__version__} (+https://github.com/gpuwarden/gpuwarden)"
"""An intermediary may reject a request without a User-Agent. The address lets a platform contact the project."""
NAMES: Final = frozenset(
    ("id", "ids", "uuid", "newcontract", "contractid", "instanceid", "instanceids", "instanceuuid", "podid")
)  # fmt: skip
"""Fields that contain an instance's id in the reply to a create request, in lower case and without underscores."""
_ID = r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}"
Ident = Annotated[str, Field(pattern=f"^{_ID}$")]
"""An instance's id in a reply. A reply is invalid as a whole if its id can't be used in later requests."""


Readable = Annotated[T | object, Field(union_mode="left_to_right")]
"""A list row, such as an offer or a key. A row with an unexpected shape is kept unparsed; `readable` omits it.

For rows that may be gpuwarden's instances, the type `Row | RowId` is strict about the identifying fields and lenient
about all others. A list in which no row is readable may be a list of something else, so it is Unknown.
"""

MOST: Final = 10**18
"""Upper bound for the numbers in a reply, so that their sums and products stay finite floats."""


class ResponseModel(BaseModel):
    """A part of a platform's reply: the fields in use, strictly typed. Other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False, defer_build=True)

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if any(isinstance(value, int | float) and not -MOST < value < MOST for value in vars(self).values()):
            raise ValueError("a number that large is not plausible")
        return self


@dataclass(frozen=True)
class ApiResponse:
    """One complete HTTP reply."""

    status: int
    raw: bytes
    after_s: float | None = None

    @property
    def json(self) -> Any:
        """Return the body as JSON, or None if it is not JSON."""
        try:
            return json.loads(self.raw)
        except (ValueError, RecursionError):
            return None

    def text(self, *names: str) -> str:
        """Return the first of the named JSON fields whose value is a non-empty string, else ""."""
        found = (self.at(name) for name in names)
        return next((value for value in found if isinstance(value, str) and value), "")

    def at(self, name: str) -> Any:
        """Return the named field of a JSON object, or None.

        A dot selects a nested field: "error.code" is `code` inside `error`, and "errors.0.details" is `details` in the
        first item of `errors`.
        """
        value = self.json
        for step in name.split("."):
            if step.isdigit() and isinstance(value, list):
                value = value[int(step)] if int(step) < len(value) else None
            else:
                value = value.get(step) if isinstance(value, dict) else None
        return value


Refusal = Callable[[ApiResponse, str], WardenError | None]


def no_refusal(reply: ApiResponse, message: str) -> WardenError | None:
    """Return None, for platforms that report refusals only through the status code."""
    return None


@dataclass(frozen=True)
class Api:
    """The configuration of one platform's API.

    `header` contains the key, after `scheme`. `refusal` classifies the platform's own error body; if it returns None,
    the status code decides. `message_fields` lists the fields of an error body that contain a message. `names` are the
    fields, besides `NAMES`, that contain an instance's id. `pace_s` is the minimum time between two requests, in
    seconds.
    """

    platform: str
    url: str
    url_variable: str
    key_variable: str
    header: str = "Authorization"
    scheme: str = "Bearer "
    refusal: Refusal = no_refusal
    message_fields: tuple[str, ...] = ("detail", "message", "msg", "error")
    names: tuple[str, ...] = ()
    pace_s: float = 0.0

    @property
    def id_names(self) -> frozenset[str]:
        """Return the fields that contain an instance's id in the reply to a create request, in the form of `NAMES`."""
        return NAMES | {_plain(name) for name in self.names}


@dataclass
class ApiClient:
    """HTTP client for one account at one platform."""

    api: Api
    clock: Clock
    env: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    _next: float = 0.0

    def __post_init__(self) -> None:
        self.url = base_url(self.api.url_variable, self.api.url, self.env)

    async def ask(
        self,
        method: str,
        path: str,
        shape: type[T] | None,
        *,
        params: Mapping[str, str | int] | None = None,
        body: object = None,
        safe: bool | None = None,
        empty: bool = False,
        creates: bool = False,
    ) -> Answer[T]:
        """Send one request and classify its reply.

        If `shape` is None, the expected reply is a 204 without a body. If `empty` is set, a 204 is also accepted and
        returns None. A `safe` request may be repeated; reads are safe by default. If `creates` is set, a reply that
        names an instance is never a refusal, whatever its status: it is Known if it has the expected shape, and
        Unknown otherwise.

        Raises AuthFailed, RateLimited, BadRequest, Conflict, NotFound or NoCapacity for a definite refusal.
        """
        reply = await self._send(method, path, params, body)
        tries = 1
        while (
            (safe if safe is not None else method == "GET")
            and isinstance(reply, ApiResponse)
            and reply.status == 429
            and (reply.after_s or 0.0) <= PATIENT_S
            and tries < PATIENT_TRIES
        ):
            await self.clock.sleep(reply.after_s if reply.after_s is not None else 2.0 * tries)
            reply, tries = await self._send(method, path, params, body), tries + 1
        return reply if isinstance(reply, Unknown) else self._read(reply, shape, f"{method} {path}", empty, creates)

    def _read(self, reply: ApiResponse, shape: type[T] | None, what: str, empty: bool, creates: bool) -> Answer[T]:
        secrets: tuple[str, ...] = ()
        with suppress(AuthFailed):
            secrets = (read_key(self.api.key_variable, self.api.platform, self.env),)
        message = line(redact(reply.text(*self.api.message_fields), secrets), 300)
        unclear = Unknown(
            f"{self.api.platform} returned status {reply.status} for {what}{': ' if message else ''}{message}"
        )
        body, good = reply.json, 200 <= reply.status < 300
        if isinstance(body, dict) and not good and body.get("cloudflare_error"):  # looks like a platform's JSON
            return Unknown(f"{unclear.why}; an intermediary sent this reply, not the platform")
        refusal = self.api.refusal(reply, message)
        failed = refusal is not None or not good
        if failed and creates and shape is not None and names_instance(reply.json, self.api.id_names):
            made = self.parse(reply.raw, shape, what)
            return made if isinstance(made, Known) else Unknown(f"{unclear.why}, but the reply names an instance")
        if refusal is not None:
            raise refusal
        if failed:
            known = any(reply.at(name) is not None for name in self.api.message_fields)
            if 400 <= reply.status < 500 and reply.status != 429 and not known:
                return Unknown(f"{unclear.why}; the reply is not the platform's own JSON, so an intermediary sent it")
            self._refuse(reply, message)
            return unclear
        if (shape is None or empty) and reply.status == 204:
            return Known(None)  # type: ignore[arg-type]
        if shape is None:
            return Unknown(f"{self.api.platform} returned status {reply.status} for {what}; 204 was expected")
        return self.parse(reply.raw, shape, what)

    def parse(self, raw: bytes, shape: type[T], what: str) -> Answer[T]:
        """Parse JSON text into a model. If it does not match the model, return Unknown with the first mismatch."""
        try:
            return Known(_adapter(cast("Any", shape)).validate_json(raw))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = line(".".join(str(part) for part in first["loc"]), 80)
            return Unknown(
                f"{self.api.platform} returned an unexpected reply to {what}: {where or 'body'}: {first['type']}"
            )

    def digest(self, salt: str) -> str:
        """Return a salted digest of the account's key and the API address. Raises AuthFailed if no key is set."""
        key = read_key(self.api.key_variable, self.api.platform, self.env)
        return salted(salt, self.api.platform, self.url, key)

    def _refuse(self, reply: ApiResponse, message: str) -> None:
        platform, status = self.api.platform, reply.status
        detail = f" ({status}{': ' if message else ''}{message})"
        if status in {401, 403}:
            raise AuthFailed(f"{platform} refused the key{detail}", f"Check {self.api.key_variable} and its scopes.")
        if status == 429:
            wait = "" if reply.after_s is None else f" and asks to wait {reply.after_s:g} s"
            raise RateLimited(
                f"{platform} received too many requests{wait}{detail}", "Wait, then retry.", reply.after_s
            )
        if status == 402:
            raise BadRequest(f"{platform} refused: the account has no credit{detail}", "Add credit to the account.")
        if status in {400, 422}:
            raise BadRequest(f"{platform} refused the request{detail}")
        if status == 409:
            raise Conflict(f"{platform} does not allow this in the current state{detail}", "Check the current state.")

    async def _send(
        self, method: str, path: str, params: Mapping[str, str | int] | None, body: object
    ) -> ApiResponse | Unknown:
        import httpx2

        key = read_key(self.api.key_variable, self.api.platform, self.env)
        now = self.clock.now()
        slot = max(now, self._next)
        self._next = slot + self.api.pace_s
        if slot > now:
            await self.clock.sleep(slot - now)
        silence = Unknown(f"{self.api.platform} did not respond to {method} {path}")
        try:
            with anyio.fail_after(REPLY_S):
                async with self._client() as client:
                    request = client.build_request(
                        method,
                        self.url + path,
                        params=dict(params or {}),
                        json=body,
                        headers={
                            self.api.header: self.api.scheme + key,
                            "Accept": "application/json",
                            "User-Agent": AGENT,
                        },
                    )
                    response = await client.send(request, stream=True)
                    return await _complete_reply(response, f"{self.api.platform}, {method} {path}", self.clock.now())
        except TimeoutError:
            return silence
        except httpx2.HTTPError as error:
            return Unknown(f"{silence.why}: {type(error).__name__}")

    def _client(self) -> httpx2.AsyncClient:
        import httpx2

        local = is_loopback(urlsplit(self.url).hostname)
        return httpx2.AsyncClient(
            timeout=httpx2.Timeout(REPLY_S, connect=CONNECT_S),
            verify=_tls(),
            trust_env=not local,  # proxies from the environment do not apply to loopback
            follow_redirects=False,  # never send the key to another address
        )


async def _complete_reply(response: httpx2.Response, what: str, now: float) -> ApiResponse | Unknown:
    """Return the complete reply, or Unknown if it is too long."""
    raw = bytearray()
    async for piece in response.aiter_bytes():
        raw += piece
        if len(raw) > MAX_REPLY:
            return Unknown(f"{what}: the reply is longer than {MAX_REPLY >> 20} MiB")
    return ApiResponse(response.status_code, bytes(raw), retry_after_s(response.headers, now))


@cache
def _tls() -> ssl.SSLContext:
    import httpx2

    return httpx2.create_ssl_context()


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)


def _plain(name: str) -> str:
    return name.replace("_", "").casefold()


def names_instance(body: Any, names: frozenset[str], depth: int = 4) -> bool:
    """Return whether the reply to a create request contains an instance's id anywhere. If so, the instance exists."""
    if isinstance(body, list):
        return depth > 0 and any(names_instance(item, names, depth - 1) for item in body)
    if not isinstance(body, dict):
        return False
    if isinstance(body.get("data"), str) and is_safe_id(body["data"]):
        return True
    named = (value for name, value in body.items() if _plain(name) in names)
    if any(value for value in named if isinstance(value, str | int | list) and value is not True):
        return True
    return depth > 0 and any(names_instance(value, names, depth - 1) for value in body.values())


def readable(rows: Iterable[object], shape: type[T]) -> list[T]:
    """Return the rows that have the expected shape."""
    return [row for row in rows if isinstance(row, shape)]


def unclear_instance(ident: str, token: str, platform: str) -> Instance:
    """Return an UNCLEAR instance for a row with only an id and a name. It may be running, so it counts as billed."""
    why = f"{platform} lists the instance, but only its id and name could be read"
    return Instance(id=ident, token=token, state=InstanceState.UNCLEAR, why=why)


def is_safe_id(ident: str) -> bool:
    """Return whether an id is safe in a URL path. No platform has an instance with an unsafe id."""
    return re.fullmatch(_ID, ident) is not None
