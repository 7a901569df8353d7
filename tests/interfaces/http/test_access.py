"""Access over HTTP: tokens, scopes, jobs, and browser sessions. No secret is left behind anywhere."""

from __future__ import annotations

import logging
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from filelock import FileLock

from doors import JOB, quick_warden
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest, Conflict, DiskError, NotFound
from gpuwarden.interfaces.http.serving import Serving, Settings
from gpuwarden.interfaces.http.tokens import FILE, MAX_SESSIONS, TokenStore
from gpuwarden.job_tokens import job_of, job_token
from gpuwarden.lifecycle.context import Context
from http_kit import BASE, JSON, bearer, call, client, opened, serving

pytestmark = pytest.mark.anyio


class Later(SystemClock):
    """A clock that can be set ahead."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.fixture
def ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.chdir(tmp_path)
    ctx = quick_warden(tmp_path / "home")
    ctx.clock = Later()
    return ctx


@pytest.fixture
async def server(ctx: Context) -> AsyncIterator[Serving]:
    async with serving(ctx) as parts:
        yield parts


async def status(parts: Serving, headers: dict[str, str], path: str = "/mcp", method: str = "POST") -> int:
    async with client(parts, headers | JSON) as http:
        answer: httpx2.Response = await http.request(method, path, json=opened() if method == "POST" else None)
        return answer.status_code


# -------------------------------------------------------------------------------------------------- no token, no answer


@pytest.mark.attack("http", "calls every path without a token, or with one that is not one")
async def test_paths_require_a_valid_token(server: Serving) -> None:
    wrong = ["", "Bearer ", "Bearer gwt_wrong", "Basic Z3c6Z3c=", "Bearer " + "x" * 5000, "Bearer \u00e9", "gwt_x"]
    paths = ["/", "/mcp", "/nothing", "/leave", "/enter/", "/enter/../mcp", "//enter", "/enter/x"]
    for secret in wrong:
        async with client(server, {"Authorization": secret.encode("latin-1")} if secret else {}) as http:
            for path in paths:
                for method in ("GET", "POST", "OPTIONS", "HEAD"):
                    answer = await http.request(method, path)
                    assert answer.status_code == 401, (method, path, secret[:20], answer.text)
                    assert answer.headers["www-authenticate"].startswith("Bearer")
                    assert method == "HEAD" or answer.json()["code"] == "auth_failed"


async def test_browser_gets_errors_as_html(server: Serving) -> None:
    async with client(server, {"Accept": "text/html,*/*;q=0.8"}) as http:
        for path, status in (("/", 401), ("/enter?link=<b>used", 401)):
            answer = await http.get(path)
            assert answer.status_code == status and answer.headers["content-type"].startswith("text/html")
            assert "gpuwarden dashboard" in answer.text and "<b>" not in answer.text
        assert "gpuwarden dashboard /approve/t-1<" in (await http.get("/approve/t-1")).text
        for hostile in ("/$(reboot)", "/a;b", "/%0aid", "/<b>"):
            assert "dashboard /" not in (await http.get(hostile)).text
        assert (await http.get("/nothing", headers=bearer(server, "read"))).text.startswith("<!doctype html>")


async def test_a_token_opens_a_session_and_every_answer_has_the_security_headers(server: Serving) -> None:
    async with client(server, bearer(server, "read") | JSON) as http:
        answers = [await http.post("/mcp", json=opened()), await http.get("/nothing"), await http.put("/mcp")]
        assert [a.status_code for a in answers] == [200, 404, 405]
        assert answers[0].headers["mcp-session-id"] and answers[1].json()["code"] == "not_found"
        for answer in answers:
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.attack("http", "uses a token after its end, after its revocation, or one of another installation")
async def test_expired_revoked_and_foreign_tokens_are_refused(server: Serving, ctx: Context, tmp_path: Path) -> None:
    headers = bearer(server, "read", name="laptop", days=1)
    assert await status(server, headers) == 200
    ctx.clock.ahead = 86_399.0  # type: ignore[attr-defined]
    assert await status(server, headers) == 200
    ctx.clock.ahead = 86_401.0  # type: ignore[attr-defined]
    assert await status(server, headers) == 401
    fresh = bearer(server, "read", name="phone")
    assert await status(server, fresh) == 200
    TokenStore(ctx.home, ctx.clock).revoke("phone")  # by another process
    assert await status(server, fresh) == 401
    elsewhere = TokenStore(tmp_path / "other", ctx.clock).create("laptop", ("read",), 1)[1]
    assert await status(server, {"Authorization": f"Bearer {elsewhere}"}) == 401


async def test_token_is_refused_if_the_clock_was_set_back(server: Serving, ctx: Context) -> None:
    headers = bearer(server, "read")
    ctx.clock.ahead = -3_600.0  # type: ignore[attr-defined]
    assert await status(server, headers) == 401


async def test_two_secrets_are_ambiguous_so_neither_counts(server: Serving) -> None:
    good = bearer(server, "read")["Authorization"]
    async with client(server) as http:
        for second in ([("authorization", "Bearer gwt_x")], [("x-api-key", "gwt_x")], [("authorization", good)]):
            answer = await http.get("/", headers=[("authorization", good), *second])
            assert answer.status_code == 401


# -------------------------------------------------------------------------------------------------------- scopes


async def test_reading_tools_need_read_and_spending_tools_need_submit(server: Serving) -> None:
    async with client(server, bearer(server, "read", name="r") | JSON) as http:
        assert (await call(http, "list_instances"))["ok"] is True
        for tool, arguments in {
            "submit_job": JOB,
            "cancel_job": {"job_id": "j1"},
            "pull_artifacts": {"job_id": "j1"},
            "teardown_request": {"job_id": "j1"},
        }.items():
            found = await call(http, tool, **arguments)
            assert found["code"] == "refused" and "submit" in found["message"], found
            assert "gpuwarden token create" in found["hint"]
    assert server.ctx.ledger.events(kind="receipt.issued") == []
    async with client(server, bearer(server, "submit", name="s") | JSON) as http:
        assert (await call(http, "list_instances"))["code"] == "refused"
        assert (await call(http, "submit_job", **JOB))["code"] == "checked"


@pytest.mark.attack("http", "reads jobs with a token that only submits")
async def test_reading_jobs_needs_the_read_scope(server: Serving) -> None:
    async with client(server, JSON) as http:
        for scope, seen in (("submit", False), ("read", True)):
            headers = bearer(server, scope, name=scope)  # type: ignore[arg-type]
            answer = await http.post("/mcp", json=opened(), headers=headers)
            headers |= {"Mcp-Session-Id": answer.headers["mcp-session-id"], "MCP-Protocol-Version": "2025-11-25"}
            for method, params in {
                "resources/list": {},
                "resources/read": {"uri": "gpuwarden://rules"},
                "completion/complete": {
                    "ref": {"type": "ref/resource", "uri": "gpuwarden://jobs/{job_id}"},
                    "argument": {"name": "job_id", "value": ""},
                },
                "logging/setLevel": {"level": "info"},
                "resources/subscribe": {"uri": "gpuwarden://jobs/j1"},
            }.items():
                body = {"jsonrpc": "2.0", "id": 2, "method": method, "params": params}
                found = await http.post("/mcp", json=body, headers=headers)
                assert ("lacks the scope read" not in found.text) is seen, (method, found.text)
            meta = {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}},
            }
            for method in ("tasks/get", "tasks/update", "tasks/cancel"):
                headers = bearer(server, scope, name=f"{scope}-{method[6:]}")  # type: ignore[arg-type]
                headers |= {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method, "Mcp-Name": "x"}
                body = {"jsonrpc": "2.0", "id": 2, "method": method, "params": {"taskId": "x", "_meta": meta}}
                found = await http.post("/mcp", json=body, headers=headers)
                assert ("unknown taskId" in found.text, "lacks the scope read" in found.text) == (seen, not seen)


@pytest.mark.attack("http", "looks through this machine's files with a token that reads")
async def test_read_token_cannot_verify_files_outside_the_folder(
    server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, outside = tmp_path / "work" / "model", tmp_path / "diary"
    for folder in (here, outside):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"a": 1}')
    (here.parent / "way-out").symlink_to(outside)
    monkeypatch.chdir(here.parent)
    async with client(server, bearer(server, "read", name="r") | JSON) as http:
        assert (await call(http, "verify_checkpoint", path="model"))["files"] == 1
        for path in ("..", "/etc", str(outside), "way-out", "~", str(server.ctx.home)):
            for given in ({"path": path}, {"path": "model", "against": path}):
                found = await call(http, "verify_checkpoint", **given)
                assert found["code"] == "bad_request" and "config.json" not in str(found), found


@pytest.mark.attack("http", "takes over another token's MCP session")
async def test_a_session_belongs_to_the_token_that_opened_it(server: Serving) -> None:
    mine, other = bearer(server, "read", "submit", name="mine"), bearer(server, "read", "submit", name="other")
    async with client(server, JSON) as http:
        answer = await http.post("/mcp", json=opened(), headers=mine)
        session = {"Mcp-Session-Id": answer.headers["mcp-session-id"], "MCP-Protocol-Version": "2025-11-25"}
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        assert (await http.post("/mcp", json=ping, headers=mine | session)).status_code == 200
        for method in ("POST", "DELETE"):
            content = {"json": ping} if method == "POST" else {}
            stolen = await http.request(method, "/mcp", headers=other | session, **content)  # type: ignore[arg-type]
            assert stolen.status_code == 404 and "Session not found" in stolen.text
        assert (await http.post("/mcp", json=ping, headers=mine | session)).status_code == 200


# ----------------------------------------------------------------------------------------------------------- jobs


@pytest.mark.attack("http", "forges a job's token, or calls MCP with one")
async def test_a_jobs_token_proves_one_job_and_one_purpose(server: Serving, tmp_path: Path) -> None:
    home = server.ctx.home
    token, key = job_token(home, "j-1", "metrics"), job_token(home, "j-1", "alerts")
    assert job_of(home, token) == ("j-1", "metrics") and job_of(home, key) == ("j-1", "alerts")
    other = job_token(home, "j-2", "metrics")
    forged = [
        other.split(".")[0] + "." + token.split(".")[1],
        key.replace("gwk_", "gwj_"),
        token[:-1],
        token + "A",
        job_token(tmp_path / "other", "j-1", "metrics"),
        "gwj_.",
        "gwj_\u00e9.x",
        "gwj_" + "A" * 400,
    ]
    assert [job_of(home, one) for one in forged] == [None] * len(forged)
    who = server.principal(token)
    assert who is not None and (who.kind, who.job_id, who.scopes) == ("job", "j-1", frozenset({"metrics"}))
    assert await status(server, {"Authorization": f"Bearer {token}"}) == 403
    assert await status(server, {"X-API-Key": key}) == 403


# --------------------------------------------------------------------------------------------------- browser sessions


async def test_a_one_time_link_opens_a_session_that_only_reads(server: Serving) -> None:
    link = server.tokens.create_link()
    async with client(server) as http:
        answer = await http.get("/enter", params={"link": link})
        assert answer.status_code == 200 and "url=/" in answer.text, "a redirect would lose the strict cookie"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
        assert "Secure" not in cookie, "a browser keeps no secure cookie of http://localhost everywhere"
        assert (await http.get("/nothing")).status_code == 404, "the session is known"
        assert (await http.get("/mcp")).status_code == 403, "and is not a client of MCP"
        secret = http.cookies["gpuwarden_session_8741"]
    async with client(server) as http:
        for used in (link, "", "gwl_x", secret):
            assert (await http.get("/enter", params={"link": used})).status_code == 401
        assert (await http.get("/", headers={"Authorization": f"Bearer {secret}"})).status_code == 401
        assert (await http.get("/", headers={"Authorization": f"Bearer {link}"})).status_code == 401
    token = server.tokens.create("t", ("read",), 1)[1]
    async with client(server, cookies={"gpuwarden_session_8741": token}) as http:
        assert (await http.get("/")).status_code == 401, "a token is not a session"


@pytest.mark.parametrize(
    ("to", "loaded"),
    [
        ("/approve/t-1", "/approve/t-1"),
        ("//evil.example", "/"),
        ("https://evil.example", "/"),
        ("/\\evil.example", "/"),
        ('/"><b>', "/"),
        ("/\n/x", "/"),
        ("", "/"),
    ],
)
async def test_link_loads_only_pages_of_this_server(server: Serving, to: str, loaded: str) -> None:
    async with client(server) as http:
        answer = await http.get("/enter", params={"link": server.tokens.create_link(), "to": to})
        assert answer.status_code == 200 and f'content="0;url={loaded}"><a href="{loaded}">' in answer.text


async def test_servers_on_two_ports_keep_separate_sessions(ctx: Context) -> None:
    async with serving(ctx) as one, serving(ctx, Settings(port=8742)) as other:
        async with client(one) as http:
            await http.get("/enter", params={"link": one.tokens.create_link()})
            mine = dict(http.cookies)
        async with client(other) as http:
            http.cookies.update(mine)
            await http.get("/enter", params={"link": one.tokens.create_link()})
            assert len(http.cookies) == 2, "a browser sends both to both, as they are of one host"
            assert (await http.get("/nothing")).status_code == 404


@pytest.mark.attack("http", "lets every browser page try links, so that nobody else gets in")
async def test_wrong_link_is_refused_without_waiting_for_the_lock(server: Serving) -> None:
    link = server.tokens.create_link()
    with FileLock(server.ctx.home / "locks" / "access.lock"):
        async with client(server) as http:
            assert (await http.get("/enter", params={"link": "gwl_" + "x" * 43})).status_code == 401
    async with client(server) as http:
        assert (await http.get("/enter", params={"link": link})).status_code == 200


@pytest.mark.attack("http", "makes a person's browser post from a foreign page")
async def test_session_rejects_requests_from_other_sites(server: Serving) -> None:
    async with client(server) as http:
        await http.get("/enter", params={"link": server.tokens.create_link()})
        for headers in ({}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": BASE, "Sec-Fetch-Site": "same-site"}):
            assert (await http.post("/leave", headers=headers)).status_code == 403
        assert (await http.get("/nothing", headers={"Sec-Fetch-Site": "cross-site"})).status_code == 403
        assert (await http.post("/leave", headers={"Origin": "https://evil.example"})).status_code == 403
        assert (await http.post("/leave", headers={"Origin": BASE})).status_code == 204
        assert (await http.get("/nothing")).status_code == 401, "the session has ended"


async def test_links_and_sessions_end_and_are_bounded(server: Serving, ctx: Context) -> None:
    link = server.tokens.create_link()
    ctx.clock.ahead = 121.0  # type: ignore[attr-defined]
    assert server.tokens.open_session(link) is None
    secrets = [server.tokens.open_session(server.tokens.create_link()) for _ in range(MAX_SESSIONS + 1)]
    assert [server.principal(secret or "") is None for secret in secrets] == [True] + [False] * MAX_SESSIONS
    ctx.clock.ahead = 13 * 3_600.0  # type: ignore[attr-defined]
    assert all(server.principal(secret or "") is None for secret in secrets)


# ------------------------------------------------------------------------------------------------------- the file


def test_token_file_is_private_and_keeps_only_digests(ctx: Context) -> None:
    store = TokenStore(ctx.home, ctx.clock)
    grant, secret = store.create("laptop", ("read", "submit", "read"), 30)
    file = ctx.home / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret not in file.read_text() and grant.digest in file.read_text()
    assert [(g.name, g.scopes) for g in store.listed()] == [("laptop", ("read", "submit"))]
    with pytest.raises(Conflict):
        store.create("laptop", ("read",), 1)
    for name, days in (("", 1.0), ("a\nb", 1.0), ("x" * 65, 1.0), ("x", 0.0), ("x", 367.0), ("x", float("nan"))):
        with pytest.raises(BadRequest):
            store.create(name, ("read",), days)
    assert store.revoke(grant.id).name == "laptop" and store.listed() == []
    with pytest.raises(NotFound):
        store.revoke("laptop")


async def test_unreadable_token_file_denies_access_without_showing_its_path(ctx: Context) -> None:
    store = TokenStore(ctx.home, ctx.clock)
    secret = store.create("laptop", ("read",), 30)[1]
    assert store.principal(secret) is not None
    (ctx.home / FILE).write_text("{")
    with pytest.raises(DiskError):
        store.principal(secret)
    async with serving(ctx) as server, client(server) as http:
        answer = await http.get("/", headers={"Authorization": "Bearer nobody"})
    assert answer.status_code == 503 and answer.json()["code"] == "disk_error" and str(ctx.home) not in answer.text
    (ctx.home / FILE).unlink()
    assert store.principal(secret) is None


@pytest.mark.attack("http", "looks for tokens in the ledger, the logs and the state folder")
async def test_secrets_never_reach_the_ledger_logs_or_state_folder(
    server: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secrets: list[str] = []
    headers = bearer(server, "read", "submit", name="laptop")
    secrets.append(headers["Authorization"].removeprefix("Bearer "))
    secrets.append(server.tokens.create_link())
    async with client(server, headers | JSON) as http:
        found = await call(http, "submit_job", **{**JOB, "name": secrets[0]})
        assert secrets[0] not in str(found), found
        await http.get("/enter", params={"link": secrets[1]})
        secrets.append(http.cookies["gpuwarden_session_8741"])
        await http.get(f"/nothing/{secrets[0]}")
    logs = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith(("gpuwarden", "mcp")))
    for secret in secrets:
        assert secret not in logs
        for file in server.ctx.home.rglob("*"):
            assert not file.is_file() or secret.encode() not in file.read_bytes(), file
