"""The server's commands: `token`, which requires a user at a terminal, `serve`, and `dashboard`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from doors import answer, at_terminal, environment, gpuwarden, quick_warden
from gpuwarden.core.errors import Refused
from gpuwarden.core.policy import hash_pin
from gpuwarden.interfaces.cli.tokens import create_token
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.people import current_user
from http_kit import SECRET
from terminal import Typed
from wording import Wording


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.mark.slow
@pytest.mark.attack("http", "makes itself a token from an agent's shell")
def test_token_is_not_created_without_a_terminal(home: Path, wording: Wording) -> None:
    for words in (("token", "create", "mine"), ("token", "create", "mine", "--scope", "submit", "--json")):
        done = gpuwarden(home, *words, stdin="yes\n")
        assert done.returncode == 1 and not SECRET.search(done.stdout + done.stderr)
        if "--json" not in words:
            wording(" ".join((done.stdout + done.stderr).split()))
    assert answer(gpuwarden(home, "token", "list", "--json"))["tokens"] == []
    bad = gpuwarden(home, "token", "create", "mine", "--scope", "approve")
    assert bad.returncode == 2 and "approve" in bad.stdout + bad.stderr, "no token approves"


@pytest.mark.slow
def test_token_is_created_listed_and_revoked(home: Path, wording: Wording) -> None:
    says = {"yes": "yes"}
    code, shown = at_terminal(home, "token", "create", "laptop", "--scope", "read", "--scope", "submit", says=says)
    assert code == 0, shown
    (secret,) = SECRET.findall(shown)
    wording(" ".join(shown.partition(secret)[0].split()), "laptop", current_user())
    ctx = quick_warden(home)
    principal = TokenStore(ctx.home, ctx.clock).principal(secret)
    assert principal is not None and (principal.name, principal.scopes) == ("laptop", {"read", "submit"})
    listed = gpuwarden(home, "token", "list", "--json")
    (row,) = answer(listed)["tokens"]
    assert row["name"] == "laptop" and row["scopes"] == ["read", "submit"] and secret not in listed.stdout
    assert "laptop" in gpuwarden(home, "token", "list").stdout
    assert answer(gpuwarden(home, "token", "revoke", "laptop", "--json"))["code"] == "revoked"
    assert TokenStore(ctx.home, ctx.clock).principal(secret) is None
    made, revoked = [e for e in ctx.ledger.events() if e.subject.startswith("token/")]
    assert made.body["name"] == revoked.body["name"] == "laptop" and made.body["channel"] == "terminal"
    assert secret not in str(made.body)
    assert answer(gpuwarden(home, "token", "revoke", "laptop", "--json"))["code"] == "not_found"


@pytest.mark.anyio
async def test_refusal_or_wrong_pin_creates_no_token(home: Path, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(f'[approval]\npin_hash = "{hash_pin("2468")}"\n')
    ctx = quick_warden(home)
    for answers in (("no",), ("yes", "1111")):
        with pytest.raises(Refused):
            await create_token(ctx, "laptop", ["read"], 30, Typed(*answers))
    assert TokenStore(ctx.home, ctx.clock).listed() == []
    person = Typed("yes", "2468")
    made = await create_token(ctx, "laptop", ["read"], 30, person)
    assert SECRET.search(person.shown) and not SECRET.search(made.model_dump_json())


@pytest.mark.slow
def test_dashboard_link_enters_the_server_and_a_second_server_is_refused(home: Path, wording: Wording) -> None:
    assert answer(gpuwarden(home, "dashboard", "--json"))["code"] == "not_found"
    with subprocess.Popen(
        [sys.executable, "-m", "gpuwarden", "serve", "--port", "0"], env=environment(home), stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as server:  # fmt: skip
        try:
            assert server.stderr is not None
            url = re.findall(r"http://localhost:\d+", server.stderr.readline())[0]
            with httpx2.Client(base_url=url, timeout=300) as http:
                for _ in range(200):
                    link = gpuwarden(home, "dashboard", "/jobs", "--no-browser")
                    if link.returncode == 0:
                        break
                assert link.stdout.startswith(f"{url}/enter?link=gwl_")
                assert http.get("/").status_code == 401
                entered = http.get(link.stdout.strip())
                assert (
                    entered.status_code == 200
                    and "url=/jobs" in entered.text
                    and http.get("/nothing").status_code == 404
                )
                assert httpx2.get(link.stdout.strip()).status_code == 401, "the link works once"
            second = gpuwarden(home, "serve", "--port", "0")
            assert second.returncode == 1
            wording(" ".join((second.stdout + second.stderr).split()))
            children = subprocess.run(["pgrep", "-P", str(server.pid)], capture_output=True, text=True, check=False)
            watch = [int(pid) for pid in children.stdout.split()]
            assert len(watch) == 1
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(watch[0], 0)
    assert not (home / "serve.json").exists()


@pytest.mark.slow
def test_externally_reachable_address_needs_tls(home: Path, wording: Wording) -> None:
    done = gpuwarden(home, "serve", "--host", "0.0.0.0")
    assert done.returncode == 2
    wording(" ".join((done.stdout + done.stderr).split()))
