"""The watch as a service: units that service managers accept, keys from a private file, and one leader at a time."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from filelock import FileLock

from fakes import FakeClock
from gpuwarden.core.errors import BadRequest
from gpuwarden.interfaces.cli import doctor, main, watch_service
from gpuwarden.lifecycle.monitoring.watch import Round, Watcher
from gpuwarden.private import private_folder
from lifecycle_kit import open_house
from wording import Wording

ODD = '/tmp/50% of $HOME "x" \\ y'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, folder in (("HOME", "me"), ("XDG_CONFIG_HOME", "me/config"), ("XDG_DATA_HOME", "me/data")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path / "ledger of mine"))
    monkeypatch.delenv("GPUWARDEN_POLICY", raising=False)
    return tmp_path


@pytest.mark.real("systemd-analyze")
@pytest.mark.parametrize("folder", ["plain", "50% of $HOME y"])
def test_systemd_accepts_the_unit_without_warnings(tmp_path: Path, folder: str) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not here")
    where = tmp_path / folder
    where.mkdir()
    python = where / "python"
    python.symlink_to(sys.executable)
    argv = [str(python), "-m", "gpuwarden", "watch", "--keys", str(where / "watch.env")]
    unit = tmp_path / "gpuwarden-watch.service"
    unit.write_text(watch_service.systemd_unit(argv, {"GPUWARDEN_HOME": str(where)}), "utf-8")
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [analyze, "--user", "verify", "--man=no", str(unit)], env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), "a warning is not a success: an unknown key ends with 0 too"
    unit.write_text(unit.read_text("utf-8").replace("NoNewPrivileges", "NoNewPrivilege"), "utf-8")
    wrong = subprocess.run(
        [analyze, "--user", "verify", "--man=no", str(unit)], env=env, capture_output=True, text=True, check=False
    )
    assert "NoNewPrivilege" in wrong.stderr, "the check sees a wrong key"


def test_line_breaks_cannot_enter_a_systemd_unit(wording: Wording) -> None:
    for program in ("/bin/x\nExecStart=/bin/evil", ODD):
        with pytest.raises(BadRequest) as refused:
            watch_service.systemd_unit([program], {})
        wording(refused)
    unit = watch_service.systemd_unit(["/bin/x", ODD], {"GPUWARDEN_HOME": ODD})
    assert (
        unit.count("ExecStart=") == 1 and "50%% of $$HOME" in unit and 'Environment="GPUWARDEN_HOME=/tmp/50%%' in unit
    )


def test_launchd_agent_keeps_arguments_and_environment() -> None:
    read = plistlib.loads(watch_service.launchd_agent(["/usr/bin/python3", ODD], {"GPUWARDEN_HOME": ODD}))
    assert (
        read["ProgramArguments"] == ["/usr/bin/python3", ODD] and read["EnvironmentVariables"]["GPUWARDEN_HOME"] == ODD
    )
    assert read["RunAtLoad"] is True and read["KeepAlive"] == {"SuccessfulExit": False}


@pytest.mark.skipif(sys.platform != "linux", reason="writes a systemd unit")
@pytest.mark.parametrize("problem", ["", "Failed to connect to bus: No medium found"])
def test_watch_service_is_installed_and_removed(home: Path, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*argv: str) -> str:
        asked.append(argv)
        return problem

    monkeypatch.setattr(watch_service, "_ask", ask)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    done = CliRunner().invoke(main.cli, ["watch", "--install"], standalone_mode=False)
    unit = home / "me" / "config" / "systemd" / "user" / "gpuwarden-watch.service"
    assert done.return_value == (1 if problem else 0) and str(unit) in done.output.replace("\n", "")
    assert problem in " ".join(done.output.split())
    text = unit.read_text("utf-8")
    assert f'"GPUWARDEN_HOME={home}/ledger of mine"' in text and "watch.env" in text and sys.executable in text
    keys = home / "me" / "config" / "gpuwarden" / "watch.env"
    assert keys.stat().st_mode & 0o777 == 0o600
    assert watch_service.runs(home / "ledger of mine").installed
    done = CliRunner().invoke(main.cli, ["watch", "--uninstall"])
    assert done.exit_code == 0 and not unit.exists() and keys.exists(), "the keys are the user's"
    assert not watch_service.runs(home / "ledger of mine").installed
    assert all(argv[:2] == ("systemctl", "--user") for argv in asked)


@pytest.mark.parametrize("order", ["off", "terminate"])
def test_doctor_reports_a_missing_watch_if_teardown_is_automatic(home: Path, order: str, wording: Wording) -> None:
    policy = home / "me" / "config" / "gpuwarden" / "policy.toml"
    policy.parent.mkdir(parents=True)
    policy.write_text(f'[teardown]\nautomatic = "{order}"\n', "utf-8")
    check = next(c for c in anyio.run(doctor.examine).checks if c.what == "watch")
    assert check.ok is (order == "off") and not watch_service.runs(home / "ledger of mine").leads
    wording(check.found)
    with FileLock(private_folder(home / "ledger of mine" / "locks") / "watch.lock"):
        assert next(c for c in anyio.run(doctor.examine).checks if c.what == "watch").ok


@pytest.mark.parametrize(
    ("text", "wrong"), [("nonsense", "line 1"), ("A=1\n1B=2", "line 2"), ("GPUWARDEN_HOME=/x", "line 1")]
)
def test_key_file_with_an_invalid_line_is_refused(tmp_path: Path, text: str, wrong: str) -> None:
    file = tmp_path / "watch.env"
    file.write_text(text, "utf-8")
    file.chmod(0o600)
    with pytest.raises(BadRequest, match=wrong):
        watch_service.read_keys(file)


def test_keys_come_from_a_private_file(tmp_path: Path, wording: Wording) -> None:
    file = tmp_path / "watch.env"
    file.write_text("A=1\nB = 2 \n# x\n\n", "utf-8")
    file.chmod(0o644)
    with pytest.raises(BadRequest) as refused:
        watch_service.read_keys(file)
    wording(refused, file)
    file.chmod(0o600)
    assert watch_service.read_keys(file) == {"A": "1", "B": "2"}


# ------------------------------------------------------------------------------------------------------ one leader


def test_one_watch_leads_and_the_next_takes_over(tmp_path: Path) -> None:
    ctx = open_house(tmp_path, FakeClock())
    first, second = Watcher(ctx), Watcher(ctx)
    assert first.leads() and not second.leads() and first.leads()
    assert watch_service.runs(tmp_path).leads
    first._lock.release()
    assert second.leads() and not first.leads()
    assert (tmp_path / "locks" / "watch.lock").exists(), "a removed lock would let two of them lead"


@pytest.mark.anyio
async def test_a_server_leaves_the_lead_to_a_watch(tmp_path: Path) -> None:
    ctx = open_house(tmp_path, FakeClock())
    server, watch = Watcher(ctx), Watcher(ctx)
    led: list[bool] = []

    class Enough(Exception):
        pass

    def report(done: Round) -> None:
        led.append(server._lock.is_locked)
        if len(led) > 4:
            raise Enough

    async def nothing(*_: Any) -> Round:
        return Round((), (), {})

    async def rest(_: float) -> None:
        await anyio.lowlevel.checkpoint()
        if len(led) == 2:
            assert watch.leads(), "the server gave the lead back after its round"

    server.round = nothing  # type: ignore[method-assign]
    ctx.clock.sleep = rest  # type: ignore[method-assign]
    with pytest.raises(Enough):
        await server.run(report, defers=True)
    assert led == [True, True, False, False, False]


@pytest.mark.anyio
async def test_following_watch_shows_the_leaders_alerts(tmp_path: Path) -> None:
    from gpuwarden.ledger.events import AlertRaised

    ctx = open_house(tmp_path, FakeClock())
    follower = Watcher(ctx)
    assert (await follower.follow()).news == ()
    ctx.ledger.add("watch/day", AlertRaised(condition="day_budget", mark="", text="too much"))
    (news,) = (await follower.follow()).news
    assert news.text == "too much" and (await follower.follow()).news == ()
