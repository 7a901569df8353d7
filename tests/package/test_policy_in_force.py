"""In every running process, the active policy is the file as it is at the moment of each decision."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from doors import JOB, POLICY, environment, policy_file, quick_warden
from gpuwarden.core.errors import BadRequest, Conflict, LedgerError, Refused
from gpuwarden.core.inputs import build
from gpuwarden.core.models import JobSpec, Known
from gpuwarden.core.policy import Policy
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import LIVE_LEASES, Job
from gpuwarden.data import data_dir
from gpuwarden.hub.scripts import Fetched
from gpuwarden.interfaces.cli.approval import grant_spending, open_spending
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.auto_teardown import rounds
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.submission.submit import NeedsApproval, submit
from gpuwarden.policy_record import RECORD, Record, write_record
from gpuwarden.rehearsal.model import Fault, Faults
from talk_kit import metering
from waiting import soon
from warm import warm

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SPEC = build(JobSpec, JOB)
CAPS = "[rehearsal_caps]\nper_job_usd = 9\nper_day_usd = 9\nper_instance_usd = 9\n"
ASKS = "[rehearsal_caps]\nper_job_usd = 0\n"
BROKEN: dict[str, Callable[[Path], object]] = {
    "no TOML": lambda file: file.write_text("caps ="),
    "an unknown setting": lambda file: file.write_text(POLICY + "[caps]\nper_jobb_usd = 3\n"),
    "empty": lambda file: file.write_text(""),
    "gone": lambda file: file.unlink(),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "for all to write": lambda file: file.chmod(0o666),
}


@pytest.fixture(name="home")
def home_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture(name="ctx")
def ctx_fixture(home: Path) -> Context:
    return quick_warden(home)


def mended(file: Path) -> None:
    if file.is_dir():
        file.rmdir()
    file.write_text(POLICY)
    file.chmod(0o600)


async def test_lowered_caps_are_obeyed_at_the_next_decision(home: Path, ctx: Context) -> None:
    file = policy_file(home)
    for text, asks in ((POLICY, False), (POLICY + ASKS, True), (POLICY, False)):
        file.write_text(text)
        assert bool((await submit(ctx, SPEC, dry_run=True)).ask) is asks


async def test_an_edit_that_keeps_size_and_time_is_obeyed(home: Path, ctx: Context) -> None:
    file = policy_file(home)
    file.write_text(POLICY + CAPS)
    assert not (await submit(ctx, SPEC, dry_run=True)).ask
    was = file.stat()
    file.write_text(POLICY + CAPS.replace("9", "0"))
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert file.stat().st_size == was.st_size and (await submit(ctx, SPEC, dry_run=True)).ask


async def test_a_forbidden_platform_is_refused_at_the_next_decision(home: Path, ctx: Context) -> None:
    await submit(ctx, SPEC, dry_run=True)
    policy_file(home).write_text('platforms = ["local"]\n' + POLICY)
    with pytest.raises(Refused) as refused:
        await submit(ctx, SPEC, dry_run=True)
    assert "PF-PLT-002" in {finding.rule for finding in refused.value.findings}


async def test_an_accepted_job_never_rents_on_a_newly_forbidden_platform(home: Path, ctx: Context) -> None:
    """The user forbids the platform while the rental is being retried."""
    cloud = ctx.provider(SPEC.platform).cloud  # type: ignore[attr-defined]
    cloud.configure(faults=Faults(faults=(Fault(kind="lost_request", call="create", at=1, count=99),)))
    first = await submit(ctx, SPEC)
    job = (await submit(ctx, SPEC, receipt=first.receipt)).job
    assert job is not None and job.state is Job.PROVISIONING
    cloud.configure(faults=Faults())
    policy_file(home).write_text('platforms = ["local"]\n' + POLICY)
    done = await soon(lambda: check(ctx, job.id), every=0.05, good=lambda seen: seen.job.state is Job.FAILED)
    assert done.job.reason is Code.FORBIDDEN and not metering(ctx)
    assert not ctx.ledger.subjects("lease", *LIVE_LEASES)


async def test_local_job_permissions_reach_a_loaded_backend(home: Path, ctx: Context) -> None:
    backend: Any = ctx.backend("local")
    for network in (False, True, False):
        policy_file(home).write_text(POLICY + f"network = {str(network).lower()}\n")
        assert ctx.backend("local") is backend and backend._allowed.network is network


@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_policy_blocks_decisions_until_repaired(home: Path, ctx: Context, how: str) -> None:
    file = policy_file(home)
    receipt = (await submit(ctx, SPEC)).receipt
    BROKEN[how](file)
    for _ in range(2):
        for ask in (submit(ctx, SPEC), submit(ctx, SPEC, receipt=receipt)):
            with pytest.raises(BadRequest, match="policy"):
                await ask
    assert ctx.warnings[0].kind == "broken", "a reply to a mere look has it as a warning"
    assert not ctx.ledger.events(kind="job.accepted")
    mended(file)
    assert (await submit(ctx, SPEC, receipt=receipt)).job is not None and ctx.warnings == ()


async def test_an_empty_policy_stays_the_default(home: Path) -> None:
    policy_file(home).write_text("")
    ctx = quick_warden(home)
    write_record(home, Record(path=str(policy_file(home)), digest="another process's", at=1.0))
    assert ctx.policy == Policy()


async def test_a_policy_file_chosen_by_the_user_is_obeyed(home: Path, ctx: Context) -> None:
    other = home.parent / "other.toml"
    other.write_text(ASKS)
    write_record(home, Record(path=str(other), digest="", at=1.0, chosen=True))
    assert (
        (await submit(ctx, SPEC, dry_run=True)).ask and ctx.active_policy.file == other and other in ctx.protected_paths
    )
    (home / RECORD).write_text("{")
    with pytest.raises(LedgerError):
        await submit(ctx, SPEC, dry_run=True)


# ------------------------------------------------------------------------------------------------------- receipts


async def changed(ctx: Context, spec: JobSpec, change: Callable[[], object]) -> str:
    """Return the reason for which a receipt is refused after a change."""
    receipt = (await submit(ctx, spec)).receipt
    change()
    with pytest.raises(Conflict) as refused:
        await submit(ctx, spec, receipt=receipt)
    assert not ctx.ledger.events(kind="job.accepted")
    fresh = await submit(ctx, spec)
    assert fresh.receipt != receipt
    return str(refused.value.message)


async def test_a_receipt_is_void_under_another_policy(home: Path, ctx: Context) -> None:
    assert "policy" in await changed(ctx, SPEC, lambda: policy_file(home).write_text(POLICY + ASKS))


async def test_a_policy_comment_keeps_a_receipt_valid(home: Path, ctx: Context) -> None:
    receipt = (await submit(ctx, SPEC)).receipt
    policy_file(home).write_text("# mine\n" + POLICY)
    assert (await submit(ctx, SPEC, receipt=receipt)).job is not None


async def test_a_receipt_is_void_under_another_profile(home: Path, ctx: Context) -> None:
    own = home.parent / "profiles"
    own.mkdir()
    text = (data_dir("profiles") / "vastai.md").read_text("utf-8")
    ctx.own_profiles = own
    (own / "vastai.md").write_text(text)

    assert "boot_timeout_s: 1200" in text
    slower = text.replace("boot_timeout_s: 1200", "boot_timeout_s: 1201")
    assert "profile" in await changed(ctx, SPEC, lambda: (own / "vastai.md").write_text(slower))


async def test_a_receipt_is_void_when_a_script_url_serves_other_text(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"now": str(JOB["script"])}

    async def fetched(*_: object) -> Known[Fetched]:
        return Known(Fetched(text=texts["now"]))

    monkeypatch.setattr("gpuwarden.lifecycle.submission.facts.fetch_script", fetched)
    command = ("uv", "run", "https://huggingface.co/me/scripts/raw/main/train.py")
    spec = SPEC.model_copy(update={"script": None, "command": command})
    assert "script" in await changed(ctx, spec, lambda: texts.update(now=texts["now"] + "# another\n"))


async def test_an_approval_counts_only_under_its_own_policy(home: Path, ctx: Context) -> None:
    """After a receipt above the caps is approved, the user changes another part of the policy."""
    policy_file(home).write_text(POLICY + ASKS)
    receipt = str((await submit(ctx, SPEC)).receipt)
    with pytest.raises(NeedsApproval):
        await submit(ctx, SPEC, receipt=receipt)
    grant_spending(ctx, open_spending(ctx, receipt), "terminal", "me")
    policy_file(home).write_text(POLICY + ASKS + "[watch]\nidle_minutes = 5\n")
    with pytest.raises(Conflict):
        await submit(ctx, SPEC, receipt=receipt)


# ------------------------------------------------------------------------------------------------ real processes


@pytest.mark.prove
async def test_a_running_watch_obeys_the_withdrawal_of_an_order(home: Path) -> None:
    clock, file = home.parent / "clock", policy_file(home)
    ordering = POLICY + '[teardown]\nautomatic = "terminate"\ngrace_minutes = 1\n'
    file.write_text(ordering)
    ctx = quick_warden(home, GPUWARDEN_REHEARSAL_CLOCK=str(clock))
    first = await submit(ctx, SPEC)
    job = (await submit(ctx, SPEC, receipt=first.receipt)).job
    assert job is not None
    await soon(lambda: check(ctx, job.id), every=0.05, good=lambda seen: seen.job.state is Job.SUCCEEDED)
    await pull(ctx, job.id)
    await verify_job(ctx, job.id)
    env = environment(home, GPUWARDEN_REHEARSAL_CLOCK=str(clock), PYTHONUNBUFFERED="1", COLUMNS="500")
    argv, shown = [*warm(), "-m", "gpuwarden", "watch", "--every", "1"], home.parent / "shown"
    with shown.open("wb") as out, subprocess.Popen(argv, env=env, stdout=out, stderr=out) as watch:
        try:
            await soon(lambda: "ending_soon" in shown.read_text())
            file.write_text(POLICY)
            clock.write_text("240")
            for _ in range(3):
                before = rounds(ctx)[1]
                await soon(lambda before=before: rounds(ctx)[1] > before)  # type: ignore[misc]
            assert metering(ctx), "the order is taken back"
            file.write_text("broken =")
            await soon(lambda: "not valid TOML" in shown.read_text())
            assert metering(ctx) and watch.poll() is None
            file.write_text(ordering)
            await soon(lambda: clock.write_text(str(float(clock.read_text()) + 5)) and not metering(ctx), every=0.5)
        finally:
            watch.kill()
    used = [e.body["channel"] for e in ctx.ledger.events(kind="approval.used")]
    assert used == ["automatic_teardown"]
