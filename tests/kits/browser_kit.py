"""Fixtures for tests of the page in a real browser."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuwarden.interfaces.http.running import Server, listen
from gpuwarden.interfaces.http.serving import Serving, Settings
from page_kit import World
from real_parts import need
from waiting import soon

if TYPE_CHECKING:
    from playwright.async_api import Browser, Frame, Page


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip


class Served:
    """A server for a `World` on a fixed port. The test can kill and restart it."""

    def __init__(self, world: World) -> None:
        self.world, self.port = world, 0

    async def start(self) -> None:
        """Listen on the same port as the previous start."""
        self.listener = listen("127.0.0.1", self.port)
        self.port = self.listener.getsockname()[1]
        self.parts = Serving.over(self.world.ctx, Settings(port=self.port))
        self.running = Server(self.parts)
        self.task = asyncio.create_task(self.running.serve(sockets=[self.listener]))

    async def stop(self, *, killed: bool = False) -> None:
        """Stop the server. With `killed`, drop its open connections."""
        for connection in list(self.running.server_state.connections) if killed else ():
            connection.transport.abort()
        self.running.should_exit = True
        await self.task
        self.listener.close()

    async def holds(self, streams: int) -> None:
        """Wait until `streams` page streams are open."""

        def held() -> int:
            return sum(answer._scope["path"].endswith(".events") for answer in self.parts.streams.values())

        await soon(lambda: held() == streams)


class Window:
    """A browser window, logged in with a one-time link, and the errors that occurred in it."""

    server: Served
    """The in-process server whose page the window shows."""

    def __init__(self, page: Page, base: str) -> None:
        self.page, self.base = page, base
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on(
            "console", lambda said: said.type in {"error", "warning"} and self.wrong.append(f"console: {said.text}")
        )
        page.on("request", lambda one: one.url.startswith((base, "data:")) or self.wrong.append(f"left: {one.url}"))

    async def go(self, path: str) -> None:
        """Open a page and wait for an update."""
        await self.page.goto(self.base + path)
        await self.settle()

    async def settle(self, times: int = 1) -> None:
        """Wait until `times` views have arrived and been applied."""
        await self.page.evaluate(
            """(times) => document.body.dataset.live ? new Promise((done) => {
                const count = () => { if (--times <= 0) requestAnimationFrame(() => setTimeout(done)); };
                document.addEventListener("view", count);
            }) : null""",
            times,
        )


@asynccontextmanager
async def browsing(
    look: tuple[str, int] = ("light", 1200), flags: tuple[str, ...] = (), **more: Any
) -> AsyncIterator[Page]:
    """Open an empty page in headless Chromium with additional flags; `more` is passed to the browser context."""
    need("chromium", CHROMIUM is not None)
    playwright_api = pytest.importorskip("playwright.async_api")
    async with playwright_api.async_playwright() as playwright:
        browser: Browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*QUIET, *flags])
        try:
            options = {"viewport": {"width": look[1], "height": 800}, "color_scheme": look[0], **more}
            yield await (await browser.new_context(**options)).new_page()
        finally:
            await browser.close()


@asynccontextmanager
async def opened(world: World, look: tuple[str, int] = ("light", 1200)) -> AsyncIterator[Window]:
    """Serve a world on a local port and open a window on it."""
    need("chromium", CHROMIUM is not None)
    served = Served(world)
    await served.start()
    try:
        async with browsing(look, permissions=["clipboard-write"]) as page:
            window = Window(page, served.parts.settings.local_url)
            window.server = served
            entered = await page.goto(f"{window.base}/enter?link={served.parts.tokens.create_link()}")
            assert entered is not None and entered.ok
            await page.wait_for_url(f"{window.base}/")
            yield window
    finally:
        await served.stop()


async def until(page: Page | Frame, condition: str) -> None:
    """Wait until a JavaScript condition holds. Evaluating it may raise while the page or frame loads.

    Playwright's own wait evaluates a string, which the page's content security policy blocks.
    """
    from playwright.async_api import Error

    async def look() -> Any:
        try:
            return await page.evaluate(condition)
        except Error as error:
            return error

    await soon(look, every=0.05, good=lambda found: found and not isinstance(found, Error))


async def audited(page: Page | Frame) -> list[str]:
    """Return the serious and critical violations that axe-core finds on a page."""
    file = os.environ.get("GPUWARDEN_AXE", "")
    need("axe-core (GPUWARDEN_AXE)", bool(file))
    await page.evaluate(Path(file).read_text() + ";0")
    found = await page.evaluate("axe.run()")
    bad = [v for v in found["violations"] if v["impact"] in {"serious", "critical"}]
    return [f"{v['id']}: {node['html'][:200]} {node['failureSummary']}" for v in bad for node in v["nodes"]]
