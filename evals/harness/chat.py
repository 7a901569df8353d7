"""A client for one OpenAI-compatible endpoint: chat completions over HTTPS, with retries.

The key is sent to the endpoint but never printed.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import random
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from evals.errors import EvalError
from evals.harness.recorder import AgentDied

_MAX_REPLY: Final = 16 << 20
_TRIES: Final = 6
_LONGEST_WAIT_S: Final = 60.0
_AGAIN: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class _Again(Exception):
    """Raised to retry the request, after `wait_s` seconds if the endpoint asks for a delay."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, because a redirect could send the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        """Return None so that the redirect is not followed and its status is reported as an error."""


@dataclass(frozen=True)
class Endpoint:
    """The address of a model. `key` is empty if the endpoint does not need one."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    timeout_s: float = 300.0
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        """Refuse an address that would expose the key on the network."""
        parts = urllib.parse.urlsplit(self.url)
        near = parts.hostname in ("127.0.0.1", "::1", "localhost")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EvalError(f"{self.url!r} is not a valid address", "Specify --url https://host/v1")
        if self.key and parts.scheme == "http" and not near:
            raise EvalError("the key would be sent unencrypted", "Specify an https address with --url")

    def complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the endpoint's unmodified completion. Raises AgentDied for an error or a timeout."""
        body = json.dumps({"model": self.model, "messages": messages, "tools": tools}).encode()
        why = ""
        for n in range(_TRIES):
            try:
                return self._once(body)
            except _Again as error:
                why, wait = str(error), error.wait_s
                backoff = min(2.0**n, 30.0) * random.uniform(0.5, 1.0)
                if n + 1 < _TRIES:
                    self.sleep(min(backoff if wait is None else wait, _LONGEST_WAIT_S))
        raise AgentDied(f"the endpoint failed {_TRIES} times: {why}")

    def _once(self, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "User-Agent": "gpuwarden-evals"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        address = self.url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(address, body, headers)  # noqa: S310 - the scheme was checked
        opener = urllib.request.build_opener(_NoRedirects)
        try:
            with opener.open(request, timeout=self.timeout_s) as reply:
                data = reply.read(_MAX_REPLY + 1)
        except urllib.error.HTTPError as error:
            with error:
                text = self._clean(error.read(2_000).decode("utf-8", "replace"))
            if error.code in _AGAIN:
                raise _Again(f"HTTP {error.code}: {text}", retry_after(error.headers.get("Retry-After"))) from error
            raise AgentDied(f"the endpoint returned HTTP {error.code}: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Again(f"no answer: {type(error).__name__}: {error}") from error
        if len(data) > _MAX_REPLY:
            raise AgentDied(f"the endpoint's reply has more than {_MAX_REPLY >> 20} MiB")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            begins = self._clean(data[:200].decode("utf-8", "replace"))
            raise _Again(f"the reply is incomplete or not JSON: {begins}") from error
        choices = value.get("choices") if isinstance(value, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(first, dict) or not isinstance(first.get("message"), dict):
            raise _Again(f"no message in the reply: {self._clean(str(value))}")
        found: dict[str, Any] = value
        return found

    def _clean(self, text: str) -> str:
        """Redact the key from the endpoint's messages, because some endpoints repeat it in their errors."""
        return " ".join(text.replace(self.key, "<key>").split() if self.key else text.split())[:500]


def retry_after(value: str | None) -> float | None:
    """Return the value of the `Retry-After` header in seconds; None if it is neither a number nor a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
