"""An HTTP client for the Hub that limits the size of JSON responses and raises gpuwarden's error types.

It uses huggingface_hub's async session, which provides the offline guard, the user agent and the token lookup.
huggingface_hub has no async API and no default timeout, and its list calls wait 23 seconds for a refused connection, so
this module sends the requests itself.

One request takes at most `timeout_s` seconds, including its retry and its wait for other requests to finish.

A 401, 403 or 404 is a valid response and is returned as a `HubResponse`. A request raises `RateLimited` (with the
number of seconds to wait), `Unreachable` if there is no response or a 5xx, and `BadReply` if the body is too long or is
not JSON.

| variable | meaning |
|---|---|
| `HF_TOKEN` | the token for the Hub; it replaces the token from `hf auth login` |
| `HF_ENDPOINT` | the address of the Hub, if it is not huggingface.co |
| `GPUWARDEN_DATASET_VIEWER` | the address of that Hub's dataset viewer |
| `HF_HOME` | the folder that contains the Hub's cache and the token stored by `hf auth login` |
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import anyio

from gpuwarden.core.clock import Clock, SystemClock, retry_after_s
from gpuwarden.core.credentials import sendable, without_login
from gpuwarden.core.errors import BadReply, RateLimited, Unreachable
from gpuwarden.core.sanitize import line

HUB = "https://huggingface.co"
VIEWER = "https://datasets-server.huggingface.co"
CONCURRENCY = 12
TIMEOUT_S = 20.0
MAX_REPLY = 24 << 20
PATIENCE_S = 5.0
_LIMIT = re.compile(r'"(\w+)"\s*;\s*r\s*=\s*(\d+)\s*;\s*t\s*=\s*(\d+)')


@dataclass(frozen=True)
class HubConfig:
    """The addresses of the Hub and its dataset viewer, and the token in use. Its repr never contains the token."""

    endpoint: str = HUB
    viewer: str = VIEWER
    token: str | None = field(default=None, repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> HubConfig:
        """Read `HF_ENDPOINT`, `GPUWARDEN_DATASET_VIEWER` and the token, as huggingface_hub does.

        The viewer's address can't be derived reliably from the Hub's address. If you set another Hub's address, also
        set its viewer's address.
        """
        from huggingface_hub import get_token

        env = os.environ if env is None else env
        endpoint = without_login(env.get("HF_ENDPOINT") or HUB).rstrip("/")
        derived = VIEWER if endpoint == HUB else endpoint.replace("://", "://datasets-server.", 1)
        viewer = without_login(env.get("GPUWARDEN_DATASET_VIEWER") or derived).rstrip("/")
        return cls(endpoint, viewer, env.get("HF_TOKEN", "").strip() or get_token())

    @property
    def sendable_token(self) -> str | Literal[False]:
        """Return the token for huggingface_hub, or False if there is none. Raises AuthFailed if it is malformed."""
        return sendable("HF_TOKEN", self.token) if self.token else False


@dataclass(frozen=True)
class HubResponse:
    """One response: its status, the parsed JSON (None for an error without JSON), and the headers."""

    status: int
    json: Any
    headers: Mapping[str, str]

    @property
    def code(self) -> str:
        """Return the Hub's error code, such as `RepoNotFound`, or an empty string."""
        return self.headers.get("x-error-code", "")

    @property
    def message(self) -> str:
        """Return the service's error message, truncated."""
        body = self.json if isinstance(self.json, dict) else {}
        return line(self.headers.get("x-error-message") or body.get("error") or f"HTTP {self.status}", 300)


