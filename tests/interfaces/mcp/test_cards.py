"""Cards in a conversation: the clients that get them, their contents, and their rendering in a real browser.

`GPUWARDEN_PICTURES` names a folder for screenshots.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mcp.client.client import Client
from mcp.client.extension import ClientExtension

from browser_kit import audited, until
from gpuwarden.core.sanitize import HIDDEN
from gpuwarden.core.states import Job
from gpuwarden.interfaces.http.pages.cards import curve_line, curve_texts, document, odd_line
from gpuwarden.interfaces.mcp import cards
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.metrics.points import PostedPoints, Row
from gpuwarden.metrics.store import Batch, Curve, Marker, MetricStore
from lifecycle_kit import clock_of_today
from page_kit import EVIL, World, busy_world, hostile_world, open_world
from real_parts import need
from waiting import soon
from wording import Wording

if TYPE_CHECKING:
    from playwright.async_api import Frame, Page

pytestmark = pytest.mark.anyio
MODES = ["legacy", "auto"]
HTML = "text/html;profile=mcp-app"
URIS = {"check_job": "ui://gpuwarden/job.html", "list_instances": "ui://gpuwarden/machines.html"}


class ShowsCards(ClientExtension):
    """A client that shows MCP Apps."""

    identifier = "io.modelcontextprotocol/ui"

    def settings(self) -> dict[str, Any]:
        return {"mimeTypes": [HTML]}


class ShowsOthers(ShowsCards):
    """A client that shows some other kind of app."""

    def settings(self) -> dict[str, Any]:
        return {"mimeTypes": ["text/uri-list"]}


def client_of(world: World, mode: str = "auto", *, shows: ClientExtension | None = None) -> Client:
    return Client(make_server(world.ctx), mode=mode, extensions=[shows] if shows else None)  # type: ignore[arg-type]


def raw(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


async def card_in(world: World, tool: str, **arguments: str) -> dict[str, Any]:
    """Call a tool as a client that shows cards, and return the whole result."""
    async with client_of(world, shows=ShowsCards()) as client:
        return raw(await client.call_tool(tool, arguments))


# --------------------------------------------------------------------------------------------- clients that get cards


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_cards_are_offered_only_to_clients_that_show_cards(tmp_path: Path, mode: str) -> None:
    world = busy_world(tmp_path / "home")
    seen: dict[str, Any] = {}
    for shows in (None, ShowsOthers(), ShowsCards()):
        async with client_of(world, mode, shows=shows) as client:
            listed = {tool["name"]: tool for tool in raw(await client.list_tools())["tools"]}
            results = [
                raw(await client.call_tool("check_job", {"job_id": "jlive"})),
                raw(await client.call_tool("list_instances", {})),
            ]
            resources = [r["uri"] for r in raw(await client.list_resources())["resources"]]
            assert not [uri for uri in resources if uri.startswith("ui:")]
            seen[type(shows).__name__] = listed, results
    plain, others, cards_too = seen["NoneType"], seen["ShowsOthers"], seen["ShowsCards"]
    assert plain[0] == others[0]
    assert "ui" not in json.dumps([tool.get("_meta", {}) for tool in plain[0].values()])
    for _, results in (plain, others):
        assert not any(cards.VIEW in (result.get("_meta") or {}) for result in results)
    for name, tool in cards_too[0].items():
        meta = tool.pop("_meta")
        assert meta["ui"] == {"visibility": ["model"], **({"resourceUri": URIS[name]} if name in URIS else {})}, name
        assert {**tool, **({"_meta": rest} if (rest := {k: v for k, v in meta.items() if k != "ui"}) else {})} == plain[
            0
        ][name]
    for with_card, without in zip(cards_too[1], plain[1], strict=True):
        assert with_card["_meta"][cards.VIEW]
        assert with_card["structuredContent"].keys() == without["structuredContent"].keys()
        texts = [json.loads(result["content"][0]["text"]) for result in (with_card, without)]
        assert texts[0].keys() == texts[1].keys()


@pytest.mark.parametrize("mode", MODES)
async def test_each_card_can_be_read_and_asks_for_no_host(tmp_path: Path, mode: str) -> None:
    async with client_of(open_world(tmp_path / "home"), mode, shows=ShowsCards()) as client:
        assert client.server_capabilities.extensions is not None
        assert "io.modelcontextprotocol/ui" in client.server_capabilities.extensions
        for uri in URIS.values():
            (content,) = raw(await client.read_resource(uri))["contents"]
            assert content["mimeType"] == HTML and content["uri"] == uri
            closed: dict[str, list[str]] = {
                "connectDomains": [], "resourceDomains": [], "frameDomains": [], "baseUriDomains": [],
            }  # fmt: skip
            assert content["_meta"]["ui"]["csp"] == closed and "permissions" not in content["_meta"]["ui"]
            assert len(content["text"]) < 64_000


async def test_answer_survives_a_failed_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no card")

    monkeypatch.setattr("gpuwarden.interfaces.http.pages.cards.job_view", fails)
    result = await card_in(busy_world(tmp_path / "home"), "check_job", job_id="jlive")
    assert result["structuredContent"]["state"] == "running" and not result.get("isError")
    assert cards.VIEW not in (result.get("_meta") or {}) and "no card" in caplog.text


async def test_an_error_has_no_card(tmp_path: Path) -> None:
    result = await card_in(open_world(tmp_path / "home"), "check_job", job_id="nobody")
    assert result["isError"] and cards.VIEW not in (result.get("_meta") or {})


# ------------------------------------------------------------------------------------------------------------- contents


@pytest.mark.parametrize("kind", ["job", "machines"])
def test_card_contains_no_network_access_or_tool_calls(kind: Any) -> None:
    text = document(kind)
    assert not re.search(r"https?:|//[a-z]|fetch\(|XMLHttp|WebSocket|EventSource|sendBeacon|import |import\(", text)
    assert not re.search(r"tools/call|ui/message|open-link|update-model-context|resources/read", text)
    assert not re.search(r"<(a|form|iframe|img|link|object|embed|base)\b|\shref=|\ssrc=|\son[a-z]+=|\sstyle=", text)
    assert text.count("<script") == text.count("</script>") == 1
    methods = set(re.findall(r'method: "([^"]+)"', text))
    assert methods == {"ui/initialize", "ui/notifications/initialized", "ui/notifications/size-changed"}


async def test_a_view_is_small_and_names_no_secret(tmp_path: Path) -> None:
    world = hostile_world(tmp_path / "home")
    world.ctx.env = {"HF_TOKEN": "hf_" + "q" * 34}
    world.run("jevil", 10, 20, why=f"{EVIL} {world.ctx.env['HF_TOKEN']}" * 20, alerts=())
    noise = tuple(Row(f"m{n}{EVIL[:80]}", step, 0, float(step % 7)) for n in range(20) for step in range(400))
    MetricStore(world.ctx.home).write(Batch(posts=[PostedPoints("jevil", noise)]))
    for tool, arguments in (("check_job", {"job_id": "jevil"}), ("list_instances", {})):
        text = json.dumps((await card_in(world, tool, **arguments))["_meta"][cards.VIEW])
        assert world.ctx.env["HF_TOKEN"] not in text
        assert HIDDEN in text or tool == "list_instances"
        assert len(text) < 32_000 and '"href"' not in text


def test_curve_path_has_gaps_at_nonfinite_values(wording: Wording) -> None:
    curve = Curve((0.0, 1.0, 3.0, 4.0), (2.0, 1.0, 0.5, 1.0), (Marker(2.0, "nan"),), 5, 1, False)
    assert curve_line(curve) == "M0.0 3.0L0.0 3.0L80.0 63.0M240.0 93.0L240.0 93.0L320.0 63.0"
    assert odd_line(curve) == "M160.0 96L160.0 84"
    texts = curve_texts("loss", curve)
    assert re.findall(r"[\d.]+", texts["curve"]) == ["2", "0", "1", "4", "0.5"], "from, to and lowest"
    wording(f"{texts['curve']}\n{texts['odd']}")
    flat, none = Curve((7.0,), (1e300,), (), 1, 0, False), Curve((), (), (Marker(1.0, "inf"),), 1, 1, False)
    assert curve_line(flat) == "M0.0 3.0L0.0 3.0" and curve_line(none) == odd_line(none) == ""
    assert curve_texts("loss", none)["curve"] == ""


async def test_total_meter_counts_machines_that_may_bill(tmp_path: Path, wording: Wording) -> None:
    view = (await card_in(busy_world(tmp_path / "home"), "list_instances"))["_meta"][cards.VIEW]
    rows = {row["job"]: row for row in view["lists"]["machines"]}
    assert view["meters"]["total"]["rate"] == pytest.approx(2.49 + 1.89 + 3.29 + 0.74 + 0.44)
    assert rows["jlive"]["curve"].startswith("M0.0 ")
    assert view["meters"]["total"]["amount"] == pytest.approx(2.1 * 2.49 + 0.8 * 1.89 + 5 * 3.29 + 4 * 0.74, rel=0.02)
    wording(view["texts"]["hidden"])
    wording(f"{rows['jlive']['name']}\n{rows['jlive']['proof']}", "llama-8b-lora", "vastai")
    wording(rows[""]["name"], "runpod")


# ------------------------------------------------------------------------------------------------ in a real browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOST, SANDBOX = "http://host.test/", "http://sandbox.test/"
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "media-src 'self' data:; connect-src 'self'; frame-src 'self'; object-src 'none'; base-uri 'self'"
)
"""The policy that the extension requires of a host for a card that declares no domains."""
HOST_PAGE = """<!doctype html><meta name="viewport" content="width=device-width"><style>
body { margin: 0; background: #888 } iframe { border: 0; width: 100%; display: block }</style>
<iframe id="outer" src="http://sandbox.test/" sandbox="allow-scripts allow-same-origin"></iframe>
<script>
const outer = document.querySelector("#outer");
window.said = [];
window.give = (message) => outer.contentWindow.postMessage({ jsonrpc: "2.0", ...message }, "*");
addEventListener("message", ({ data, source }) => {
  if (source !== outer.contentWindow) return;
  said.push(data);
  if (data.method === "ui/notifications/sandbox-proxy-ready") {
    give({ method: "ui/notifications/sandbox-resource-ready", params: { html: window.card } });
  } else if (data.method === "ui/initialize") {
    const hostContext = { theme: window.theme, displayMode: "inline", containerDimensions: { maxHeight: 6000 } };
    const hostInfo = { name: "test", version: "1" };
    const result = { protocolVersion: "2026-01-26", hostInfo, hostCapabilities: { serverTools: {} }, hostContext };
    give({ id: data.id, result });
  } else if (data.method === "ui/notifications/initialized") {
    give({ method: "ui/notifications/tool-input", params: { arguments: {} } });
    if (window.result) give({ method: "ui/notifications/tool-result", params: window.result });
  } else if (data.method === "ui/notifications/size-changed") outer.style.height = data.params.height + "px";
});
</script>"""
SANDBOX_PAGE = """<!doctype html><style>
html, body { margin: 0; height: 100% } iframe { border: 0; width: 100%; height: 100%; display: block }
</style><script>
let inner = null;
addEventListener("message", ({ data, source }) => {
  if (inner && source === inner.contentWindow) return parent.postMessage(data, "*");
  if (source !== parent) return;
  if (data.method !== "ui/notifications/sandbox-resource-ready") return inner.contentWindow.postMessage(data, "*");
  inner = document.createElement("iframe");
  inner.setAttribute("sandbox", "allow-scripts");
  inner.srcdoc = data.params.html;
  document.body.append(inner);
});
const ready = { jsonrpc: "2.0", method: "ui/notifications/sandbox-proxy-ready", params: {} };
addEventListener("load", () => parent.postMessage(ready, "*"));
</script><body></body>"""


class Shown:
    """A card inside a host, with all errors and all requests to other addresses."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on(
            "console", lambda said: said.type in {"error", "warning"} and self.wrong.append(f"console: {said.text}")
        )
        page.on("request", lambda one: one.url in {HOST, SANDBOX} or self.wrong.append(f"left: {one.url}"))

    @property
    def card(self) -> Frame:
        return self.page.frames[-1]

    async def until(self, condition: str) -> None:
        """Wait for a condition in the card, whose frame is inside the sandbox's frame inside the page."""
        await soon(lambda: len(self.page.frames) == 3)
        await until(self.card, condition)

    async def methods(self) -> list[str]:
        """Return the distinct methods that the card sent, in order."""
        found = await self.page.evaluate("window.said.map((one) => one.method ?? 'answer')")
        return [name for name in dict.fromkeys(found) if name != "ui/notifications/sandbox-proxy-ready"]

    async def picture(self, name: str) -> None:
        if folder := os.environ.get("GPUWARDEN_PICTURES"):
            height = await self.card.evaluate("Math.ceil(document.documentElement.getBoundingClientRect().height)")
            width = await self.page.evaluate("innerWidth")
            await self.page.set_viewport_size({"width": width, "height": height})  # only the viewport is painted
            await self.page.wait_for_timeout(300)
            await self.page.screenshot(path=Path(folder) / f"card-{name}.png", full_page=True)


