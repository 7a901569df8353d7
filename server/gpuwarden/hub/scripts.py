"""Fetch scripts that a command names by URL.

Only known hosts that serve raw files are contacted, and redirects are not followed. Otherwise, the author of a command
could make this machine contact hosts that the author can't reach.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import MAX_SCRIPT_BYTES, Answer, Known, Unknown
from gpuwarden.core.sanitize import line
from gpuwarden.hub.client import HubConfig
from gpuwarden.static_analysis.script import decode

RAW_HOSTS = frozenset({"raw.githubusercontent.com", "gist.githubusercontent.com", "huggingface.co"})
_ADDRESS = re.compile(r"https?://\S+\.py(\?\S*)?", re.IGNORECASE)
TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Fetched:
    """A script's text, or the reason that the script can't be used."""

    text: str = ""
    trouble: str = ""


async def fetch_script(command: Sequence[str], config: HubConfig) -> Answer[Fetched] | None:
    """Fetch the first script URL in a command; None if no URL may be fetched."""
    hosts = RAW_HOSTS | {urlsplit(config.endpoint).netloc}
    address = next((w for w in command if _ADDRESS.fullmatch(w) and urlsplit(w).netloc.lower() in hosts), None)
    if address is None or "/blob/" in address:
        return None
    import httpx2

    mine = address.startswith(config.endpoint + "/") and config.token
    headers = {"Authorization": f"Bearer {config.sendable_token}"} if mine else {}
    try:
        with anyio.fail_after(TIMEOUT_S):  # limits the total time, because a slow response could take days
            async with (
                httpx2.AsyncClient(timeout=TIMEOUT_S) as session,
                session.stream("GET", address, headers=headers) as reply,
            ):
                raw = bytearray()
                async for chunk in reply.aiter_bytes():
                    raw += chunk
                    if len(raw) > MAX_SCRIPT_BYTES:
                        return Known(Fetched(trouble=f"{line(address)} is longer than {MAX_SCRIPT_BYTES:,} bytes"))
    except TimeoutError:
        return Unknown(f"{line(address)} was not downloaded within {TIMEOUT_S:g} s")
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return Unknown(f"{line(address)} could not be fetched: {type(error).__name__}")
    if reply.status_code >= 500 or reply.status_code == 429:
        return Unknown(f"{line(address)} returned HTTP {reply.status_code}")
    if reply.status_code != 200:
        return Known(Fetched(trouble=f"{line(address)} returned HTTP {reply.status_code}"))
    kind = reply.headers.get("content-type", "")
    if "html" in kind or raw.lstrip()[:15].lower().startswith((b"<!doctype", b"<html")):
        return Known(Fetched(trouble=f"{line(address)} is a web page, not a script"))
    try:
        return Known(Fetched(text=decode(bytes(raw))))
    except BadRequest as error:
        return Known(Fetched(trouble=f"{line(address)}: {error.message}"))
