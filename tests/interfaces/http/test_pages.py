"""The page over in-memory HTTP: content, wording, escaping, paging, headers, and refusals."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncIterator, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from bench.ledger import House

from gpuwarden.core.sanitize import HIDDEN
from gpuwarden.core.states import Job
from gpuwarden.interfaces.http.pages.job import job_view
from gpuwarden.interfaces.http.pages.static_files import files
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.ledger import events as ev
from gpuwarden.lifecycle.artifacts.proof_steps import StageState, proof_steps
from gpuwarden.lifecycle.artifacts.store_contents import StoreView
from gpuwarden.lifecycle.monitoring.check import CheckedJob
from gpuwarden.lifecycle.records import read_job
from gpuwarden.metrics.points import PostedPoints, Row
from gpuwarden.metrics.store import Batch, MetricStore
from http_kit import bearer, client, serving
from page_kit import EVIL, HOUR, World, busy_world, hostile_world, open_world
from paths import ROOT
from real_parts import amount
from waiting import soon
from wording import Wording

pytestmark = pytest.mark.anyio
PAGES = ("/", "/jobs", "/money", "/platforms", "/knowledge?q=out+of+memory", "/knowledge/OOM-001")


class Read(HTMLParser):
    """All elements and texts of a page, as a browser would see them."""

    VOID = frozenset({"meta", "link", "input", "img", "br"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return busy_world(tmp_path / "home")


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx2.AsyncClient]:
    async with reader(world) as found:
        yield found


@pytest.fixture
def utc() -> Iterator[None]:
    """Set this computer's time zone to UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def reader(world: World) -> httpx2.AsyncClient:
    parts = Serving.over(world.ctx)
    from gpuwarden.interfaces.http.application import build

    parts.app = build(parts)  # type: ignore[attr-defined]
    return client(parts, bearer(parts, "read"))


async def seen(http: httpx2.AsyncClient, path: str) -> dict[str, object]:
    """Return the view after the poll that the first request starts."""

    async def look() -> dict[str, Any]:
        answer = await http.get(path)
        assert answer.status_code == 200, answer.text
        view = answer.json()
        told = not view["flags"].get("silent") and (path != "/now.json" or view["lists"]["accounts"])
        return dict(view) if told else {}

    return await soon(look)


@pytest.mark.slow
async def test_now_page_shows_running_waiting_and_billing_with_commands(http: httpx2.AsyncClient) -> None:
    await seen(http, "/now.json")
    page = Read((await http.get("/")).text)
    for text in (
        "llama-8b-lora",
        "gpuwarden approve t4kz9q",
        "gpuwarden approve r7mixt",
        "$8.41/h",
        "$60.00",
    ):
        assert text in page.text, text
    assert "pod-81c2" in page.text, "a machine that no job here runs on"
    assert "gpuwarden watch --install" in page.texts and "`" not in page.text, (
        "a command in a sentence is marked as code"
    )
    amounts = [a for _, a in page.tags if a.get("data-meter") == "today"]
    # Today's amount is small in the first hours of the day.
    assert float(amounts[0]["data-rate"] or 0) == 8.41 and 0 < float(amounts[0]["data-amount"] or 0) < 40


@pytest.mark.slow
async def test_now_shows_the_newest_step_that_a_job_posted(world: World, http: httpx2.AsyncClient) -> None:
    async def steps() -> dict[str, str]:
        rows = (await http.get("/now.json")).json()["lists"]["running"]
        return {row["key"]: row["progress"].partition(" · ")[0] for row in rows if row["progress"]}

    def post(job: str, step: int, at: float) -> None:
        world.ctx.metrics.write(Batch([PostedPoints(job, (Row("loss", step, round(at * 1e6), 0.5),))]))

    await seen(http, "/now.json")
    known = await soon(steps, good=lambda found: len(found) == 2)
    assert known == {"jlive": "step 2,310/5,000", "jtwin": "step 1,150/5,000"}
    post("jtwin", 4_000, world.clock.now() - HOUR)  # from an earlier attempt, which got further
    post("jlive", 2_400, world.clock.now() + 1)
    assert await soon(steps, good=lambda found: len(found) == 2 and found != known) == {
        "jlive": "step 2,400/5,000",
        "jtwin": "step 1,150/5,000",
    }


@pytest.mark.slow
async def test_first_answer_does_not_wait_for_platforms(world: World) -> None:
    async def never(self: object = None) -> None:
        await anyio.sleep_forever()

    for machines in world.machines.values():
        machines.list = machines.get = never  # type: ignore[method-assign,assignment]
    async with reader(world) as http:
        assert "llama-8b-lora" in (await http.get("/")).text
        page = await http.get("/jobs/jlive")
        view = (await http.get("/jobs/jlive.json")).json()
    assert page.status_code == 200 and view["flags"]["silent"] is True