@asynccontextmanager
async def shown(
    kind: Any, result: dict[str, Any] | None, theme: str = "light", width: int = 360
) -> AsyncIterator[Shown]:
    """Show a card in a host with another origin, as the extension describes, and pass it the result of its tool."""
    need("chromium", CHROMIUM is not None)
    playwright_api = pytest.importorskip("playwright.async_api")
    async with playwright_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-background-networking"])
        page = await browser.new_page(viewport={"width": width, "height": 800}, color_scheme="light")
        window = Shown(page)
        headers = {"content-security-policy": POLICY}
        await page.route("**/*", lambda route: route.abort())
        await page.route(HOST, lambda route: route.fulfill(body=HOST_PAGE, content_type="text/html"))
        await page.route(
            SANDBOX, lambda route: route.fulfill(body=SANDBOX_PAGE, content_type="text/html", headers=headers)
        )
        given = json.dumps({"card": document(kind), "result": result, "theme": theme})
        await page.add_init_script(f"if (window === top) Object.assign(window, {given})")
        await page.goto(HOST)
        try:
            yield window
        finally:
            await browser.close()


browser_test = [pytest.mark.slow, pytest.mark.real("chromium")]


@pytest.mark.parametrize("theme", [pytest.param(name, marks=browser_test) for name in ("light", "dark")])
async def test_host_renders_the_job_card(tmp_path: Path, theme: str) -> None:
    world = busy_world(tmp_path / "home", clock_of_today())
    result = await card_in(world, "check_job", job_id="jlive")
    async with shown("job", result, theme) as window:
        await window.until("!document.querySelector('main').hidden")
        text = await window.card.inner_text("main")
        for part in (
            "llama-8b-lora",
            "running",
            "2,310",
            "5,000",
            "$2.49/h",
        ):
            assert part in text, part
        assert await window.card.evaluate("document.querySelector('[data-drawn=curve]').getTotalLength()") > 300
        assert await window.card.evaluate("document.querySelectorAll('.ladder > li').length") == 5
        first = await window.card.inner_text("[data-meter=cost] [data-digits]")
        await window.until(f"document.querySelector('[data-meter=cost] [data-digits]').textContent > '{first}'")
        ground = await window.card.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(251, 250, 247)", "dark": "rgb(19, 21, 23)"}[theme]
        over = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await window.card.evaluate(over) <= 0
        await window.picture(f"job-{theme}")
        other = "dark" if theme == "light" else "light"
        await window.page.evaluate(
            "(theme) => give({method: 'ui/notifications/host-context-changed', params: {theme}})", other
        )
        await window.until(f"getComputedStyle(document.body).backgroundColor !== '{ground}'")
        assert await window.methods() == [
            "ui/initialize", "ui/notifications/initialized", "ui/notifications/size-changed",
        ]  # fmt: skip
        assert not window.wrong, window.wrong