class HubClient:
    """An async context manager that sends requests to the Hub; `requests` counts the requests sent."""

    def __init__(
        self,
        config: HubConfig | None = None,
        *,
        concurrency: int = CONCURRENCY,
        timeout_s: float = TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        self.config = config or HubConfig.from_env()
        self.requests = 0
        self.note = ""
        self._slots = anyio.CapacityLimiter(concurrency)
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._blocked_until = 0.0
        self._session: Any = None

    async def __aenter__(self) -> Self:
        import httpx2
        from huggingface_hub.utils import build_hf_headers, get_async_session  # type: ignore[attr-defined]

        self._session = get_async_session()
        # Bodies are read here with a limit; the library's own response hook would read error bodies without a limit.
        self._session.event_hooks = {**self._session.event_hooks, "response": []}
        self._session.timeout = httpx2.Timeout(self._timeout_s)
        self._headers = build_hf_headers(token=self.config.sendable_token, library_name="gpuwarden")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.aclose()

    async def get(self, path: str, params: Mapping[str, Any] | None = None, *, viewer: bool = False) -> HubResponse:
        """GET a path from the Hub or from the dataset viewer, and parse the JSON response. A failed request is retried
        once.
        """
        return await self._ask("GET", path, params=params, viewer=viewer, tries=2)

    async def send(self, method: str, path: str, body: Any = None) -> HubResponse:
        """Send a request that changes data, without a retry. The change may be made even if `Unreachable` is raised."""
        return await self._ask(method, path, body=body, tries=1)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        viewer: bool = False,
        tries: int,
    ) -> HubResponse:
        base = self.config.viewer if viewer else self.config.endpoint
        sent = False
        try:
            with anyio.fail_after(self._timeout_s):
                for left in reversed(range(tries)):
                    try:
                        async with self._slots:
                            sent = True
                            return await self._once(method, path, params, body, viewer=viewer)
                    except RateLimited as limited:
                        wait = limited.after_s
                        if not left or wait is None or wait > PATIENCE_S:
                            raise
                        await self._clock.sleep(wait)
                    except Unreachable:
                        if not left:
                            raise
                        await self._clock.sleep(0.2)
        except TimeoutError:
            raise _silent(base, self._timeout_s, sent=sent) from None
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, path: str, params: Mapping[str, Any] | None, body: Any, *, viewer: bool
    ) -> HubResponse:
        raw = bytearray()
        async with self.stream(method, path, params=params, body=body, viewer=viewer) as response:
            async for chunk in response.aiter_bytes():
                raw += chunk
                if len(raw) > MAX_REPLY:
                    too_long = f"the response to {path} is longer than {MAX_REPLY >> 20} MB"
                    raise BadReply(too_long, "The rest of the response was not read.")
        self._watch_limits(response.status_code, response.headers)
        if response.status_code >= 500 and not viewer:
            raise Unreachable(
                f"the Hub returned HTTP {response.status_code} for {path}",
                "This is a server error. Try again in a minute; status.huggingface.co shows incidents.",
            )
        try:
            parsed = json.loads(raw) if raw.strip() else None
        except (ValueError, RecursionError):
            if response.status_code < 400:
                raise BadReply(
                    f"the response to {path} is not JSON; it begins {line(raw[:80].decode('utf-8', 'replace'), 80)!r}",
                    "A proxy or a login page may have sent it instead of the Hub; check HF_ENDPOINT.",
                ) from None
            parsed = None
        return HubResponse(response.status_code, parsed, dict(response.headers))

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        viewer: bool = False,
        timeout_s: float | None = None,
        start: int = 0,
    ) -> AsyncIterator[Any]:
        """Open the raw response of one request, from byte `start`, and translate network errors.

        `timeout_s` limits each wait for bytes, not the whole stream.
        """
        import httpx2
        from huggingface_hub.errors import OfflineModeIsEnabled

        wait = self._blocked_until - self._clock.now()
        if wait > 0:
            raise _limited(wait, "the Hub's rate limit has been reached, so no request was sent")
        base = self.config.viewer if viewer else self.config.endpoint
        limit = timeout_s or self._timeout_s
        self.requests += 1
        headers = {**self._headers, "Range": f"bytes={start}-"} if start else self._headers
        try:
            context = self._session.stream(
                method, base + path, params=params, json=body, headers=headers, timeout=limit
            )
            async with context as response:
                yield response
        except OfflineModeIsEnabled:
            raise Unreachable(
                "no request was sent to the Hub: HF_HUB_OFFLINE is set",
                "Unset HF_HUB_OFFLINE to check repos before use.",
            ) from None
        except httpx2.TimeoutException:
            raise _silent(base, limit) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            # Other errors may quote a header or a URL, which can contain a credential.
            message = line(error, 120) if isinstance(error, httpx2.NetworkError) else type(error).__name__
            raise Unreachable(
                f"{without_login(base)} can't be reached: {message}",
                "Check the network and HF_ENDPOINT, then try again.",
            ) from None

    def _watch_limits(self, status: int, headers: Mapping[str, str]) -> None:
        if found := _LIMIT.search(headers.get("ratelimit", "")):
            kind, left, reset = found[1], int(found[2]), int(found[3])
            self.note = f"{left} {kind} requests left, reset in {reset} s" if left < 50 else ""
        if status == 429:
            after = retry_after_s(headers, self._clock.now())
            wait = after if after is not None else float(found[3]) if found else None
            # Other callers are also blocked, because more requests would only extend the wait.
            self._blocked_until = self._clock.now() + (wait or 0.0)
            raise _limited(wait, "the Hub returned HTTP 429: its rate limit has been reached")


def _silent(base: str, seconds: float, *, sent: bool = True) -> Unreachable:
    host = without_login(base)
    if not sent:
        return Unreachable(
            f"no request was sent to {host}: earlier requests were still in progress after {seconds:g} seconds",
            "Try again later.",
        )
    return Unreachable(f"{host} did not answer within {seconds:g} seconds", "Check the network, then try again.")


def _limited(wait: float | None, why: str) -> RateLimited:
    when = f"in {wait:.0f} seconds" if wait is not None else "in a few minutes"
    return RateLimited(
        why,
        f"Try again {when}. Set a token to raise the limit: requests without a token get the lowest limit.",
        after_s=wait,
    )
