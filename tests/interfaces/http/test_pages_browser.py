"""The page in a real browser: it looks right, is fast and quiet, works by keyboard, and sends nothing to other hosts.

`GPUWARDEN_PICTURES` names a folder for screenshots, `GPUWARDEN_AXE` the file axe.min.js from axe-core.
"""

from __future__ import annotations

import asyncio
import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from browser_kit import audited, opened, until
from counting import counted_lines
from gpuwarden.core.states import Job
from gpuwarden.interfaces.http.pages import following
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.ledger import events as ev
from gpuwarden.ledger.events import PasskeyRegistered
from gpuwarden.lifecycle.teardown.passkeys import allow, allowed, register
from gpuwarden.metrics.points import PostedPoints, Row
from gpuwarden.metrics.store import Batch, MetricStore
from page_kit import EVIL, HOUR, busy_world, hostile_world, open_world
from waiting import soon

if TYPE_CHECKING:
    from playwright.async_api import Page, Response, Route

pytestmark = [pytest.mark.anyio, pytest.mark.prove, pytest.mark.real("chromium")]
LOOKS = [("light", 1200), ("dark", 360)]
OTHER_LOOKS = [pytest.param(look, marks=pytest.mark.prove) for look in (("dark", 1200), ("light", 360))]
BROKEN = """[...document.querySelectorAll(".facts dd > :first-child")]
    .filter((figure) => figure.getClientRects().length > 1).map((figure) => figure.textContent)"""
PATHS = (
    "/", "/jobs", "/jobs/jlive?with=jtwin", "/jobs/jfail", "/money", "/platforms", "/knowledge?q=out+of+memory",
    "/approve/r7mixt", "/passkeys",
)  # fmt: skip


@pytest.mark.parametrize(
    "look",
    [LOOKS[0], pytest.param(LOOKS[1], marks=pytest.mark.prove), *OTHER_LOOKS],
    ids=lambda look: f"{look[0]}-{look[1]}",
)
async def test_each_page_fits_its_window_and_is_accessible(tmp_path: Path, look: tuple[str, int]) -> None:
    pictures = Path(os.environ.get("GPUWARDEN_PICTURES") or tmp_path)
    world = busy_world(tmp_path / "home")
    key = PasskeyRegistered(credential="Y3JlZA", public_key="a2V5", site="localhost")
    register(world.ctx, allowed(world.ctx, allow(world.ctx, "laptop", "user x")), key)
    async with opened(world, look) as window:
        found = []
        for n, path in enumerate(PATHS):
            await window.go(path)
            await window.page.screenshot(path=pictures / f"{look[0]}-{look[1]}-{n}.png", full_page=True)
            over = await window.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            found += [f"{path} is {over} px too wide"] if over > 0 else []
            found += [f"{path} breaks the figure {text}" for text in await window.page.evaluate(BROKEN)]
            found += [f"{path} {problem}" for problem in await audited(window.page)]
        assert not found, "\n".join(found)
        assert not window.wrong, window.wrong


async def test_two_pages_are_pictured_for_the_documentation(tmp_path: Path) -> None:
    """Update the pictures with `GPUWARDEN_PICTURES=docs/pictures pytest -m prove -k pictured`."""
    pictures = Path(os.environ.get("GPUWARDEN_PICTURES") or tmp_path)
    stepping = "document.querySelector('[data-list=running]').innerText.match(/step /g)?.length === 2"
    drawn = "document.querySelectorAll('.tile path.run1').length === 3"
    async with opened(busy_world(tmp_path / "home"), ("light", 1280)) as window:
        for name, path, height, last, ready in (
            ("now", "/", 1140, "[data-list=running] > li:last-child", stepping),
            ("job", "/jobs/jlive?with=jtwin", 1250, "[data-overview]", drawn),
        ):
            await window.go(path)
            if name == "job":
                await window.page.select_option("[data-smoothing]", "0.9")
            await until(window.page, ready)
            box = await window.page.locator(last).bounding_box()
            assert box and box["y"] + box["height"] < height, f"{last} ends at {box}"
            await window.page.screenshot(
                path=pictures / f"{name}.png", full_page=True, clip={"x": 0, "y": 0, "width": 1280, "height": height}
            )


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_curve_is_visible_in_each_color_scheme(tmp_path: Path, scheme: str) -> None:
    async with opened(busy_world(tmp_path / "home"), (scheme, 1200)) as window:
        await window.go("/jobs/jlive?with=jtwin")
        await window.page.wait_for_selector("canvas")
        for other in (
            scheme,
            "dark" if scheme == "light" else "light",
        ):  # first the system's scheme, then a switch while the page is open
            await window.page.emulate_media(color_scheme=other)  # type: ignore[arg-type]
            for run in ("run0", "run1"):
                await soon(partial(pixels, window.page, run), good=lambda found: found > 300)