async def test_job_page_shows_progress_cost_proof_machine_and_log(http: httpx2.AsyncClient) -> None:
    view = await seen(http, "/jobs/jlive.json")
    page = Read((await http.get("/jobs/jlive")).text)
    for text in ("2,310", "5,000", "1h 12m", "97 %", "9.0 GiB", "200.0 GiB"):
        assert text in page.text, text
    assert "step 2308 loss" in page.text
    assert view["lists"]["rungs"][0]["key"] == "declared"  # type: ignore[index]
    assert view["texts"]["to_come"].startswith("$8.2"), "the meter, and the price of what is left"  # type: ignore[index]
    assert view["metrics"] == ["loss", "eval_loss", "learning_rate"]


@pytest.mark.slow
@pytest.mark.usefixtures("utc")
async def test_ending_ordered_in_advance_is_on_the_now_and_job_pages(
    http: httpx2.AsyncClient, wording: Wording
) -> None:
    await seen(http, "/now.json")
    for path in ("/", "/jobs/jlive"):
        assert "15m" in Read((await http.get(path)).text).text, path
    ending = (await http.get("/jobs/jlive.json")).json()["texts"]["ending"]
    wording(ending)
    assert not (await http.get("/jobs/jtwin.json")).json()["texts"]["ending"]


@pytest.mark.usefixtures("utc")
async def test_pages_have_the_expected_wording(tmp_path: Path, wording: Wording) -> None:
    async with reader(busy_world(tmp_path / "home")) as http:
        await seen(http, "/jobs/jlive.json")
        await seen(http, "/now.json")
        for path in ("/", "/jobs/jlive", "/jobs/jnone"):
            page = Read((await http.get(path)).text)
            lines = [text.strip() for text in page.texts if len(text.strip().splitlines()) == 1]  # without the log
            wording("\n".join(dict.fromkeys(lines)))


async def test_job_without_a_machine_shows_its_store(world: World) -> None:
    job = read_job(world.ctx.ledger, "jlive")
    store = StoreView("hf://buckets/me/runs", 3, 5 << 30, ("out/checkpoint-200", EVIL), "the last upload is 2 h old")
    view = job_view(world.ctx, "jlive", CheckedJob(job, None, None, None, artifact_store=store), None)
    (row,) = view["lists"]["store"]
    assert row["name"] == "hf://buckets/me/runs"
    for text in ("5.0 GiB", "out/checkpoint-200", "the last upload is 2 h old"):
        assert text in row["text"]
    assert job_view(world.ctx, "jlive", None, None)["lists"]["store"] == []


async def test_platforms_page_shows_a_danger_clock_of_runpod(world: World, http: httpx2.AsyncClient) -> None:
    await seen(http, "/now.json")
    page = Read((await http.get("/platforms")).text)
    effects = [clock.effect for clock in world.ctx.profile("runpod").danger_clocks]
    assert any(effect in page.text.split("AutoDL")[0] for effect in effects)


async def test_failed_job_page_explains_the_failure_and_next_steps(http: httpx2.AsyncClient) -> None:
    await seen(http, "/jobs/jfail.json")
    page = Read((await http.get("/jobs/jfail")).text)
    assert "OOM-001" in page.text and "gpuwarden pull jfail" in page.text and "exit code 1" in page.text
    assert ("a", "/knowledge/OOM-001") in [(tag, attrs.get("href")) for tag, attrs in page.tags]


@pytest.mark.parametrize("paused", [False, True])
async def test_job_page_shows_the_pause_or_resume_command(world: World, paused: bool) -> None:
    if paused:
        world.run("jlive", 2_310, 5_000, state=Job.CANCELED)
        world.add("job/jlive", ev.PauseRequested.model_validate({"from": "running"}))
        world.add("job/jlive", ev.JobPaused(why="its process saved and ended on request"))
    async with reader(world) as http:
        view = (await http.get("/jobs/jlive.json")).json()
        page = Read((await http.get("/jobs/jlive")).text).text
    command = "gpuwarden resume jlive" if paused else "gpuwarden pause jlive"
    assert [row["command"] for row in view["lists"]["controls"]] == [command]
    assert view["texts"]["state"] == ("paused" if paused else "running")
    assert command in page and view["texts"]["control"] in page


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES)
async def test_each_page_is_well_formed_labelled_and_has_a_skip_link(http: httpx2.AsyncClient, path: str) -> None:
    page = Read((await http.get(path)).text)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("h1") == 1 and tags.count("main") == 1 and tags.count("title") >= 1
    assert [attrs["href"] for tag, attrs in page.tags if attrs.get("class") == "skip"] == ["#main"]
    labelled = [attrs for tag, attrs in page.tags if tag == "progress"]
    assert all(attrs.get("aria-label") for attrs in labelled)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", ["/", "/jobs/jlive", "/nothing/here", "/static/page.css", "/now.json"])
