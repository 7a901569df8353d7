"""A damaged, newer, read-only, or full home, or broken settings, cause a single error and no data loss."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from cli_kit import OPTIONS, Cli
from doors import answer, environment, gpuwarden
from gpuwarden.lifecycle.context import Context
from wording import Wording


def test_invalid_ledger_file_is_an_error_and_stays_unchanged(run: Cli, home: Path, wording: Wording) -> None:
    file = home / "ledger.db"
    for name in ("ledger.db-wal", "ledger.db-shm"):
        (home / name).unlink(missing_ok=True)
    file.write_bytes(b"this is no database at all, and long enough to be read as one" * 40)
    before = file.read_bytes()
    code, body = run("instances")
    assert (code, body["code"]) == (1, "ledger_error")
    wording(body["message"].partition(" (")[0])
    assert file.read_bytes() == before
    code, body = run("doctor")
    assert code == 1 and body["checks"][0] == {"what": "ledger", "ok": False, "found": body["checks"][0]["found"]}


def test_newer_ledger_version_is_refused(run: Cli, ctx: Context, home: Path, wording: Wording) -> None:
    ctx.ledger.close()
    with sqlite3.connect(home / "ledger.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    code, body = run("check", "j1")
    assert (code, body["code"]) == (1, "ledger_error") and "99" in body["message"]
    wording(f"{body['message']}\n{body['hint']}")


def test_home_that_cannot_be_created_is_an_error(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path / "file/home"))
    code, body = run("instances")
    assert (code, body["code"]) == (1, "ledger_error") and "GPUWARDEN_HOME" in body["hint"]


def test_read_only_home_is_an_error(run: Cli, ctx: Context, home: Path, train: Path) -> None:
    if os.geteuid() == 0:
        need_mount()
        subprocess.run(["mount", "--bind", "-o", "ro", home, home], check=True)
        undo = ["umount", "--lazy", str(home)]
        subprocess.run(["mount", "-o", "remount,ro,bind", home], check=True)
    else:
        home.chmod(0o500)
        (home / "ledger.db").chmod(0o400)
        undo = ["chmod", "700", str(home)]
    try:
        code, body = run("submit", *OPTIONS, str(train))
        assert code == 1 and body["code"] in {"ledger_error", "disk_error"}, body
    finally:
        subprocess.run(undo, check=True)
    assert not ctx.ledger.events(kind="job.accepted")


def need_mount() -> None:
    """Skip unless mounts are allowed. Root ignores permissions, so a read-only home requires a mount."""
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("mounts are not allowed here")


@pytest.mark.slow
def test_full_disk_is_an_error_until_space_returns(home: Path, ctx: Context, train: Path) -> None:
    """A file size limit stands in for the full disk: the ledger can't grow any further."""
    size = (home / "ledger.db").stat().st_size
    code = "import resource, sys; n = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n)); "
    code += "from gpuwarden.interfaces.cli.main import run; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(size), "submit", *OPTIONS, "--json", str(train)],
        env=environment(home), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    body = answer(done)
    assert done.returncode == 1 and body["code"] in {"ledger_error", "disk_error"} and body["hint"], body
    assert gpuwarden(home, "instances", "--json").returncode == 0, "with room again, it goes on"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("caps = [", "TOML"), (f"caps = {'[' * 50_000}", "TOML"), (f"caps.per_job_usd = {'9' * 5000}", "TOML"),
     ("[caps]\nper_job = 1", "caps.per_job"), ("[approval]\nttl_s = 0", "approval.ttl_s")],
)  # fmt: skip
def test_broken_policy_is_reported_with_its_file(run: Cli, tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "policy.toml").write_text(text)
    for words in (["instances"], ["doctor"]):
        code, body = run(*words)
        assert (
            (code, body["code"]) == (2, "bad_request")
            and reason in body["message"]
            and "policy.toml" in body["message"]
        )


def test_unknown_key_in_a_user_profile_is_an_error(run: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    from gpuwarden.data import data_dir

    text = (data_dir("profiles") / "vastai.md").read_text("utf-8").replace("id: vastai", "id: mine\ncolour: red", 1)
    (folder / "mine.md").write_text(text, "utf-8")
    code, body = run("submit", "--platform", "mine", "true")
    assert code == 2 and "colour" in body["message"] and "mine.md" in body["message"], body
    (folder / "mine.md").write_text(text.replace("colour: red\n", ""), "utf-8")
    assert "mine" in run("profiles")[1]["platforms"]