@pytest.mark.prove
@pytest.mark.real("chromium")
async def test_a_card_is_accessible(tmp_path: Path) -> None:
    world = busy_world(tmp_path / "home", clock_of_today())
    for kind, tool, arguments in (("job", "check_job", {"job_id": "jfail"}), ("machines", "list_instances", {})):
        for theme in ("light", "dark"):
            async with shown(kind, await card_in(world, tool, **arguments), theme) as window:
                await window.until("!document.querySelector('main').hidden")
                assert not await audited(window.card)


@pytest.mark.parametrize("width", [pytest.param(width, marks=browser_test) for width in (360, 800)])
async def test_host_renders_the_machines_card(tmp_path: Path, width: int) -> None:
    result = await card_in(busy_world(tmp_path / "home", clock_of_today()), "list_instances")
    async with shown("machines", result, "dark", width) as window:
        await window.until("!document.querySelector('main').hidden")
        text = await window.card.inner_text("main")
        for part in ("llama-8b-lora", "vastai", "pod-81c2", "$8.85/h"):
            assert part in text, part
        assert await window.card.evaluate("document.querySelectorAll('svg.spark:not([hidden])').length") == 2
        await window.picture(f"machines-{width}")
        assert not window.wrong, window.wrong


@pytest.mark.slow
@pytest.mark.real("chromium")
@pytest.mark.attack("card", "A job writes markup into its metrics' names, its alerts, its end and its machine's id")
async def test_foreign_text_never_runs_as_script_in_a_card(tmp_path: Path) -> None:
    world = hostile_world(tmp_path / "home")
    MetricStore(world.ctx.home).write(Batch(posts=[PostedPoints("jevil", (Row(EVIL[:100], 1, 0, 1.0),))]))
    for kind, tool, arguments in (("job", "check_job", {"job_id": "jevil"}), ("machines", "list_instances", {})):
        result = await card_in(world, tool, **arguments)
        view = result["_meta"][cards.VIEW]
        if kind == "machines":
            view["lists"]["machines"][0]["name"] = EVIL
        else:  # as from a server that doesn't check names
            view["texts"]["name"] = EVIL
            view["lines"]["curve"] = f'M0 0L9 9"/>{EVIL}'
        async with shown(kind, result) as window:
            await window.until("!document.querySelector('main').hidden")
            assert "<script>document.title='evil'" in await window.card.inner_text("main")
            found = "document.querySelectorAll('img, main script, a, iframe, [onerror]').length"
            assert await window.card.evaluate(found) == 0
            assert await window.card.evaluate("document.title") == "gpuwarden"
            if kind == "job":
                assert (
                    await window.card.evaluate("document.querySelector('[data-drawn=curve]').getAttribute('d')") == ""
                )
            await window.picture(f"evil-{kind}")
            assert not window.wrong, window.wrong


