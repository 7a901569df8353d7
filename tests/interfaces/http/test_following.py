"""The streams that keep pages current: content, timing, limits, and the cost of a slow or hostile reader."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from bench.ledger import House

from counting import counted_lines
from gpuwarden.core.errors import DiskError
from gpuwarden.interfaces.http.pages import following as module
from gpuwarden.interfaces.http.pages.following import Following
from gpuwarden.interfaces.http.pages.reading import Pages
from http_kit import bearer, client, listening, serving
from page_kit import busy_world
from real_parts import amount
from waiting import soon

pytestmark = pytest.mark.anyio


class Source:
    """A page whose view a test sets."""

    def __init__(self) -> None:
        self.view: dict[str, Any] = {"at": 1.0, "texts": {"name": "one", "updated": "10:00"}, "meters": {}}
        self.made = 0

    async def __call__(self) -> dict[str, Any]:
        self.made += 1
        return self.view


@pytest.fixture
def streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Following:
    for name in ("SOONEST_S", "DUE_S"):
        monkeypatch.setattr(module, name, 0.0)
    return Following(busy_world(tmp_path / "home").ctx)


async def views(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for text in lines:
        if text.startswith("event: view\ndata: "):
            assert text.endswith("\n\n") and text.count("\n") == 3, "one event"
            yield json.loads(text.split("data: ", 1)[1])


@pytest.mark.slow
async def test_view_is_sent_only_if_more_than_clocks_and_meters_changed(streams: Following) -> None:
    source = Source()
    seen = views(streams.lines("/now.events", "s", source))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(streams._work)
        assert (await anext(seen))["texts"]["name"] == "one"
        source.view = {"at": 2.0, "texts": {"name": "one", "updated": "10:01"}, "meters": {}}
        before = source.made
        await soon(lambda: source.made >= before + 2)
        (board,) = streams._boards.values()
        assert board.version == 1, "only a clock went on"
        assert json.loads(board.text)["at"] == 2.0, "whoever opens the page now gets the newest one"
        source.view = {"at": 3.0, "texts": {"name": "line\nend\r\n\nevent: x", "updated": ""}, "meters": {}}
        assert (await anext(seen))["texts"]["name"] == "line\nend\r\n\nevent: x"
        tasks.cancel_scope.cancel()


async def test_windows_share_one_view_and_no_view_is_made_without_windows(streams: Following) -> None:
    source = Source()
    windows = [streams.lines("/now.events", f"s{n}", source) for n in range(5)]
    for one in windows:
        assert await anext(one) == "retry: 2000\n\n"
    await streams.look()
    assert source.made == 1
    for one in windows:
        assert "one" in await anext(one)
        await one.aclose()  # type: ignore[attr-defined]
    assert streams._boards == {} and not streams._readers
    await streams.look()
    assert source.made == 1


async def test_each_job_state_has_its_own_view(tmp_path: Path) -> None:
    with listening(busy_world(tmp_path / "home").ctx) as (parts, port):
        headers = bearer(parts, "read")
        async with httpx2.AsyncClient(base_url=f"http://localhost:{port}", headers=headers) as http:
            for state in ("running", "succeeded"):
                async with http.stream("GET", f"/jobs.events?state={state}&x=1") as one:
                    view = await anext(views(one.aiter_text()))
                    assert {row["state"] for row in view["lists"]["jobs"]} == {state}


@pytest.mark.attack("http", "opens a page's stream and reads none of it")
async def test_a_slow_reader_gets_the_newest_view_only(streams: Following) -> None:
    source = Source()
    lines = streams.lines("/now.events", "s", source)
    await anext(lines)
    for n in range(100):
        source.view = {"texts": {"name": str(n)}}
        await streams.look()
    assert json.loads((await anext(lines)).split("data: ")[1])["texts"]["name"] == "99"
    (board,) = streams._boards.values()
    assert len(board.text) < 100, "nothing queues up"
    await lines.aclose()  # type: ignore[attr-defined]


async def test_failing_view_does_not_stop_other_streams(streams: Following) -> None:
    async def failing() -> dict[str, Any]:
        raise DiskError("the disk is full")

    source = Source()
    bad, good = streams.lines("/jobs/j1.events", "s", failing), streams.lines("/now.events", "s", source)
    await anext(bad)
    await anext(good)
    await streams.look()
    assert "one" in await anext(good)


@pytest.mark.slow
@pytest.mark.attack("http", "opens streams until no page of anybody else is followed")
@pytest.mark.parametrize("broken", [ValueError("a text that nobody foresaw"), float("nan"), float("inf")])
async def test_broken_page_ends_neither_other_pages_nor_the_server(streams: Following, broken: object) -> None:
    """The task that makes views belongs to the server: if it ended, the server would end."""
    made = 0

    async def breaks() -> dict[str, Any]:
        nonlocal made
        made += 1
        if isinstance(broken, Exception):
            raise broken
        return {"numbers": {"percent": broken}}

    source = Source()
    bad, good = views(streams.lines("/bad.events", "s", breaks)), views(streams.lines("/now.events", "s", source))
    async with streams.running(), anyio.create_task_group() as tasks:
        tasks.start_soon(anext, bad)
        for name in ("two", "three"):
            source.view = {"at": 1.0, "texts": {"name": name}, "meters": {}}
            assert (await anext(good))["texts"]["name"] == name
        await soon(lambda: made >= 2)
        tasks.cancel_scope.cancel()


@pytest.mark.slow
async def test_streams_are_limited_per_token_and_in_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EACH", 2)
    monkeypatch.setattr(module, "MAX_STREAMS", 3)
    with listening(busy_world(tmp_path / "home").ctx) as (parts, port):
        first, second, third = (bearer(parts, "read", name=name) for name in "abc")
        async with httpx2.AsyncClient(base_url=f"http://localhost:{port}") as http:

            async def opened(who: dict[str, str]) -> httpx2.Response:
                return await http.send(http.build_request("GET", "/now.events", headers=who), stream=True)

            held = [await opened(who) for who in (first, first, second)]
            texts = [one.aiter_text() for one in held]
            for one, text in zip(held, texts, strict=True):
                assert one.status_code == 200 and one.headers["content-type"].startswith("text/event-stream")
                assert "retry" in await anext(text)
            assert [(await http.get("/now.events", headers=who)).status_code for who in (first, third)] == [503, 503]
            assert (await http.get("/now.json", headers=first)).status_code == 200, "that page asks instead"
            await held[0].aclose()

            async def admitted() -> bool:
                held.append(await opened(third))
                return held[-1].status_code == 200

            await soon(admitted)
            for one in held:
                await one.aclose()


@pytest.mark.slow
async def test_following_needs_the_read_scope_and_the_same_origin(tmp_path: Path) -> None:
    async with serving(busy_world(tmp_path / "home").ctx) as parts, client(parts) as http:
        submit, read = bearer(parts, "submit", name="s"), bearer(parts, "read", name="r")
        for path in ("/now.events", "/jobs/jlive.events"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=submit)).status_code == 403
            assert (await http.get(path, headers=read | {"origin": "http://evil.example"})).status_code == 403
            assert (await http.post(path, headers=read)).status_code == 405
        assert (await http.get("/jobs/jnone.events", headers=read)).status_code == 404


@pytest.mark.prove
@pytest.mark.endurance
async def test_view_cost_is_proportional_to_jobs_and_its_size_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = amount(2_000, 10_000)
    few, _ = await cost_of_a_view(tmp_path / "few", jobs // 10, monkeypatch)
    many, length = await cost_of_a_view(tmp_path / "many", jobs, monkeypatch)
    assert many < 11 * few, "the pause after a view is four times as long as the view took"
    assert 1_000 < length < 100_000


async def cost_of_a_view(home: Path, jobs: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the number of Python lines run for the second view of `jobs` jobs, and the view's length in bytes."""
    house = House(home, "vastai")
    house.grow(jobs)
    pages = Pages(house.ctx)
    monkeypatch.setattr(pages.polls.everything, "newest", nothing_yet)
    lines = pages.following.lines("/now.events", "s", pages._look_now)  # kept: a view without a reader is not made
    await anext(lines)
    (board,) = pages.following._boards.values()
    with counted_lines() as counted:
        for _ in range(2):
            board.made_at, before = -module.DUE_S, counted()
            await pages.following.look()
        cost = counted() - before
    return cost, len(board.text)


async def nothing_yet(patience_s: float = 0.0) -> None:
    """Stand in for a round over the platforms that hasn't ended."""


async def test_pause_exceeds_the_time_to_make_views(streams: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    source, clock = Source(), [0.0]

    async def slow() -> dict[str, Any]:
        clock[0] += 2.0
        return await source()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise StopIteration
        clock[0] += seconds

    lines = streams.lines("/now.events", "s", slow)
    await anext(lines)
    monkeypatch.setattr(module.anyio, "current_time", lambda: clock[0])
    monkeypatch.setattr(module.anyio, "sleep", pause)
    with pytest.raises(RuntimeError):
        await streams._work()
    assert pauses == [8.0, 8.0, 8.0] and source.made == 3