async def test_every_answer_restricts_content_to_this_server(http: httpx2.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    if answer.status_code == 200:
        assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["cross-origin-embedder-policy"] == "require-corp"


def test_page_files_name_no_other_host_and_write_no_markup() -> None:
    for name, (content, _, _) in files().items():
        text = content.decode()
        if name.startswith("vendor/"):
            continue
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
    folder = ROOT / "server/gpuwarden/interfaces/http/pages/templates"
    for file in folder.glob("*.html"):
        text = file.read_text()
        assert not re.search(r"\|\s*safe|autoescape|\sstyle=|\son[a-z]+=|<script>|https?://", text), file.name


async def test_foreign_text_is_escaped_on_every_page(tmp_path: Path) -> None:
    world = hostile_world(tmp_path / "home")
    MetricStore(world.ctx.home).write(Batch(posts=[PostedPoints("jevil", (Row(EVIL[:100], 1, 0, 1.0),))]))
    async with reader(world) as http:
        await seen(http, "/jobs/jevil.json")
        await seen(http, "/now.json")
        for path in ("/", "/jobs", "/jobs/jevil", "/money", f"/knowledge?q={EVIL}", f"/jobs?platform={EVIL}"):
            page = Read((await http.get(path)).text)
            assert [tag for tag, _ in page.tags if tag == "img"] == [], path
            assert all(attrs.get("src", "").startswith("/static/") for tag, attrs in page.tags if tag == "script"), path
            assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs), path
            assert "9107" not in page.text, path
        shown = Read((await http.get("/jobs/jevil")).text).text
        assert "<script>document.title='evil'</script>" in shown, "a log is shown as it is, as text"
        assert "<script>" in Read((await http.get("/")).text).text, "and so is the question of a receipt"


async def test_unknown_ids_and_bad_parameters_get_404_or_422(http: httpx2.AsyncClient) -> None:
    gone = await http.get("/jobs/jnone")
    assert gone.status_code == 404 and "jnone" in Read(gone.text).text
    assert (await http.get("/jobs/jnone.json")).json()["code"] == "not_found"
    for path in (
        "/jobs?state=refused", "/money?days=0", "/money?days=x", "/jobs/jlive/curve.json?from=nan&to=1",
        "/jobs/jlive/curve.json?from=0&to=1e303", "/jobs/jlive/log.json?before=1e300",
    ):  # fmt: skip
        assert (await http.get(path)).status_code == 422, path
    assert (await http.get("/jobs?after=jnone")).status_code == 404
    assert (await http.get("/knowledge/NONE-999")).status_code == 404
    assert (await http.get("/static/../polls.py")).status_code == 404
    assert (await http.get("/static/%2e%2e/polls.py")).status_code == 404


async def test_pages_need_the_read_scope_and_reject_posts(world: World) -> None:
    async with serving(world.ctx) as parts:
        async with client(parts) as nobody:
            assert {(await nobody.get(path)).status_code for path in (*PAGES, "/static/page.css", "/now.json")} == {401}
        async with client(parts, bearer(parts, "submit")) as other:
            assert {(await other.get(path)).status_code for path in PAGES} == {403}
        async with client(parts, bearer(parts, "read", name="reader")) as mine:
            assert {(await mine.post(path)).status_code for path in PAGES} == {405}


async def test_process_secret_is_never_shown_on_a_page(world: World) -> None:
    secret = "s3cr3t-value-of-mine"
    world.ctx.env = {"HF_TOKEN": secret}
    world.run("jlive", 10, 20, why=f"it printed {secret}", log=f"token {secret}\n")
    async with reader(world) as http:
        view = await seen(http, "/jobs/jlive.json")
        page = (await http.get("/jobs/jlive")).text
        older = await http.get("/jobs/jlive/log.json?before=20")
    assert secret not in json.dumps(view) + page + older.text and HIDDEN in page


@pytest.mark.slow
async def test_curve_includes_point_times_on_request(world: World, http: httpx2.AsyncClient) -> None:
    values = enumerate([1.0, math.nan, 2.0])
    rows = tuple(Row("loss", n, n * 1_800_000_000, value) for n, value in values)
    world.ctx.metrics.write(Batch([PostedPoints("jdone", rows)]))
    curve = (await http.get("/jobs/jdone/curve.json?metric=loss&x=time")).json()
    assert (curve["at"], curve["odd_at"]) == ([None, 1_800, 3_600], [1_800])
    assert "at" not in (await http.get("/jobs/jdone/curve.json?metric=loss&x=step")).json()