@pytest.mark.slow
@pytest.mark.real("chromium")
@pytest.mark.attack("card", "An agent has a card shown and a host that forwards whatever it sends, to approve by it")
async def test_card_starts_no_action_on_any_input(tmp_path: Path) -> None:
    world = busy_world(tmp_path / "home", clock_of_today())
    for kind, tool, arguments in (("job", "check_job", {"job_id": "jdone"}), ("machines", "list_instances", {})):
        async with shown(kind, await card_in(world, tool, **arguments)) as window:
            await window.until("!document.querySelector('main').hidden")
            for button in await window.card.query_selector_all("button"):
                await button.click()
            for key in ("Enter", "Space", "Tab"):
                await window.page.keyboard.press(key)
            for method in ("ping", "ui/resource-teardown", "tools/call", "sampling/createMessage"):
                await window.page.evaluate("(method) => give({id: method, method, params: {}})", method)
            answers = await soon(
                lambda: window.page.evaluate("window.said.filter((one) => one.method === undefined)"),
                good=lambda found: len(found) == 4,
            )
            assert [("error" in one, one["id"]) for one in answers] == [
                (False, "ping"), (False, "ui/resource-teardown"),
                (True, "tools/call"), (True, "sampling/createMessage"),
            ]  # fmt: skip
            allowed = {"ui/initialize", "ui/notifications/initialized", "ui/notifications/size-changed", "answer"}
            assert set(await window.methods()) == allowed
            said = json.dumps(await window.page.evaluate("window.said"))
            assert "jdone" not in said and "t4kz9q" not in said