async def pixels(page: Page, run: str) -> int:
    """Return the number of plot pixels in a run's color, which differs from the background color."""
    found = await page.evaluate(
        """(run) => {
            const probe = document.querySelector(`.swatch.${run}`);
            const [r, g, b] = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
            const ground = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
            if (Math.abs(r - ground[0]) + Math.abs(g - ground[1]) + Math.abs(b - ground[2]) < 120) return -1;
            const canvas = document.querySelector("canvas");
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let count = 0;
            for (let n = 0; n < data.length; n += 4) {
                const near = Math.abs(data[n] - r) + Math.abs(data[n + 1] - g) + Math.abs(data[n + 2] - b) < 24;
                if (data[n + 3] > 128 && near) count += 1;
            }
            return count;
        }""",
        run,
    )
    return int(found)


async def test_meter_ticks_and_an_update_keeps_unchanged_rows(tmp_path: Path) -> None:
    world = busy_world(tmp_path / "home")
    async with opened(world) as window:
        await window.go("/")
        await window.settle()
        first = await window.page.inner_text("[data-meter=today] [data-digits]")
        await window.page.evaluate(
            """() => {
                window.moved = [];
                window.rows = [...document.querySelectorAll("li[data-key]")];
                const note = (one) => one.target.matches("ul") && window.moved.push(one.target.dataset.list);
                const watch = new MutationObserver((all) => all.forEach(note));
                watch.observe(document.body, {childList: true, subtree: true});
            }"""
        )
        world.clock.advance(60)
        await window.settle(2)
        assert await window.page.inner_text("[data-meter=today] [data-digits]") > first
        assert await window.page.evaluate("window.moved") == [], "no row was made again"
        assert await window.page.inner_text("[data-list=warnings] code") == "gpuwarden watch --install"
        world.rent("jnew", "just-begun", hours=0.01)
        ask = ev.ReceiptIssued(
            spec_digest="f" * 71, facts_digest="f" * 71, expires_at=world.clock.now() + HOUR, name="more",
            platform="runpod", price=9.0, ask="above the cap",
        )  # fmt: skip
        world.add("receipt/rnew1", ask)
        await window.page.wait_for_selector("li[data-key=rnew1] code:text('gpuwarden approve rnew1')", timeout=120_000)
        await window.page.wait_for_selector("li[data-key=jnew]", timeout=120_000)
        assert "more on runpod" in await window.page.inner_text("[data-announce]")
        assert await window.page.evaluate("window.rows.every((row) => row.isConnected)"), "the others stayed"
        assert (await window.page.title()).startswith("3 ")
        assert not window.wrong, window.wrong


@pytest.mark.attack("page", "A job writes markup into its log, its metrics' names, its alerts and its end")
async def test_foreign_text_never_runs_as_script(tmp_path: Path) -> None:
    world = hostile_world(tmp_path / "home")
    MetricStore(world.ctx.home).write(Batch(posts=[PostedPoints("jevil", (Row(EVIL[:100], 1, 0, 1.0),))]))
    async with opened(world) as window:
        for path in ("/", "/jobs/jevil", "/jobs"):
            await window.go(path)
            assert await window.page.evaluate("document.querySelectorAll('img, main script').length") == 0
            assert "evil" not in (await window.page.title()).replace("evil · gpuwarden", ""), path
        await window.go("/jobs/jevil")
        assert "<script>" in await window.page.inner_text("[data-tail]")
        assert "<script>" in await window.page.inner_text("[data-list=alerts]")
        await until(window.page, "document.querySelector('[data-metric]').textContent.includes('<script>')")
        assert not window.wrong, window.wrong