@pytest.mark.slow
async def test_curve_has_gaps_and_marks_at_nonfinite_values(http: httpx2.AsyncClient) -> None:
    curve = (await http.get("/jobs/jlive/curve.json?metric=loss")).json()
    assert curve["odd"] == [770] and curve["y"][curve["x"].index(770)] is None and curve["total"] == 2_310
    assert len(curve["x"]) <= 2_001 and curve["x"] == sorted(curve["x"])
    part = (await http.get("/jobs/jlive/curve.json?metric=loss&from=100&to=120")).json()
    assert part["x"] == list(range(100, 121)) and part["total"] == 21
    few = (await http.get("/jobs/jlive/curve.json?metric=loss&points=50")).json()
    assert few["total"] == 2_310 and 40 < len(few["x"]) < 60
    assert (await http.get("/jobs/jpast0/curve.json?metric=loss")).json()["x"] == []


async def test_job_without_posted_points_shows_the_runners_metrics(tmp_path: Path) -> None:
    world = open_world(tmp_path / "home")
    world.rent("jplain", "plain")
    world.run("jplain", 120, 200)
    async with reader(world) as http:
        assert (await seen(http, "/jobs/jplain.json"))["metrics"] == ["loss"]
        curve = (await http.get("/jobs/jplain/curve.json?metric=loss")).json()
    assert curve["x"][0] == 0 and curve["x"][-1] == 120 and not curve["odd"]


async def test_a_job_is_found_by_a_part_of_its_name(http: httpx2.AsyncClient) -> None:
    for path, wanted in (("name=LLAMA-8b-lora", ["jtwin", "jlive"]), ("name=-b&platform=runpod", ["jtwin"])):
        found = (await http.get(f"/jobs.json?{path}")).json()["lists"]["jobs"]
        assert sorted(row["key"] for row in found) == sorted(wanted)
        page = Read((await http.get(f"/jobs?{path}")).text)
        assert any(tag == "input" and attrs.get("value") == path[5:].split("&")[0] for tag, attrs in page.tags)


async def test_job_and_cost_lists_can_be_followed(world: World) -> None:
    async with reader(world) as http:
        for path, live in (("/jobs?state=running", "/jobs.json?"), ("/money?days=7", "/money.json?days=7")):
            tags = Read((await http.get(path)).text).tags
            address = next(attrs["data-live"] or "" for tag, attrs in tags if tag == "body")
            assert address.startswith(live)
            lists = (await http.get(address)).json()["lists"]
            keys = {row["key"] for rows in lists.values() for row in rows}
            assert keys and keys <= {attrs.get("data-key") for _, attrs in tags}
        for path in ("/jobs?platform=runpod", "/jobs?project=x", "/jobs?after=jlive"):
            body = next(attrs for tag, attrs in Read((await http.get(path)).text).tags if tag == "body")
            assert "data-live" not in body, "these filters read each job"
        for wrong in ("/jobs.json?state=refused", "/jobs.events?state=refused", "/money.json?days=0"):
            assert (await http.get(wrong)).status_code == 422


@pytest.mark.prove
@pytest.mark.endurance
async def test_thousands_of_jobs_are_paginated(tmp_path: Path) -> None:
    house = House(tmp_path / "house", "vastai")
    house.grow(amount(2_000, 10_000))
    parts = Serving.over(house.ctx)
    from gpuwarden.interfaces.http.application import build

    parts.app = build(parts)  # type: ignore[attr-defined]
    async with client(parts, bearer(parts, "read")) as http:
        path, ids = "/jobs?platform=vastai", list[str]()
        for _ in range(3):
            page = Read((await http.get(path)).text)
            keys = [attrs.get("data-key") for tag, attrs in page.tags if tag == "li"]
            ids += [key for key in keys if key and key != "older"]
            path = next(attrs["href"] or "" for _, attrs in page.tags if attrs.get("rel") == "next")
        now = await http.get("/")
        money = Read((await http.get("/money?days=90")).text)
    assert len(ids) == len(set(ids)) == 150 and "after=" in path and "platform=vastai" in path
    assert len(now.content) < 100_000, "an overview has what runs, not all that ever ran"
    assert len([1 for tag, _ in money.tags if tag == "li"]) < 80


async def test_ladder_confirms_only_proven_rungs(world: World) -> None:
    held = {step.stage: step.state for step in proof_steps(world.ctx, read_job(world.ctx.ledger, "jpast0"))}
    assert held["declared"] is StageState.YES and held["stored"] is StageState.UNASKED
    assert StageState.YES not in {held["copied"], held["equal"], held["loaded"]}, (
        "the record of that pull is not on this disk"
    )
