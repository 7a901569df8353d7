"""Submitting: one receipt per job, changes since the receipt, and questions to the user."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import anyio
import pytest

from fakes import FakeClock
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest, Conflict, NotFound, Refused
from gpuwarden.core.policy import Caps, Policy, Secrets
from gpuwarden.core.rules import Severity
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.context import LOCK_PATIENCE_S, STEP_S, Context
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.submission.submit import NeedsApproval, submit
from gpuwarden.providers.base import account_keys
from gpuwarden.rehearsal.model import Fault, Settings
from lifecycle_kit import FAST, WEALTHY, launch, launches, open_house, records, rent_cloud, training, until
from wording import Wording

pytestmark = pytest.mark.anyio
LONG_BOOT = FAST.model_copy(update={"boot_s": 60.0})
SLOW_BOOT = Settings(boot_s=100, settle_s=30, default_usd_per_hour=3.6, catalog={})


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def ctx(tmp_path: Path, clock: FakeClock) -> Context:
    return open_house(tmp_path / "home", clock)


async def test_a_receipt_used_twice_makes_one_job(ctx: Context, tmp_path: Path) -> None:
    cloud = rent_cloud(ctx, settings=SLOW_BOOT)
    spec = training(tmp_path / "said")
    receipt = (await submit(ctx, spec)).receipt
    one, two = await submit(ctx, spec, receipt=receipt), await submit(ctx, spec, receipt=receipt)
    assert one.job and two.job and one.job.id == two.job.id
    assert (one.adopted, two.adopted, len(records(cloud))) == (False, True, 1)


async def test_a_rehearsal_check_only_warns_about_a_missing_dependency(
    ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(script: str) -> tuple[str, ...]:
        raise BadRequest("torch is not here", "Install uv.")

    monkeypatch.setattr("gpuwarden.backends.local.interpreter_for", lacking)
    cloud, spec = rent_cloud(ctx), training(tmp_path / "said", command=(), script="print(1)\n")
    for dry_run in (True, False):
        checked = await submit(ctx, spec, dry_run=dry_run)
        told = [f.severity for f in checked.findings if f.rule == "PF-PLACE-001"]
        assert checked.receipt and told == [Severity.WARNING]
    with pytest.raises(BadRequest):
        await submit(ctx, spec, receipt=checked.receipt)
    assert not records(cloud)


async def test_a_live_job_is_adopted_under_a_second_receipt(ctx: Context, tmp_path: Path) -> None:
    cloud = rent_cloud(ctx, settings=SLOW_BOOT)
    spec = training(tmp_path / "said")
    first, second = (await submit(ctx, spec)).receipt, (await submit(ctx, spec)).receipt
    one, two = await submit(ctx, spec, receipt=first), await submit(ctx, spec, receipt=second)
    third = await submit(ctx, spec)
    assert one.job and two.job and third.job
    assert {one.job.id, two.job.id, third.job.id} == {one.job.id}
    assert two.adopted and third.adopted and len(records(cloud)) == 1


async def test_a_receipt_is_bound_to_its_arguments_time_and_ledger(
    ctx: Context, clock: FakeClock, tmp_path: Path, wording: Wording
) -> None:
    cloud = rent_cloud(ctx)
    receipt = (await submit(ctx, training(tmp_path / "said"))).receipt
    with pytest.raises(Conflict) as refused:
        await submit(ctx, training(tmp_path / "said", timeout_s=601), receipt=receipt)
    wording(refused)
    with pytest.raises(NotFound):
        await submit(ctx, training(tmp_path / "said"), receipt="r0123456789abcdef")
    clock.advance(ctx.policy.receipt_ttl_s + 1)
    with pytest.raises(Conflict) as refused:
        await submit(ctx, training(tmp_path / "said"), receipt=receipt)
    wording(refused)
    assert not records(cloud)


async def test_a_price_that_changed_voids_the_receipt(ctx: Context, tmp_path: Path, wording: Wording) -> None:
    cloud = rent_cloud(ctx)
    spec = training(tmp_path / "said")
    receipt = (await submit(ctx, spec)).receipt
    cloud.configure(settings=FAST.model_copy(update={"default_usd_per_hour": 9.0}))
    with pytest.raises(Conflict) as refused:
        await submit(ctx, spec, receipt=receipt)
    wording(refused, "$1.00/h", "$9.00/h")
    assert not records(cloud)


async def test_spending_above_the_caps_needs_approval(tmp_path: Path, clock: FakeClock) -> None:
    ctx = open_house(tmp_path / "home", clock, policy=Policy(rehearsal_caps=Caps(per_job_usd=0.1)))
    cloud = rent_cloud(ctx, settings=SLOW_BOOT)
    spec = training(tmp_path / "said")
    first = await submit(ctx, spec)
    assert "per_job_usd" in first.ask
    with pytest.raises(NeedsApproval):
        await submit(ctx, spec, receipt=first.receipt)
    assert not records(cloud) and not ctx.ledger.subjects("job")
    ctx.ledger.append(f"receipt/{first.receipt}", "approval.granted", {"expires_at": clock.now() + 60})
    done = await submit(ctx, spec, receipt=first.receipt)
    assert done.job and len(records(cloud)) == 1


async def test_jobs_of_a_day_share_the_daily_cap(tmp_path: Path, clock: FakeClock) -> None:
    caps = Caps(per_job_usd=10, per_day_usd=1.0, per_instance_usd=10)
    ctx = open_house(tmp_path / "home", clock, policy=Policy(rehearsal_caps=caps))
    rent_cloud(ctx, settings=SLOW_BOOT)
    specs = [training(tmp_path / "said", name=f"job{n}") for n in range(2)]  # 0.6 USD each
    issued = [await submit(ctx, spec) for spec in specs]
    assert [i.ask for i in issued] == ["", ""]  # each fits on its own
    await submit(ctx, specs[0], receipt=issued[0].receipt)
    with pytest.raises(NeedsApproval, match="per_day_usd"):
        await submit(ctx, specs[1], receipt=issued[1].receipt)


async def test_a_machine_is_adopted_after_a_lost_create_reply(ctx: Context, clock: FakeClock, tmp_path: Path) -> None:
    cloud = rent_cloud(ctx, Fault(kind="lost_reply", call="create"), settings=SLOW_BOOT)
    job = await launch(ctx, training(tmp_path / "said"))
    clock.advance(1)
    seen = await check(ctx, job)
    assert seen.job.state is Job.PROVISIONING and seen.lease and seen.lease.instance_id == records(cloud)[0].id
    assert [e.kind for e in ctx.ledger.events(seen.lease.subject)][:3] == [
        "create.intent",
        "create.unknown",
        "lease.adopted",
    ]


async def test_a_lost_request_to_create_is_repeated_only_after_two_looks(
    ctx: Context, clock: FakeClock, tmp_path: Path
) -> None:
    cloud = rent_cloud(ctx, Fault(kind="lost_request", call="create"), settings=SLOW_BOOT)
    job = await launch(ctx, training(tmp_path / "said"))
    for seconds, rented in ((1, 0), (10, 0), (31, 1), (1, 1)):
        clock.advance(seconds)
        await check(ctx, job)
        assert len(records(cloud)) == rented


async def test_a_job_that_is_canceled_before_its_launch_never_runs(
    ctx: Context, clock: FakeClock, tmp_path: Path
) -> None:

    rent_cloud(ctx, settings=SLOW_BOOT)
    job = await launch(ctx, training(tmp_path / "said"))
    assert (await cancel(ctx, job)).job.state is Job.CANCELED
    clock.advance(200)
    seen = await check(ctx, job)
    assert seen.lease and seen.lease.state == "metering" and not launches(tmp_path / "said")


class _Race:
    """One of two processes with the same receipt."""

    def __init__(self, home: Path, said: Path, receipt: str) -> None:
        self.home, self.said, self.receipt = home, said, receipt

    def __call__(self, gate: object, results: object) -> None:
        ctx = open_house(self.home, SystemClock())
        rent_cloud(ctx, settings=LONG_BOOT)
        gate.wait()  # type: ignore[attr-defined]

        async def go() -> str:
            done = await submit(ctx, training(self.said), receipt=self.receipt)
            return done.job.id if done.job else "none"

        results.put(anyio.run(go))  # type: ignore[attr-defined]


@pytest.mark.slow
async def test_two_processes_racing_with_one_receipt_make_one_job(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", SystemClock())
    cloud = rent_cloud(ctx, settings=LONG_BOOT)
    spec = training(tmp_path / "said")
    receipt = (await submit(ctx, spec)).receipt
    assert receipt
    spawn = multiprocessing.get_context("spawn")
    gate, results = spawn.Barrier(2), spawn.Queue()
    racers = [
        spawn.Process(target=_Race(tmp_path / "home", tmp_path / "said", receipt), args=(gate, results))
        for _ in range(2)
    ]
    for racer in racers:
        racer.start()
    ids = {await anyio.to_thread.run_sync(results.get) for _ in racers}
    for racer in racers:
        racer.join(30)
    results.close()
    assert len(ids) == 1 and len(records(cloud)) == 1
    assert len(ctx.ledger.events(kind="job.accepted")) == len(ctx.ledger.events(kind="create.intent")) == 1


# ---------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.attack("secrets", "names the account's key as a secret of a job")
@pytest.mark.parametrize("key", sorted(account_keys()))
async def test_an_account_key_is_never_given_to_a_job(tmp_path: Path, key: str) -> None:
    policy = WEALTHY.model_copy(update={"secrets": Secrets(allowed=("*",))})
    ctx = open_house(tmp_path, SystemClock(), policy=policy)
    rent_cloud(ctx)
    ctx.env = {
        key: "the-key-of-an-account",
        key.lower(): "x" * 9,
        "ALIAS": "the-key-of-an-account",
        "MINE": "my-own-one",
    }
    ctx.env |= {"GPUWARDEN_WEBHOOK_SECRET": "a-secret-of-ours", "HEADER": "Bearer the-key-of-an-account\n"}
    for name in (key, key.lower(), "ALIAS", "HEADER", "GPUWARDEN_WEBHOOK_SECRET"):
        with pytest.raises(Refused) as refused:
            await submit(ctx, training(tmp_path / "said", secrets=(name,)))
        (found,) = [f for f in refused.value.findings if f.rule == "PF-SEC-003"]
        assert name in found.message and "the-key-of-an-account" not in str(refused.value.findings)
    assert (await submit(ctx, training(tmp_path / "said", secrets=("MINE",)))).receipt


@pytest.mark.parametrize("mode", [0o600, 0o644])
async def test_a_key_from_a_key_file_is_never_given_to_a_job(tmp_path: Path, mode: int) -> None:
    """The key goes out under no name, in no variable, argument or input, even if others may read its file."""
    policy = WEALTHY.model_copy(update={"secrets": Secrets(allowed=("*",))})
    ctx = open_house(tmp_path / "home", SystemClock(), policy=policy)
    rent_cloud(ctx)
    ctx.cwd = tmp_path
    key = "rpa_KeyThatIsOnlyInAFile0123"
    (tmp_path / "key").write_text(f"{key}\n")
    (tmp_path / "key").chmod(mode)
    (tmp_path / "notes.txt").write_text(f"call it with {key}")
    (tmp_path / "mine.txt").write_text("nothing of that kind")
    ctx.env = {
        "RUNPOD_API_KEY_FILE": str(tmp_path / "key"),
        "ALIAS": key,
        "HEADER": f"Bearer {key}",
        "MINE": "my-own-one",
    }
    for name in ("ALIAS", "HEADER", "RUNPOD_API_KEY_FILE"):
        with pytest.raises(Refused) as refused:
            await submit(ctx, training(tmp_path / "said", secrets=(name,)))
        (found,) = [f for f in refused.value.findings if f.rule == "PF-SEC-003"]
        assert name in found.message and key not in str(refused.value.findings)
    leaks: list[dict[str, object]] = [
        {"env": {"HARMLESS": f"x{key}"}},
        {"command": ("python", "-c", f"print('{key}')")},
        {"inputs": ("notes.txt",)},
    ]
    for leak in leaks:
        with pytest.raises(Refused, match=r"PF-SEC-00[14]") as refused:
            await submit(ctx, training(tmp_path / "said", **leak))
        assert key not in str(refused.value.findings) and "RUNPOD_API_KEY_FILE" in str(refused.value.findings)
    assert (await submit(ctx, training(tmp_path / "said", secrets=("MINE",), inputs=("mine.txt",)))).receipt


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "short", "binary", "no path"])
async def test_an_unusable_key_file_does_not_prevent_a_submit(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "key"
    match kind:
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "short":
            file.write_text("m")
        case "binary":
            file.write_bytes(b"\xff\xfe" * 9000)
    ctx = open_house(tmp_path / "home", SystemClock())
    rent_cloud(ctx)
    ctx.env = {"RUNPOD_API_KEY_FILE": "~nobody-there\0" if kind == "no path" else str(file), "HF_TOKEN": "my-own-token"}
    assert (await submit(ctx, training(tmp_path / "said", secrets=("HF_TOKEN",)))).receipt


async def test_a_job_gets_only_the_secrets_that_the_policy_names(tmp_path: Path) -> None:
    ctx = open_house(tmp_path / "home", SystemClock())
    rent_cloud(ctx)
    ctx.env = {"HF_TOKEN": "a-token-of-the-hub", "PGPASSWORD": "something-else"}
    assert (await submit(ctx, training(tmp_path / "said", secrets=("HF_TOKEN",)))).receipt
    with pytest.raises(Refused, match="PF-SEC-003"):
        await submit(ctx, training(tmp_path / "said", secrets=("PGPASSWORD",)))


# ------------------------------------------------------------------------------------------------------------- locks


@pytest.mark.slow
async def test_a_hanging_launch_releases_the_job_lock_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert STEP_S < LOCK_PATIENCE_S
    ctx = open_house(tmp_path / "home", SystemClock())
    rent_cloud(ctx)
    backend = ctx.backend("local")
    whole, hangs = backend.submit, True

    async def slow(*args: object, **named: object) -> object:
        if hangs:
            await anyio.sleep_forever()
        return await whole(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "submit", slow)
    monkeypatch.setattr("gpuwarden.lifecycle.execution.running.STEP_S", 0.2)
    job = await launch(ctx, training(tmp_path / "said"))
    await until(ctx, job, lambda seen: ctx.ledger.events(kind="submit.intent"))
    assert (await check(ctx, job)).job.state is Job.SUBMITTING, "it was let go, and nothing is known to have run"
    hangs = False
    monkeypatch.setattr("gpuwarden.lifecycle.execution.running.STEP_S", STEP_S)
    await until(ctx, job, lambda seen: seen.job.state is Job.SUCCEEDED)
    assert launches(tmp_path / "said") == [(job, 1)]
