"""Servers register where every gpuwarden process of the account looks, and a dropped variable changes no policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli_kit import Cli
from doors import environment
from gpuwarden import __version__, running_servers
from gpuwarden.config import load_config
from gpuwarden.interfaces.cli import doctor
from gpuwarden.policy_record import Record, absolute, usual_homes, write_record
from gpuwarden.running_servers import elsewhere, entered, known_homes, running
from warm import warm
from wording import Wording

HERE = Path("/home/me/gw"), Path("/home/me/policy.toml")


ALONE = """
from gpuwarden import policy_record
policy_record.account_home = lambda: None  # whoever runs the tests may have a ledger
from gpuwarden.interfaces.cli.main import run
run()
"""


class Server:
    """A real server, driven through its pipes."""

    def __init__(self, env: dict[str, str], client: str) -> None:
        argv = [*warm(), "-c", ALONE, "mcp", *(["--client", client] if client else [])]
        self.process = subprocess.Popen(
            argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        opening = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        self.ask("initialize", opening)

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"jsonrpc": "2.0", "id": method, "method": method, "params": params}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return next(r["result"] for r in map(json.loads, self.process.stdout) if r.get("id") == method)

    def machines(self) -> dict[str, Any]:
        """Return the result of list_instances; by then the server has opened its ledger."""
        found = self.ask("tools/call", {"name": "list_instances", "arguments": {}})
        return dict(found["structuredContent"])


@contextmanager
def serving(env: dict[str, str], client: str = "codex") -> Iterator[Server]:
    server = Server(env, client)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def test_a_server_is_listed_while_it_runs() -> None:
    assert running() == []
    with entered("claude", *HERE):
        (entry,) = running()
        assert (entry.client, entry.pid, entry.version) == ("claude", os.getpid(), __version__)
        assert elsewhere(*HERE) == [] and elsewhere(Path("/other"), HERE[1]) == [entry] == elsewhere(
            HERE[0], Path("/p")
        )
    assert running() == [] and list(running_servers.folder().glob("*.*")) == []


def test_an_entry_is_private_and_contains_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    with entered("codex", *HERE):
        (file,) = running_servers.folder().glob("*.json")
        entry = {"client": "codex", "home": str(HERE[0]), "policy": str(HERE[1]), "version": __version__}
        assert json.loads(file.read_text()) == {**entry, "pid": os.getpid()}
        assert file.stat().st_mode & 0o077 == 0 == file.parent.stat().st_mode & 0o077


@pytest.mark.slow
def test_a_killed_server_is_taken_off_the_list(tmp_path: Path) -> None:
    with serving(environment(tmp_path / "gw")) as server:
        server.machines()
        (entry,) = running()
        os.kill(entry.pid, signal.SIGKILL)
        assert server.process.wait() == -signal.SIGKILL
    assert running() == [] and list(running_servers.folder().glob("*.*")) == []
    assert known_homes() == [tmp_path / "gw"], "its ledger stays known"


def test_the_list_is_bounded_and_ignores_invalid_entries(tmp_path: Path) -> None:
    folder = running_servers.folder()
    with entered("codex", *HERE):
        for n in range(100):
            (folder / f"{n}.json").write_text('{"client": 7}')
            running_servers.remember(tmp_path / str(n))
        (folder / "homes" / "x.json").write_text("[" * 30_000)
        for _ in range(3):
            assert [s.client for s in running()] in ([], ["codex"])  # the newest entries are read first
        assert [s.client for s in running()] == ["codex"]
    assert len(known_homes()) <= running_servers.MOST_HOMES
    assert len(list((folder / "homes").iterdir())) <= running_servers.MOST_HOMES + 1


@pytest.mark.slow
def test_a_server_starts_even_if_listing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with serving(environment(tmp_path / "gw", XDG_STATE_HOME=str(tmp_path / "file"))) as server:
        assert server.machines()["ok"] is True


@pytest.mark.slow
def test_doctor_and_approve_name_the_server_with_another_ledger(
    run: Cli, home: Path, tmp_path: Path, wording: Wording
) -> None:
    def servers() -> dict[str, Any]:
        (row,) = [check for check in run("doctor")[1]["checks"] if check["what"] == "servers"]
        return dict(row)

    assert servers()["ok"]
    other = tmp_path / "other" / "gw"
    with serving(environment(other)) as codex:
        codex.machines()  # a server is listed once it has opened its ledger
        with serving(environment(home), "") as own:
            assert str(other) in own.machines()["warnings"][-1]
            row = servers()
        (said,) = doctor.other_servers(load_config(environment(home)))
        assert str(other) in said and str(other.parent / "policy.toml") in said
        assert not row["ok"] and row["found"].endswith(said)
        wording(row["found"].removesuffix(said), 1)
        assert said in run("approve")[1]["message"]
    assert said not in run("approve")[1]["message"]


def test_a_ticket_from_another_ledger_is_explained(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    from contextlib import nullcontext

    from gpuwarden.interfaces.cli import approval

    terminal = approval.Terminal(io.StringIO(), io.StringIO())
    monkeypatch.setattr(approval, "open_terminal", lambda: nullcontext(terminal))
    other = tmp_path / "other" / "gw"
    with entered("codex", other, tmp_path / "policy.toml"):
        code, body = run("approve", "t123")
    assert (code, body["code"]) == (1, "not_found") and str(other) in body["hint"]


# ------------------------------------------------------------------------------------- variables that did not arrive


@pytest.fixture(name="strict")
def strict_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger and a strict policy that a server got from variables once; the shell no longer sets them."""
    home, policy = tmp_path / "gw", tmp_path / "strict.toml"
    policy.write_text('platforms = ["local"]\n[approval]\nchannels = ["terminal"]\n')
    with serving(environment(home, GPUWARDEN_POLICY=str(policy)), "claude") as server:
        assert server.machines()["warnings"] == []
    for name in ("GPUWARDEN_HOME", "GPUWARDEN_POLICY"):
        monkeypatch.delenv(name, raising=False)
    return policy


