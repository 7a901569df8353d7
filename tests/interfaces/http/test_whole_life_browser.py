"""A whole lifecycle in a real browser: a job is submitted over MCP; a user watches it, approves, and sees it end.

`gpuwarden serve` and its watch run in separate processes, reached only by the browser, an MCP client, and a terminal.
`GPUWARDEN_PICTURES` names a folder for screenshots.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from anyio import to_thread
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from approving_kit import authenticator
from browser_kit import Window, browsing, until
from doors import TRAIN, at_terminal, environment, gpuwarden, quick_warden
from gpuwarden.ledger.events import ApprovalGranted
from gpuwarden.lifecycle.records import read_teardown
from http_kit import SECRET
from load_kit import answers
from talk_kit import Talk, metering
from waiting import PATIENCE, soon

pytestmark = [pytest.mark.anyio, pytest.mark.prove, pytest.mark.real("chromium")]
CODE = re.compile(r"\b([A-Z0-9]{4}-){3}[A-Z0-9]{4}\b")
TRAINER = (
    TRAIN
    + """
import time
import urllib.request
from datetime import datetime, timezone

def report(step):
    at = datetime.now(timezone.utc).isoformat()
    point = {"step": step, "epoch": 1, "train_loss": 2.5 * 0.97 ** step + 0.02 * (step % 3), "timestamp": at}
    body = json.dumps({"job_id": os.environ["JOB_ID"], "metrics": [point]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["JOB_TOKEN"], "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["METRICS_API_URL"], body, headers), timeout=300).close()

step = 0
open("half", "w").close()
while step < 30 or os.path.exists("half"):
    report(step)
    print("step", step, flush=True)
    step += 1
    time.sleep(0.1)
"""
)
"""Saves its checkpoint, then posts ten points a second, as in the seeds' contract, until `half` is removed."""


@contextmanager
def serving(home: Path) -> Iterator[str]:
    """Run the command with its watch, and yield its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "gpuwarden", "serve", "--port", "0"], env=environment(home, HOME=str(home.parent)),
        cwd=home.parent, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as server:  # fmt: skip
        try:
            assert server.stderr is not None
            url = re.findall(r"http://localhost:\d+", server.stderr.readline())[0]
            answers(int(url.rpartition(":")[2]))
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


async def typed(home: Path, *words: str, wanted: re.Pattern[str]) -> str:
    """Run a command at a terminal, answer yes, and return the text in its output that matches `wanted`."""
    code, shown = await to_thread.run_sync(
        lambda: at_terminal(home, *words, says={"yes": "yes"}, timeout=60 * PATIENCE)
    )
    found = wanted.search(shown)
    assert code == 0 and found, shown
    return found[0]


class Watcher(Window):
    """A window with a numbered screenshot for each step."""

    pictures = 0

    async def picture(self, folder: Path, name: str) -> None:
        """Take a screenshot of the whole page."""
        self.pictures += 1
        await self.page.screenshot(path=folder / f"{self.pictures:02}-{name}.png", full_page=True)

    async def digits(self, meter: str) -> str:
        """Return the visible text of a meter."""
        return await self.page.inner_text(f"[data-meter={meter}] [data-digits]")


async def test_whole_job_lifecycle_is_shown_and_ended_in_a_browser(tmp_path: Path) -> None:
    home, pictures = tmp_path / "home", Path(os.environ.get("GPUWARDEN_PICTURES") or tmp_path)
    (tmp_path / "policy.toml").write_text("[local]\nunsandboxed = true\nnetwork = true\n")  # the job posts its metrics
    ctx = quick_warden(home)
    scopes = ("--scope", "read", "--scope", "submit")
    token = await typed(home, "token", "create", "agent", *scopes, wanted=SECRET)
    with serving(home) as url:
        async with (
            browsing(permissions=["clipboard-write"]) as page,
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=300) as http,
            Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
        ):
            page.set_default_timeout(60_000 * PATIENCE)
            window, talk = Watcher(page, url), Talk(client)
            link = await to_thread.run_sync(lambda: gpuwarden(home, "dashboard", "--no-browser").stdout.strip())
            await page.goto(link)
            await page.wait_for_selector("[data-empty=running]")
            await window.picture(pictures, "nothing")

            # An agent submits over MCP, and the open page shows it without a reload.
            job = await talk.launched(script=TRAINER)
            await page.click(f"[data-list=running] li[data-key={job}] a.title")
            await page.wait_for_selector("[data-state-of][data-state=running]")

            # The curve moves, and the meter ticks.
            await page.wait_for_selector("canvas")
            await until(page, "document.querySelectorAll('[data-points] tr').length > 4")
            first, amount = await page.inner_text("[data-legend]"), await window.digits("cost")
            await until(page, f"document.querySelector('[data-legend]').innerText !== {first!r}")
            await until(page, f"document.querySelector('[data-meter=cost] [data-digits]').innerText !== {amount!r}")
            await window.picture(pictures, "curve")

            # The agent requests the teardown too early. The page explains why it can't be approved there.
            asked = await talk.call("teardown_request", job_id=job, verb="terminate")
            assert asked["state"] == "blocked", asked
            await page.click(f"[data-list=events] a:text('teardown/{asked['ticket']}')")
            refused = await page.inner_text("main")
            assert "TD-COPY-001" in refused and f"gpuwarden check {job}" in refused, refused
            assert await page.locator("[data-sign], [data-terminal]").count() == 0
            await window.picture(pictures, "refused")

            await window.go(f"/jobs/{job}")
            for half in home.rglob("half"):
                half.unlink()
            await page.wait_for_selector("[data-state-of][data-state=succeeded]")
            await window.picture(pictures, "succeeded")
            assert metering(ctx), "finished is not stopped"

            assert (await talk.call("pull_artifacts", job_id=job))["files"] == 1
            assert (await talk.call("verify_checkpoint", job_id=job))["verdict"] == "proven"
            asked = await talk.call("teardown_request", job_id=job, verb="terminate")
            assert asked["state"] == "awaiting_human", asked
            ticket = asked["ticket"]

            # A user at a terminal allows a passkey to be registered in this browser.
            await authenticator(window)
            code = await typed(home, "passkey", "add", "laptop", wanted=CODE)
            await page.goto(f"{url}/passkeys")
            await page.fill("[name=code]", code)
            await page.click("[data-register] button")
            await page.wait_for_selector("[data-outcome]:text('laptop')")
            assert not await page.is_visible("[data-registered]"), "the list as it was before"
            await window.picture(pictures, "passkey")

            await window.go(f"/jobs/{job}")
            await window.picture(pictures, "proven")
            await window.go("/")
            await window.picture(pictures, "waiting")
            await page.click(f"li[data-key={ticket}] a[href*=approve]")
            assert "model.safetensors" in await page.inner_text(".facts-text")
            await window.picture(pictures, "question")
            await page.click("[data-sign]")
            await soon(lambda: read_teardown(ctx.ledger, ticket).state, good=lambda state: state == "verified_stopped")
            assert not await page.is_visible("[data-terminal], [data-sign]")
            await window.picture(pictures, "approved")

            # The machine is gone, and the meter has stopped.
            assert not metering(ctx)
            await window.go(f"/jobs/{job}")
            await until(page, "document.querySelector('[data-meter=cost]').dataset.running === 'no'")
            assert await page.inner_text("dd [data-text=step]") != "-", "how far it came is still known"
            amount = await window.digits("cost")
            await window.settle(2)
            assert await window.digits("cost") == amount
            await window.picture(pictures, "gone")
            await window.go("/")
            await page.wait_for_selector("[data-empty=running]")
            assert await page.is_visible(f"[data-list=ended] li[data-key={job}]")
            assert not await page.is_visible(f"[data-list=ended] li[data-key={job}] [data-f=rate]")
            await window.picture(pictures, "ended")
            assert not window.wrong, window.wrong
    granted = ctx.ledger.last(f"teardown/{ticket}", ApprovalGranted)
    assert granted is not None and (granted.data.channel, granted.data.by) == ("page", "passkey laptop")
    steps = [point.step for point in ctx.metrics.points(job, "train_loss").points]
    assert len(steps) >= 30 and steps == list(range(len(steps))), "no point was lost on its way"
