"""Approve on the page: only with a passkey or a code from a terminal, once, and for the facts that were shown."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from approving_kit import FROM_PAGE, SHOWN_CODE, asked, authenticator, coded, entered, mark_of, shown_digest
from browser_kit import CHROMIUM, opened
from cli_kit import Life
from doors import answer, at_terminal, gpuwarden, quick_warden
from gpuwarden.core.errors import Conflict, NotFound, Refused
from gpuwarden.core.policy import Approval, hash_pin
from gpuwarden.interfaces.cli.approval import Terminal, grant_spending, open_spending, user
from gpuwarden.interfaces.cli.page_code import show_code
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.ledger.events import (
    ApprovalCodeMade,
    ApprovalCodeWrong,
    ApprovalGranted,
    PasskeyRegistered,
    PasskeyUsed,
    ReceiptIssued,
)
from gpuwarden.lifecycle.records import read_teardown
from gpuwarden.lifecycle.teardown.approval_codes import TRIES
from gpuwarden.lifecycle.teardown.gate import request
from gpuwarden.lifecycle.teardown.passkeys import allow, allowed, passkeys, register, remove
from http_kit import bearer, client, serving
from page_kit import EVIL, World, busy_world
from real_parts import need
from terminal import Typed
from waiting import soon
from wording import Wording

pytestmark = pytest.mark.anyio
REGISTERED = PasskeyRegistered(credential="Y3JlZA", public_key="a2V5", site="localhost")


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return busy_world(tmp_path / "home")


# ------------------------------------------------------------------------------------------------------- access


async def test_page_shows_the_same_facts_and_command_as_the_terminal(world: World) -> None:
    async with entered(world.ctx) as (_, http):
        page = (await http.get("/approve/r7mixt")).text
    for text in ("mixtral-sft", "runpod", "$23.92/h", "$287.00", "gpuwarden approve r7mixt"):
        assert text in page
    assert "data-sign" not in page, "no passkey is registered"


@pytest.mark.attack("page", "A job's name, platform and store carry markup into the question and the terminal")
async def test_names_in_a_question_are_escaped(world: World) -> None:
    world.add("receipt/revil", ReceiptIssued(
        spec_digest="", facts_digest="", expires_at=world.clock.now() + 600, name=EVIL, platform="runpod",
        ask="above the cap\x1b[2J", artifact_store=f"s3://{EVIL}", price=9.0,
    ))  # fmt: skip
    async with entered(world.ctx) as (_, http):
        page = (await http.get("/approve/revil")).text
        assert "<script>document" not in page and "<img" not in page and "&lt;script&gt;document" in page
        shown = io.StringIO()
        with contextlib.suppress(Refused):
            terminal = Terminal(io.StringIO("no\n"), shown)
            await show_code(world.ctx, "revil", await mark_of(http, "revil"), terminal)
    assert "\x1b" not in shown.getvalue() and "above the cap" in shown.getvalue()


@pytest.mark.attack("page", "An agent presents its bearer token to the routes that approve")
async def test_tokens_cannot_use_approval_routes(world: World) -> None:
    register(world.ctx, allowed(world.ctx, allow(world.ctx, "laptop", "user x")), REGISTERED)
    async with serving(world.ctx) as parts, client(parts, bearer(parts, "read", "submit") | FROM_PAGE) as http:
        for method, path in (
            ("GET", "/approve/r7mixt"), ("POST", "/approve/r7mixt/challenge.json"), ("GET", "/passkeys"),
            ("POST", "/approve/r7mixt/answer.json"), ("POST", "/approve/r7mixt/code.json"),
            ("POST", "/passkeys/challenge.json"), ("POST", "/passkeys/answer.json"),
        ):  # fmt: skip
            assert (await http.request(method, path, json={})).status_code == 403, path


@pytest.mark.attack("page", "A page of another origin lets the browser post an approval")
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
        {"origin": "http://localhost:9999", "sec-fetch-site": "same-site"},
        {"origin": "null", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-origin"},
        FROM_PAGE | {"content-type": "text/plain"},
        FROM_PAGE | {"content-type": "application/x-www-form-urlencoded"},
    ],
)
async def test_other_pages_cannot_post_an_approval(world: World, headers: dict[str, str]) -> None:
    register(world.ctx, allowed(world.ctx, allow(world.ctx, "laptop", "user x")), REGISTERED)
    async with entered(world.ctx) as (parts, http):
        digest = await shown_digest(http, "r7mixt")
        code = await coded(world.ctx, "r7mixt", await mark_of(http, "r7mixt"))
        body = json.dumps({"digest": digest, "code": code})
        async with client(parts, {"content-type": "application/json"} | headers) as other:
            other.cookies.update(http.cookies)
            for what in ("challenge", "code"):
                answer = await other.post(f"/approve/r7mixt/{what}.json", content=body)
                assert answer.status_code in {403, 422}, answer.text
        assert (await asked(http, "r7mixt", digest)).status_code == 200, "the page itself may"


# -------------------------------------------------------------------------------------------------- signed facts


async def test_only_the_current_facts_are_signed(world: World) -> None:
    register(world.ctx, allowed(world.ctx, allow(world.ctx, "laptop", "user x")), REGISTERED)
    async with entered(world.ctx) as (_, http):
        shown = await shown_digest(http, "r7mixt")
        for digest in ("", "d" * 71, "e" * 71, None):
            assert (await asked(http, "r7mixt", digest)).status_code == 403  # type: ignore[arg-type]
        first, second = [(await asked(http, "r7mixt", shown)).json()["options"] for _ in range(2)]
    assert first["challenge"] != second["challenge"] and first["userVerification"] == "required"
    assert [one["id"] for one in first["allowCredentials"]] == ["Y3JlZA"] and first["rpId"] == "localhost"


@pytest.mark.attack("page", "An answer without a signature, of another passkey, or for a question that nobody asked")
async def test_an_answer_that_no_passkey_signed_approves_nothing(world: World) -> None:
    register(world.ctx, allowed(world.ctx, allow(world.ctx, "laptop", "user x")), REGISTERED)
    forged: dict[str, Any] = {
        "id": "Y3JlZA", "rawId": "Y3JlZA", "type": "public-key",
        "response": {"clientDataJSON": "e30", "authenticatorData": "AA", "signature": "AA"},
    }  # fmt: skip
    async with entered(world.ctx) as (_, http):
        for credential in (forged, forged | {"id": "b3RoZXI"}, {}, [], "x", None):
            assert (await asked(http, "r7mixt", await shown_digest(http, "r7mixt"))).status_code == 200
            answer = await http.post("/approve/r7mixt/answer.json", json={"credential": credential})
            assert answer.status_code in {403, 422}, answer.text
            again = await http.post("/approve/r7mixt/answer.json", json={"credential": credential})
            assert "already been used" in again.json()["message"], "a challenge works once, whatever came of it"
    assert world.ctx.ledger.last("receipt/r7mixt", ApprovalGranted) is None
    assert world.ctx.ledger.last("passkey/laptop", PasskeyUsed) is None


async def test_policy_without_the_page_channel_refuses_page_approval(world: World) -> None:
    register(world.ctx, allowed(world.ctx, allow(world.ctx, "laptop", "user x")), REGISTERED)
    world.ctx.policy = world.ctx.policy.model_copy(update={"approval": Approval(channels=("terminal",))})
    async with entered(world.ctx) as (_, http):
        assert (await asked(http, "r7mixt", "e" * 71)).json()["code"] == "refused"


async def test_ip_address_is_pointed_to_localhost(world: World) -> None:
    register(world.ctx, allowed(world.ctx, allow(world.ctx, "laptop", "user x")), REGISTERED)
    async with entered(world.ctx) as (_, http):
        moved = {"host": "127.0.0.1:8741", "origin": "http://127.0.0.1:8741"}
        assert "http://localhost:8741/approve/r7mixt" in (await http.get("/approve/r7mixt", headers=moved)).text
        answer = await http.post("/approve/r7mixt/challenge.json", json={"digest": "e" * 71}, headers=moved)
    assert answer.status_code == 403 and "http://localhost:8741" in answer.json()["hint"]


async def test_raised_price_is_signed_with_its_current_facts(world: World) -> None:
    register(world.ctx, allowed(world.ctx, allow(world.ctx, "laptop", "user x")), REGISTERED)
    rose = ReceiptIssued(
        spec_digest="", facts_digest="", expires_at=world.clock.now() + 60, name="late", platform="vastai",
        job="jlive", price=9.0, ask="the price rose from $2.49/h to $9.00/h",
    )  # fmt: skip
    world.add("receipt/rprice", rose)
    async with entered(world.ctx) as (_, http):
        first = await shown_digest(http, "rprice")
        assert first and (await asked(http, "rprice", first)).status_code == 200
        world.add("receipt/rprice", rose.model_copy(update={"price": 19.0}))
        assert (await asked(http, "rprice", first)).status_code == 403
        assert await shown_digest(http, "rprice") not in {"", first}


@pytest.mark.attack("page", "An approval on the page replaces what a person ordered with the first one")
async def test_approved_spending_is_not_asked_about_again(world: World) -> None:
    ctx = world.ctx
    register(ctx, allowed(ctx, allow(ctx, "laptop", "user x")), REGISTERED)
    async with entered(ctx) as (_, http):
        digest = await shown_digest(http, "r7mixt")
        grant_spending(ctx, open_spending(ctx, "r7mixt"), "terminal", "user x", "terminate", 500.0)
        assert await shown_digest(http, "r7mixt") == ""
        assert (await asked(http, "r7mixt", digest)).json()["code"] == "conflict"


# ------------------------------------------------------------------------------------------------- registering


async def test_registration_code_works_once_and_expires(world: World) -> None:
    ctx = world.ctx
    code = allow(ctx, "laptop", "user x")
    for wrong in ("", "AAAA-AAAA-AAAA-AAAA", code[:-1]):
        with pytest.raises(Refused):
            allowed(ctx, wrong)
    permit = allowed(ctx, code.lower().replace("-", " "))
    register(ctx, permit, REGISTERED)
    with pytest.raises(Refused):
        allowed(ctx, code)
    with pytest.raises(Conflict):
        register(ctx, permit, REGISTERED)
    with pytest.raises(Conflict):
        allow(ctx, "laptop", "user x")
    late = allow(ctx, "phone", "user x")
    world.clock.time += 301
    with pytest.raises(Refused):
        allowed(ctx, late)
    assert [one.name for one in passkeys(ctx)] == ["laptop"]
    remove(ctx, "laptop", "user x")
    assert passkeys(ctx) == [] and code.replace("-", "") not in "".join(e.text for e in ctx.ledger.events())


# -------------------------------------------------------------------------------------- codes from a terminal


async def send(http: httpx2.AsyncClient, ticket: str, code: object, digest: str | None = None) -> dict[str, Any]:
    """Send a code with the digest from the page, or with another one."""
    body = {"digest": await shown_digest(http, ticket) if digest is None else digest, "code": code}
    return dict((await http.post(f"/approve/{ticket}/code.json", json=body)).json())


async def test_terminal_code_approves_the_shown_facts_once(world: World) -> None:
    ctx = world.ctx
    async with entered(ctx) as (_, http):
        mark, digest = await mark_of(http, "r7mixt"), await shown_digest(http, "r7mixt")
        person = Typed("yes")
        await show_code(ctx, "r7mixt", mark, person)
        assert "mixtral-sft" in person.shown and "$23.92/h" in person.shown, "the facts are shown there too"
        code = re.findall(SHOWN_CODE, person.shown)[0]
        assert (await send(http, "r7mixt", f" {code.lower().replace('-', ' ')} "))["ok"]
        granted = ctx.ledger.last("receipt/r7mixt", ApprovalGranted)
        assert granted is not None and granted.data.channel == "page" and user() in granted.data.by
        again = await send(http, "r7mixt", code, digest)
    assert again["code"] == "conflict", "a replay"
    assert len(list(ctx.ledger.events("receipt/r7mixt", kind=ApprovalGranted))) == 1
    stored = "".join(e.text for e in ctx.ledger.events())
    files = b"".join(file.read_bytes() for file in ctx.home.rglob("*") if file.is_file())
    for form in (code, code.replace("-", "")):
        assert form not in stored and form.encode() not in files


@pytest.mark.attack("page", "An agent sees a person's code and sends it from a browser session of its own")
async def test_code_is_refused_in_another_session_or_for_another_ticket(world: World) -> None:
    ctx = world.ctx
    rose = ReceiptIssued(
        spec_digest="", facts_digest="", expires_at=world.clock.now() + 600, name="late", platform="vastai",
        job="jlive", price=9.0, ask="the price rose from $2.49/h to $9.00/h",
    )  # fmt: skip
    world.add("receipt/rprice", rose)
    async with entered(ctx) as (parts, http), client(parts, FROM_PAGE) as agent:
        await agent.get(f"/enter?link={parts.tokens.create_link()}")
        assert await mark_of(agent, "r7mixt") != await mark_of(http, "r7mixt")
        code = await coded(ctx, "r7mixt", await mark_of(http, "r7mixt"))
        for _ in range(7):
            assert (await send(agent, "r7mixt", code))["code"] == "refused"
        assert (await send(http, "rprice", code))["code"] == "refused"
        async with client(parts, bearer(parts, "read", "submit") | FROM_PAGE) as token:
            answer = await token.post("/approve/r7mixt/code.json", json={"code": code})
            assert answer.status_code == 403
        assert (await send(http, "r7mixt", code))["ok"], "what others tried took no try from the person"


@pytest.mark.slow
@pytest.mark.attack("page", "An agent tries codes out in the person's session, many at a time")
async def test_five_wrong_codes_void_the_right_one(world: World, wording: Wording) -> None:
    async with entered(world.ctx) as (_, http):
        code = await coded(world.ctx, "r7mixt", await mark_of(http, "r7mixt"))
        digest = await shown_digest(http, "r7mixt")
        async with anyio.create_task_group() as tasks:
            for wrong in ("", "AAAA-AAAA", code[:-1], code + "2", None, ["x"], {"$ne": 1}, "é" * 90_000):
                tasks.start_soon(send, http, "r7mixt", wrong, digest)
        voided = await send(http, "r7mixt", code)
        assert voided["code"] == "refused"
        wording(voided["message"])
        assert len(list(world.ctx.ledger.events(kind=ApprovalCodeWrong))) == TRIES
        fresh = await coded(world.ctx, "r7mixt", await mark_of(http, "r7mixt"))
        assert (await send(http, "r7mixt", fresh))["ok"]


@pytest.mark.slow
async def test_code_ends_with_time_changed_facts_or_a_newer_code(world: World, wording: Wording) -> None:
    ctx = world.ctx
    async with entered(ctx) as (_, http):
        mark = await mark_of(http, "r7mixt")
        older, newer = await coded(ctx, "r7mixt", mark), await coded(ctx, "r7mixt", mark)
        assert (await send(http, "r7mixt", older))["code"] == "refused"
        world.clock.time += 301
        wording((await send(http, "r7mixt", newer))["message"])
        shown = await shown_digest(http, "r7mixt")
        third = await coded(ctx, "r7mixt", mark)
        receipt = ctx.ledger.last("receipt/r7mixt", ReceiptIssued)
        assert receipt is not None
        world.add("receipt/r7mixt", receipt.data.model_copy(update={"price": 99.0}))
        for digest in (shown, None):
            wording((await send(http, "r7mixt", third, digest))["message"])
    assert ctx.ledger.last("receipt/r7mixt", ApprovalGranted) is None


@pytest.mark.slow
async def test_refusal_wrong_pin_or_unknown_page_gets_no_code(world: World) -> None:
    ctx = world.ctx
    async with entered(ctx) as (_, http):
        mark = await mark_of(http, "r7mixt")
        pinned = Approval(pin_hash=hash_pin("2468"))
        ctx.policy = ctx.policy.model_copy(update={"approval": pinned})
        for answers in (("no",), ("yes", "1111")):
            with pytest.raises(Refused):
                await show_code(ctx, "r7mixt", mark, Typed(*answers))
        for ticket, page in (("r7mixt", "00000000"), ("r7mixt", ""), ("rnone", mark)):
            with pytest.raises(NotFound):
                await show_code(ctx, ticket, page, Typed("yes", "2468"))
        assert not list(ctx.ledger.events(kind=ApprovalCodeMade))
        assert (await send(http, "r7mixt", await coded(ctx, "r7mixt", mark, "yes", "2468")))["ok"]


@pytest.mark.attack("page", "A policy that takes passkeys only is opened by a code of a terminal")
@pytest.mark.parametrize("channels", [("page",), ("terminal",), ()])
async def test_code_needs_the_page_and_terminal_channels(world: World, channels: Any) -> None:
    ctx = world.ctx
    async with entered(ctx) as (_, http):
        mark = await mark_of(http, "r7mixt")
        code = await coded(ctx, "r7mixt", mark)
        ctx.policy = ctx.policy.model_copy(update={"approval": Approval(channels=channels)})
        assert await mark_of(http, "r7mixt") == "", "nothing is offered that is refused"
        assert (await send(http, "r7mixt", code))["code"] == "refused"
        with pytest.raises(Refused):
            await show_code(ctx, "r7mixt", mark, Typed("yes"))


@pytest.mark.slow
@pytest.mark.attack("page", "An agent runs the command that shows a code, and reads its output")
async def test_code_is_shown_only_at_a_terminal(tmp_path: Path) -> None:
    home = tmp_path / "home"
    ctx = quick_warden(home)
    life = Life(ctx)
    await life.waiting()
    ticket = (await request(ctx, life.job_id, "terminate")).record.id
    store = TokenStore(home, ctx.clock)
    secret = store.open_session(store.create_link())
    session = store.principal(secret or "")
    assert session is not None
    words = ("approve", ticket, "--code", session.id)
    piped = await anyio.to_thread.run_sync(lambda: gpuwarden(home, *words, "--json", stdin="yes\n"))
    assert piped.returncode == 1 and answer(piped)["code"] == "refused"
    assert not list(ctx.ledger.events(kind=ApprovalCodeMade))
    says = {"yes": "yes"}
    status, shown = await anyio.to_thread.run_sync(lambda: at_terminal(home, *words, says=says))
    assert status == 0 and re.search(SHOWN_CODE, shown), shown


# --------------------------------------------------------------------------- a whole lifecycle in a real browser


@pytest.mark.prove
@pytest.mark.real("chromium")
async def test_passkey_approves_the_teardown_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("chromium", CHROMIUM is not None)
    monkeypatch.chdir(tmp_path)
    ctx = quick_warden(tmp_path / "home")
    life = Life(ctx)
    await life.waiting()
    ticket = (await request(ctx, life.job_id, "terminate")).record.id
    async with opened(World(ctx, None, {}, None)) as window:  # type: ignore[arg-type]  # the rehearsal's own machines
        page, posted = window.page, list[tuple[str, str]]()
        page.on("request", lambda one: one.method == "POST" and posted.append((one.url, one.post_data or "")))
        cdp, key = await authenticator(window)
        await page.goto(f"{window.base}/passkeys")
        await page.fill("[name=code]", allow(ctx, "laptop", "user x"))
        await page.click("[data-register] button")
        await page.wait_for_selector("[data-outcome]:text('laptop')")

        await page.goto(f"{window.base}/")
        await page.click(f"li[data-key={ticket}] a[href*=approve]")
        assert "model.safetensors" in await page.inner_text(".facts-text")
        await cdp.send("WebAuthn.setUserVerified", {"authenticatorId": key, "isUserVerified": False})
        await page.click("[data-sign]")
        await page.wait_for_selector("[data-outcome].warn")
        assert ctx.ledger.last(f"teardown/{ticket}", ApprovalGranted) is None

        await cdp.send("WebAuthn.setUserVerified", {"authenticatorId": key, "isUserVerified": True})
        await page.click("[data-sign]")
        await page.wait_for_selector("[data-sign][hidden]", state="attached")
        granted = ctx.ledger.last(f"teardown/{ticket}", ApprovalGranted)
        assert granted is not None and (granted.data.channel, granted.data.by) == ("page", "passkey laptop")

        replayed = await page.evaluate(
            """([url, body]) => fetch(url, {method: "POST", headers: {"content-type": "application/json"}, body})
                .then((answer) => answer.json())""",
            list(posted[-1]),
        )

        assert not replayed["ok"] and replayed["code"] in {"conflict", "refused"}
        await soon(lambda: read_teardown(ctx.ledger, ticket).state, good=lambda state: state == "verified_stopped")
        assert read_teardown(ctx.ledger, ticket).state == "verified_stopped"
        used = ctx.ledger.last("passkey/laptop", PasskeyUsed)
        assert used is not None and used.data.digest == granted.data.digest and used.data.sign_count > 0


@pytest.mark.prove
@pytest.mark.real("chromium")
async def test_terminal_code_approves_the_teardown_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("chromium", CHROMIUM is not None)
    monkeypatch.chdir(tmp_path)
    ctx = quick_warden(tmp_path / "home")
    life = Life(ctx)
    await life.waiting()
    ticket = (await request(ctx, life.job_id, "terminate")).record.id
    async with opened(World(ctx, None, {}, None)) as window:  # type: ignore[arg-type]  # the rehearsal's own machines
        page = window.page
        await page.goto(f"{window.base}/approve/{ticket}")
        line = await page.inner_text("[data-approve] .command code")
        *_, given, mark, named = line.split()
        assert given == "--code" and named == ticket
        await page.fill("[data-code] input", "AAAA-AAAA")
        await page.click("[data-code] button")
        await page.wait_for_selector("[data-outcome].warn")
        code = await coded(ctx, ticket, mark)
        await page.fill("[data-code] input", code.lower())
        await page.press("[data-code] input", "Enter")
        await soon(lambda: read_teardown(ctx.ledger, ticket).state, good=lambda state: state == "verified_stopped")
        granted = ctx.ledger.last(f"teardown/{ticket}", ApprovalGranted)
        assert granted is not None and granted.data.channel == "page"
        assert read_teardown(ctx.ledger, ticket).state == "verified_stopped"


@pytest.mark.slow
@pytest.mark.real("chromium")
async def test_passkey_approves_spending_only_with_current_facts(world: World) -> None:
    need("chromium", CHROMIUM is not None)
    async with opened(world) as window:
        page = window.page
        await authenticator(window)
        await page.goto(f"{window.base}/passkeys")
        await page.fill("[name=code]", allow(world.ctx, "laptop", "user x"))
        await page.click("[data-register] button")
        await page.wait_for_selector("[data-outcome]:text('laptop')")
        await page.goto(f"{window.base}/approve/r7mixt")
        dearer = world.ctx.ledger.last("receipt/r7mixt", ReceiptIssued)
        assert dearer is not None
        world.add("receipt/r7mixt", dearer.data.model_copy(update={"price": 99.0, "facts_digest": "f" * 71}))
        await page.click("[data-sign]")
        await page.wait_for_selector("[data-outcome].warn")
        assert world.ctx.ledger.last("receipt/r7mixt", ApprovalGranted) is None
        await page.reload()
        assert "$99.00/h" in await page.inner_text(".facts-text")
        await page.click("[data-sign]")
        await page.wait_for_selector("[data-sign][hidden]", state="attached")
        granted = world.ctx.ledger.last("receipt/r7mixt", ApprovalGranted)
        assert granted is not None and granted.data.digest == "f" * 71 and granted.data.channel == "page"