@pytest.mark.slow
def test_a_dropped_variable_does_not_replace_a_strict_policy(strict: Path) -> None:
    config = load_config(os.environ)
    assert config.policy_file == strict and config.policy.platforms == ("local",)
    (notice,) = config.notices
    assert (notice.kind, notice.kept) == ("unnamed_ledger", str(strict.parent / "gw")) and notice.question


@pytest.mark.slow
@pytest.mark.parametrize(("chosen_at", "asked"), [(5.0, 0), (15.0, 1)])
def test_a_recorded_ledger_asks_if_another_was_chosen_later(strict: Path, chosen_at: float, asked: int) -> None:
    (own := usual_homes()[0]).mkdir(parents=True)
    write_record(own, Record(path=str(strict.parent / "mine.toml"), digest="", at=10.0, chosen=True))
    write_record(strict.parent / "gw", Record(path=str(strict), digest="", at=chosen_at, chosen=True))
    config = load_config(os.environ)
    assert config.policy_file.name == "mine.toml" and [bool(n.question) for n in config.notices] == [True] * asked


@pytest.mark.slow
def test_a_server_without_its_variables_warns(strict: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GPUWARDEN_")}
    with serving(env) as server:
        (warning,) = server.machines()["warnings"]
        assert all(word in warning for word in ("GPUWARDEN_HOME", str(strict), "gpuwarden setup"))
        refused = server.ask("tools/call", {"name": "submit_job", "arguments": {
            "platform": "rehearsal/vastai", "script": "print(1)\n", "name": "x", "timeout_s": 60,
        }})["structuredContent"]  # fmt: skip
    assert refused["ok"] is False and "PF-PLT-002" in json.dumps(refused), "the strict policy is in force"


def test_an_account_without_another_ledger_gets_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUWARDEN_HOME", "GPUWARDEN_POLICY"):
        monkeypatch.delenv(name, raising=False)
    running_servers.remember(Path("/gone/gw"))
    assert load_config(os.environ).notices == ()


@pytest.mark.slow
def test_a_named_ledger_is_not_compared_with_those_of_servers(strict: Path, tmp_path: Path) -> None:
    config = load_config({**os.environ, "GPUWARDEN_HOME": str(tmp_path / "mine")})
    assert config.notices == () and absolute(config.home) == tmp_path / "mine"


def test_an_empty_variable_counts_as_none(tmp_path: Path) -> None:
    """Gemini passes an empty string for an unset variable."""
    names = ("CAPS_PER_JOB_USD", "SECRETS_ALLOWED", "PLATFORMS", "HOME", "POLICY")
    empty = {f"GPUWARDEN_{name}": "" for name in names}
    assert load_config({**os.environ, **empty}).settings == load_config(dict(os.environ)).settings


# ------------------------------------------------------------------------------------------------- a poisoned folder


@pytest.mark.attack("policy", "leaves an odd file among the servers, so that none is listed and no ledger is known")
@pytest.mark.parametrize("odd", ["dangling", "fifo", "folder", "link", "huge", "foreign"])
def test_an_odd_entry_hides_no_other_entry(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = running_servers.folder()
    with entered("codex", *HERE):
        (tmp_path / "real.json").write_text('{"home": "/elsewhere"}')
        for where in (folder, folder / "homes"):
            file = where / "zz.json"
            match odd:
                case "dangling":
                    file.symlink_to(tmp_path / "nowhere")
                case "fifo":
                    os.mkfifo(file)
                case "folder":
                    file.mkdir()
                case "link":
                    file.symlink_to(tmp_path / "real.json")
                case "huge":
                    file.write_bytes(b'{"home": "' + b"x" * 1_000_000 + b'"}')
                case "foreign":
                    file.write_text('{"home": "/elsewhere"}')
                    monkeypatch.setattr(os, "geteuid", lambda: 1 + os.getuid())
        found = [] if odd == "foreign" else ["codex"]
        assert [s.client for s in running()] == found and known_homes() == [HERE[0]][: len(found)]


def test_hostile_strings_are_made_printable(tmp_path: Path) -> None:
    with entered("\x1b[31mevil\n", Path("/x\x1b]0;t\x07\n/y"), Path("/p\u202e")):
        text = " ".join(doctor.other_servers(load_config(environment(tmp_path / "gw"))))
    assert "Evil" in text and all(c.isprintable() for c in text)


def test_a_home_with_a_non_text_name_stops_no_server(tmp_path: Path) -> None:
    with entered("codex", Path(os.fsdecode(bytes(tmp_path) + b"/\xff")), HERE[1]):
        assert running() == []


def test_many_entries_are_checked_and_removed_in_small_batches(tmp_path: Path) -> None:
    folder, most = running_servers.private_folder(running_servers.folder()), running_servers.MOST
    for n in range(10 * most):
        (folder / f"{n}.json").touch()
    with entered("codex", *HERE):
        assert [s.client for s in running()] == ["codex"]
        assert 8 * most <= len(list(folder.glob("[0-9]*.json"))) < 10 * most
