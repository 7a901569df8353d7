"""If this machine has no sandbox, no local job runs until a user at a terminal allows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp_types import CallToolResult

from cli_kit import Cli
from doors import JOB, answer, at_terminal, environment, gpuwarden, quick_warden
from gpuwarden.app import open_context
from gpuwarden.core.errors import NoSandbox
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec
from gpuwarden.core.rules import Severity
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.remote.sandbox.words import Kind, Sandbox

pytestmark = pytest.mark.anyio

ABSENT = Sandbox(Kind.NONE, why="it was taken away for a test")


@pytest.fixture(name="none")
def none_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process find no sandbox."""
    for user in ("backends.local", "interfaces.cli.approval", "interfaces.cli.doctor", "interfaces.cli.demo"):
        monkeypatch.setattr(f"gpuwarden.{user}.detect", lambda: ABSENT)


@pytest.mark.attack("boundary", "asks for a local job where no sandbox exists")
@pytest.mark.parametrize("platform", ["local", "rehearsal/vastai"])
def test_without_a_sandbox_no_local_job_runs_without_approval(
    none: None, home: Path, run: Cli, tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_warden(home)
    policy = home.parent / "policy.toml"
    policy.write_text("# mine\n[caps]\nper_job_usd = 0  # keep\n")
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    words = ["submit", "--platform", platform, "--output", "out", "--timeout", "600", "--estimate", "60", str(script)]
    monkeypatch.setenv("GPUWARDEN_LOCAL_UNSANDBOXED", "true")
    code, refused = run(*words)
    assert (code, refused["code"]) == (1, "no_sandbox") and "gpuwarden policy allow local" in refused["hint"]
    code, nobody = run("policy", "allow", "local")
    assert (code, nobody["code"]) == (1, "refused")
    assert "# mine" in policy.read_text() and "unsandboxed" not in policy.read_text()
    assert doctor_of(run)["ok"] is False


@pytest.mark.parametrize(("platform", "severity"), [("local", Severity.ERROR), ("rehearsal/vastai", Severity.WARNING)])
def test_a_dry_run_needs_no_sandbox(
    none: None, home: Path, run: Cli, tmp_path: Path, platform: str, severity: Severity
) -> None:
    quick_warden(home)
    (home.parent / "policy.toml").write_text("")
    (tmp_path / "train.py").write_text("print(1)\n")
    words = ["submit", "--platform", platform, "--dry-run", "--timeout", "70", str(tmp_path / "train.py")]
    found = {f["rule"]: f["severity"] for f in run(*words)[1]["findings"]}
    assert found["PF-PLACE-001"] == severity
    assert "PF-OUT-001" in found, "the other rules have read the job too"


def doctor_of(run: Cli) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in run("doctor")[1]["checks"] if c["what"] == "sandbox")
    return found


def bare(folder: Path) -> str:
    """Return a PATH without bubblewrap."""
    (folder / "bin").mkdir(exist_ok=True)
    return str(folder / "bin")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="as a user, Landlock may be there")
def test_an_approver_allows_unsandboxed_jobs_at_a_terminal(home: Path, tmp_path: Path) -> None:
    quick_warden(home)
    policy = home.parent / "policy.toml"
    policy.write_text("# mine\n[caps]\nper_job_usd = 0  # keep\n")
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    words = ["submit", "--platform", "local", "--output", "out", "--timeout", "600", "--estimate", "60", "--json"]
    words += [str(script)]
    refused = answer(gpuwarden(home, *words, PATH=bare(tmp_path)))
    assert refused["code"] == "no_sandbox"
    code, shown = at_terminal(
        home, "policy", "allow", "local", says={"Type yes to allow it: ": "no"}, PATH=bare(tmp_path)
    )
    assert code == 1 and "unsandboxed" not in policy.read_text(), shown
    code, shown = at_terminal(
        home, "policy", "allow", "local", says={"Type yes to allow it: ": "yes"}, PATH=bare(tmp_path)
    )
    assert code == 0, shown
    assert policy.read_text().startswith("# mine\n[caps]\nper_job_usd = 0  # keep\n")
    assert "unsandboxed = true" in policy.read_text() and policy.stat().st_mode & 0o077 == 0
    taken = answer(gpuwarden(home, *words, PATH=bare(tmp_path), HOME=str(tmp_path)))
    assert taken["ok"] is True, taken


@pytest.mark.attack("boundary", "looks for a local platform over MCP where no sandbox exists")
async def test_the_mcp_server_refuses_unsandboxed_jobs(none: None, home: Path, w_bare: Any) -> None:
    for platform in ("local", "rehearsal/vastai"):
        with pytest.raises(NoSandbox):
            await submit(w_bare, build(JobSpec, {**JOB, "platform": platform}))
        result = await make_server(w_bare).call_tool("submit_job", {**JOB, "platform": platform})
        assert isinstance(result, CallToolResult) and result.is_error and result.structured_content
        body = result.structured_content
        assert body["code"] == "no_sandbox" and "\n" not in body["message"] and body["hint"]
    assert not w_bare.ledger.events(kind="job.accepted")


@pytest.mark.prove
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="as a user, Landlock may be there")
def test_the_demo_reports_that_its_script_runs_unsandboxed(tmp_path: Path) -> None:
    env = environment(tmp_path / "home", PATH=bare(tmp_path), HOME=str(tmp_path))
    words = [sys.executable, "-m", "gpuwarden", "demo", "--yes"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "sandbox" in said and not [kind for kind in set(Kind) - {Kind.NONE} if kind.value in said]


@pytest.fixture(name="w_bare")
def w_bare_fixture(home: Path) -> Any:
    ctx = quick_warden(home)
    (home.parent / "policy.toml").write_text("")
    return open_context("mcp", env=environment(home)) if ctx else ctx