@pytest.mark.slow
@pytest.mark.real("chromium")
async def test_meter_of_an_old_view_does_not_tick(tmp_path: Path) -> None:
    world = busy_world(tmp_path / "home", clock_of_today())
    result = await card_in(world, "check_job", job_id="jlive")
    result["_meta"][cards.VIEW]["at"] -= 3_600
    async with shown("job", result) as window:
        await window.until("!document.querySelector('[data-old]').hidden")
        assert await window.card.get_attribute("[data-meter=cost]", "data-running") == "no"


@pytest.mark.slow
@pytest.mark.real("chromium")
async def test_card_without_a_view_shows_the_answer_text(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    refused = await card_in(world, "check_job", job_id="nobody")
    stripped: dict[str, Any] = {"content": [{"type": "text", "text": EVIL}]}
    wrong_kind = {"content": [{"type": "text", "text": "other"}], "_meta": {cards.VIEW: {"card": "machines"}}}
    for result, words in ((refused, "nobody"), (stripped, EVIL), (wrong_kind, "other")):
        async with shown("job", result) as window:
            await window.until("!document.querySelector('[data-plain]').hidden")
            assert words in await window.card.inner_text("[data-plain]")
            assert await window.card.evaluate("document.querySelector('main').hidden")
            assert not window.wrong, window.wrong


@pytest.mark.slow
@pytest.mark.real("chromium")
async def test_newer_answer_replaces_the_older_answer(tmp_path: Path) -> None:
    world = busy_world(tmp_path / "home", clock_of_today())
    first = await card_in(world, "check_job", job_id="jlive")
    world.run("jlive", 5_000, 5_000, state=Job.SUCCEEDED, why="the command ended with exit code 0", exit_code=0)
    then = await card_in(world, "check_job", job_id="jlive")
    async with shown("job", first) as window:
        await window.until("document.querySelector('[data-text=state]').textContent === 'running'")
        await window.page.evaluate("(params) => give({method: 'ui/notifications/tool-result', params})", then)
        await window.until("document.querySelector('[data-text=state]').dataset.state === 'succeeded'")
        assert "gpuwarden pull jlive" in await window.card.inner_text("main")
