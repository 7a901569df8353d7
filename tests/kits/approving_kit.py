"""Helpers for a user who approves on the page with a passkey or a code."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from browser_kit import Window
from gpuwarden.interfaces.cli.page_code import show_code
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.lifecycle.context import Context
from http_kit import BASE, client, serving
from terminal import Typed

SHOWN_CODE = r"\b([A-Z0-9]{4}-[A-Z0-9]{4})\b"
FROM_PAGE = {"origin": BASE, "sec-fetch-site": "same-origin"}


@asynccontextmanager
async def entered(ctx: Context) -> AsyncIterator[tuple[Serving, httpx2.AsyncClient]]:
    """Yield the server and a logged-in client whose requests look like the page's."""
    async with serving(ctx) as parts, client(parts, FROM_PAGE) as http:
        assert (await http.get(f"/enter?link={parts.tokens.create_link()}")).status_code == 200
        yield parts, http


async def asked(http: httpx2.AsyncClient, ticket: str, digest: str) -> httpx2.Response:
    return await http.post(f"/approve/{ticket}/challenge.json", json={"digest": digest})


async def shown_digest(http: httpx2.AsyncClient, ticket: str) -> str:
    """Return the digest shown on a ticket's approval page, or an empty string if nothing can be approved."""
    return "".join(re.findall(r'data-digest="([^"]*)"', (await http.get(f"/approve/{ticket}")).text))


async def mark_of(http: httpx2.AsyncClient, ticket: str) -> str:
    """Return the mark in the command shown on a ticket's approval page."""
    return "".join(re.findall(r"--code ([0-9a-f]{8})", (await http.get(f"/approve/{ticket}")).text))


async def coded(ctx: Context, ticket: str, mark: str, *answers: str) -> str:
    """Return the code that the terminal shows after the user types these answers."""
    person = Typed(*answers or ("yes",))
    reply = await show_code(ctx, ticket, mark, person)
    code = re.findall(SHOWN_CODE, person.shown)[0]
    assert code not in reply.model_dump_json(), "a reply is read by programs"
    return str(code)


async def authenticator(window: Window, *, verified: bool = True) -> Any:
    """Add a virtual authenticator to a window."""
    cdp = await window.page.context.new_cdp_session(window.page)
    await cdp.send("WebAuthn.enable")
    options = {
        "protocol": "ctap2", "transport": "internal", "hasResidentKey": True, "hasUserVerification": True,
        "isUserVerified": verified, "automaticPresenceSimulation": True,
    }  # fmt: skip
    made = await cdp.send("WebAuthn.addVirtualAuthenticator", {"options": options})
    return cdp, made["authenticatorId"]