async def test_pages_are_usable_by_keyboard(tmp_path: Path) -> None:
    async with opened(busy_world(tmp_path / "home")) as window:
        page = window.page
        await window.go("/")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.hasAttribute('data-copy')")
        name = await page.evaluate("document.activeElement.textContent")
        await page.keyboard.press("Enter")
        await until(page, f"document.activeElement.textContent !== {name!r}")
        await window.go("/jobs/jlive")
        await page.fill("[data-find]", "step 2300")
        assert (await page.inner_text("[data-count]")).count("1") == 2
        await page.fill("[data-find]", "loss 0.6")
        before = await page.inner_text("[data-count]")
        await page.press("[data-find]", "Enter")
        assert before != await page.inner_text("[data-count]")
        await page.focus("[data-plot]")
        await page.keyboard.press("+")
        await page.wait_for_selector("[data-reset]:not([hidden])")
        await until(page, "document.querySelector('[data-points] tbody th').textContent !== '0'")
        await page.keyboard.press("Escape")
        await page.wait_for_selector("[data-reset][hidden]", state="attached")


async def test_older_log_lines_are_inserted_before_the_others(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    world.rent("jlong", "long")
    lines = [f"line {n} of a long log\n" for n in range(8_000)]
    world.run("jlong", 5, 10, log="".join(lines))
    async with opened(world) as window:
        await window.go("/jobs/jlong")
        while await window.page.is_visible("[data-older]"):
            before = await window.page.evaluate("document.querySelector('pre.log').textContent.length")
            await window.page.click("[data-older]")
            await until(window.page, f"document.querySelector('pre.log').textContent.length > {before}")
            await window.page.wait_for_selector("[data-older]:not(:disabled), [data-older][hidden]", state="attached")
        whole = await window.page.evaluate("document.querySelector('pre.log').textContent")
        assert whole == "".join(lines)


async def test_search_continues_in_older_lines(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    world.rent("jlong", "long")
    lines = [f"line {n} {'needle' if n in {5, 7_990} else 'of'} a long log\n" for n in range(8_000)]
    world.run("jlong", 5, 10, log="".join(lines))
    async with opened(world) as window:
        await window.go("/jobs/jlong")
        page = window.page
        await page.fill("[data-find]", "needle")
        assert await page.inner_text("[data-count]") == "1 of 1"
        await page.press("[data-find]", "Enter")
        await until(page, "document.querySelector('[data-count]').textContent === '1 of 2'")
        await page.fill("[data-find]", "in no line")
        await page.press("[data-find]", "Enter")
        await page.wait_for_selector("[data-older][hidden]", state="attached")
        assert await page.evaluate("document.querySelector('pre.log').textContent") == "".join(lines)


async def test_a_smoothed_curve_shows_its_average_and_its_points(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    world.rent("jwave", "wave")
    world.run("jwave", 99, 100)
    rows = tuple(Row("loss", n, 0, float(n % 2)) for n in range(100))
    MetricStore(world.ctx.home).write(Batch(posts=[PostedPoints("jwave", rows)]))
    async with opened(world) as window:
        await window.go("/jobs/jwave")
        await window.page.wait_for_selector("canvas")
        spread = await pixels(window.page, "run0")
        await window.page.select_option("[data-smoothing]", "0.99")
        await until(window.page, "document.querySelector('[data-legend]').textContent.includes('0.99')")
        await window.page.hover("[data-plot] .u-over", position={"x": 400, "y": 100})
        shown = await window.page.inner_text("[data-legend] .value")
        assert abs(float(shown.split()[0]) - 0.5) < 0.02, "the average of a wave between 0 and 1"
        assert await pixels(window.page, "run0") < spread / 3, "the points themselves are faint"


async def test_each_metric_has_a_small_curve_selectable_by_keyboard(tmp_path: Path) -> None:
    chosen = "document.querySelector('.tile[aria-pressed=true]').textContent"
    async with opened(busy_world(tmp_path / "home")) as window:
        page = window.page
        await window.go("/jobs/jlive?with=jtwin")
        await until(page, "document.querySelectorAll('.tile path.run1').length === 3")
        assert (await page.evaluate(chosen)).startswith("loss")
        await page.focus("li:nth-child(3) > .tile")
        await page.keyboard.press("Enter")
        await until(
            page, "document.querySelector('[data-plot]').getAttribute('aria-label').startsWith('learning_rate')"
        )
        assert (await page.evaluate(chosen)).startswith("learning_rate")
        assert await page.evaluate("document.activeElement.className") == "tile"
        assert await page.input_value("[data-metric]") == "learning_rate" and not window.wrong, window.wrong


async def test_time_axis_is_chosen_by_keyboard_and_kept_in_the_url(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    for job, pace in (("jslow", 36), ("jfast", 18)):  # seconds per step
        world.rent(job, job)
        world.run(job, 199, 200)
        rows = tuple(Row("loss", n, (1_700_000_000 + n * pace) * 1_000_000, float(n)) for n in range(5_000))
        MetricStore(world.ctx.home).write(Batch(posts=[PostedPoints(job, rows)]))
    label = "document.querySelector('[data-plot]').getAttribute('aria-label')"
    async with opened(world) as window:
        page = window.page
        await window.go("/jobs/jslow?with=jfast")
        await until(page, f"{label}.includes('at step 4999')")
        await page.focus("[data-metric]")
        await page.keyboard.press("Tab")
        await page.keyboard.press("ArrowDown")
        await until(page, f"{label}.includes('0 at 0 h to 4999 at 49.99 h')")
        assert "0 at 0 h to 4999 at 24.995 h" in await page.evaluate(label)
        assert page.url.endswith("/jobs/jslow?with=jfast&x=time")
        await page.focus("[data-plot]")
        for _ in range(5):
            await page.keyboard.press("+")
        # All steps of each run that are within the hours of the selected part.
        await until(page, f"{label}.includes('2422 at 24.22 h to 2577 at 25.77 h')")
        assert "4843 at 24.215 h to 4999 at 24.995 h" in await page.evaluate(label)
        await page.reload()
        await until(page, f"{label}.includes('4999 at 49.99 h')")
        await page.click("button:text('Compare')")
        await until(page, f"{label}.includes('4999 at 49.99 h')")
        assert "x=time" in page.url and not window.wrong, (page.url, window.wrong)


async def test_slow_curve_is_drawn_while_the_job_runs_and_requested_again_at_job_end(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    world.rent("jslow", "slow")
    world.run("jslow", 5, 10)
    MetricStore(world.ctx.home).write(Batch(posts=[PostedPoints("jslow", (Row("loss", 1, 0, 1.0),))]))
    view = """active => document.dispatchEvent(
        new CustomEvent("view", {detail: {metrics: ["loss"], flags: {active}}}))"""
    async with opened(world) as window:
        page = window.page
        held: asyncio.Queue[Route] = asyncio.Queue()
        await page.route("**/jslow.*", lambda route: route.abort())  # the page gets only the views below
        await page.route("**/curve.json*", held.put_nowait)
        await page.goto(f"{window.base}/jobs/jslow")

        async def nothing_before() -> None:
            """Assert that no other request is pending: the route reports this one after all earlier ones."""
            await page.evaluate("void fetch('/curve.json?last')")
            last = await held.get()
            assert last.request.url.endswith("?last")
            await last.fulfill(status=204)

        first = await held.get()
        for active in (True, True, False):
            await page.evaluate(view, active)
        await nothing_before()
        await first.continue_()
        async with page.expect_response("**/curve.json?metric=*"):
            await (await held.get()).continue_()
        await page.wait_for_selector("canvas")
        await page.evaluate(view, False)
        await nothing_before()
        assert all("Failed to load" in text for text in window.wrong), window.wrong


@pytest.mark.prove
async def test_curve_of_a_million_points_is_reduced_for_the_page(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    world.rent("jmill", "million")
    world.run("jmill", 999_999, 1_000_000)
    store = MetricStore(world.ctx.home)
    for start in range(0, 1_000_000, 50_000):
        rows = (
            Row("loss", n, 0, math.exp(-n / 3e5) + (n * 7_919 % 1_000) / 9_000) for n in range(start, start + 50_000)
        )
        store.write(Batch(posts=[PostedPoints("jmill", tuple(rows))]))
    with counted_lines() as lines:
        async with opened(world) as window:
            await window.page.goto(f"{window.base}/knowledge")
            answers: list[Response] = []
            window.page.on("response", lambda one: answers.append(one))
            before = lines()
            await window.page.goto(f"{window.base}/jobs/jmill")
            await window.page.wait_for_selector("canvas", timeout=120_000)
            ran = lines() - before
            assert "1,000,000" in await window.page.inner_text("[data-legend]")
            curves = [len(await one.body()) for one in answers if "/curve" in one.url]
            assert curves and sum(curves) < 200_000, "bytes"
            assert ran < 1_000_000, "lines of Python, the browser's driver included"


async def test_a_link_works_from_a_file_too_and_only_once(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    async with opened(world) as window:
        page = window.page
        await page.context.clear_cookies()
        link = f"{window.base}/enter?link={TokenStore(tmp_path / 'home', world.clock).create_link()}"
        file = tmp_path / "link.html"
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={link}">')
        await page.goto(file.as_uri())
        await page.wait_for_selector("[data-connection]", state="attached")
        assert "link=" not in page.url
        assert await page.evaluate("document.cookie") == "", "no script reads the session"
        again = await page.goto(link)
        assert again is not None and again.status == 401


async def test_page_reports_a_lost_server_and_follows_the_next_server(tmp_path: Path) -> None:
    world = busy_world(tmp_path / "home")
    async with opened(world) as window:
        await window.go("/")
        await window.server.stop(killed=True)
        await window.page.wait_for_selector("[data-connection]:not(:empty)", timeout=120_000)
        assert "llama-8b-lora" in await window.page.inner_text("main")
        world.rent("jnew", "just-begun", hours=0.01)
        await window.server.start()
        await window.page.wait_for_selector("li[data-key=jnew]", timeout=60_000)
        await until(window.page, "document.querySelector('[data-connection]').textContent === ''")


async def test_page_follows_one_stream_only_while_visible(tmp_path: Path) -> None:
    world = busy_world(tmp_path / "home")
    async with opened(world) as window:
        asked: list[str] = []
        window.page.on("request", lambda one: asked.append(one.url.removeprefix(window.base)))
        await window.go("/jobs/jlive")
        await window.settle(2)
        assert asked.count("/jobs/jlive.events") == 1 and "/jobs/jlive.json" not in asked
        await window.server.holds(1)
        for hidden, streams in ((True, 0), (False, 1)):
            await window.page.evaluate(
                """(hidden) => {
                    Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
                    document.dispatchEvent(new Event("visibilitychange"));
                }""",
                hidden,
            )
            await window.server.holds(streams)
        await window.settle()
        await window.go("/platforms")
        await window.server.holds(0)
        assert not window.wrong, window.wrong


async def test_page_polls_without_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_STREAMS", 0)
    world = busy_world(tmp_path / "home")
    async with opened(world) as window:
        asked: list[str] = []
        window.page.on("request", lambda one: asked.append(one.url.removeprefix(window.base)))
        await window.go("/")
        await window.settle(2)
        world.rent("jnew", "just-begun", hours=0.01)
        await window.page.wait_for_selector("li[data-key=jnew]", timeout=120_000)
        assert asked.count("/now.json") >= 2
        assert asked.count("/now.events") < asked.count("/now.json"), "a stream is not tried each time"
        assert all("503" in text for text in window.wrong), window.wrong


async def test_job_page_shows_the_end_of_the_job(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    world.rent("jend", "ends")
    world.run("jend", 5, 10)
    async with opened(world) as window:
        await window.go("/jobs/jend")
        assert await window.page.inner_text("[data-state-of]") == "running"
        world.run("jend", 10, 10, state=Job.SUCCEEDED, why="the command ended with exit code 0", exit_code=0)
        await window.page.wait_for_selector("[data-state-of][data-state=succeeded]", timeout=120_000)
        await window.page.wait_for_selector("code:text('gpuwarden pull jend')", timeout=120_000)


async def test_job_and_cost_lists_update_live(tmp_path: Path) -> None:
    world = busy_world(tmp_path / "home")
    async with opened(world) as window:
        await window.go("/jobs?state=running")
        await window.page.evaluate("window.rows = [...document.querySelectorAll('li[data-key]')]")
        world.rent("jnew", "just-begun", hours=0.01)
        await window.page.wait_for_selector("li[data-key=jnew]", timeout=120_000)
        assert await window.page.evaluate("window.rows.every((row) => row.isConnected)"), "the others stayed"
        await window.go("/money?days=7")
        total = await window.page.inner_text("[data-text=total]")
        heights = "[...document.querySelectorAll('[data-column]')].map((one) => one.getAttribute('height'))"
        before = await window.page.evaluate(heights)
        world.rent("jdear", "an-expensive-hour", hours=3.0)
        await window.page.wait_for_selector("[data-list=job] a[href='/jobs/jdear']", timeout=120_000)
        assert await window.page.inner_text("[data-text=total]") != total
        assert len(before) == 7 and await window.page.evaluate(heights) != before
        assert not window.wrong, window.wrong
