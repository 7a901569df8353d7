"""A platform that takes too long to answer counts as unknown, and nothing waits for it any longer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from clouds.base import KEY, Web
from clouds.runpod import RunPodCloud
from clouds.vastai import VastCloud
from fakes import FakeClock, Limits
from gpuwarden.core.models import Instance, InstanceState, Known, Resources
from gpuwarden.core.states import Job, Lease
from gpuwarden.lifecycle import timeouts
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring import inventory
from gpuwarden.lifecycle.monitoring.inventory import list_instances, reconcile
from gpuwarden.lifecycle.records import read_lease
from gpuwarden.providers.runpod import RunPod
from gpuwarden.providers.vastai import Vast
from lifecycle_kit import open_house, training

pytestmark = pytest.mark.anyio
Send = Callable[..., Awaitable[Any]]


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    monkeypatch.setattr("clouds.vastai_instances.PAGE", 1)
    made = Limits()
    monkeypatch.setattr(timeouts, "anyio", made)
    monkeypatch.setattr(inventory, "anyio", made)
    return made


def house(home: Path, server: Web) -> tuple[Context, Vast, VastCloud]:
    """Return two platforms with machines; Vast.ai lists each machine on a separate page."""
    clock = FakeClock()
    ctx = open_house(home, clock)
    ctx.env = {"VAST_API_KEY": KEY, "RUNPOD_API_KEY": KEY}
    vast, runpod = VastCloud(home / "v", clock), RunPodCloud(home / "r", clock)
    vast.window = None
    for account, provider in ((vast, Vast), (runpod, RunPod)):
        env = ctx.env | {provider.api.url_variable: server.add(account)}
        ctx._providers[account.profile.id] = provider(account.profile, clock, env)
    runpod.rent(
        "x", Resources(gpu="NVIDIA L4"), order={"gpu": {"id": "NVIDIA L4"}, "image": "i"}, started=0, locked=False
    )
    for _ in range(30):
        vast.rent("y", Resources(gpu="L40S"), order={}, gpu="L40S", count=1)
    clock.advance(60)
    provider = ctx.provider("vastai")
    assert isinstance(provider, Vast)
    return ctx, provider, vast


def slowly(provider: Vast, account: VastCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the account's third page hang forever."""
    send: Send = provider.client._send

    async def slow(*args: Any) -> Any:
        if len(account.requests) == 2:
            await anyio.sleep_forever()
        return await send(*args)

    monkeypatch.setattr(provider.client, "_send", slow)


async def test_a_list_of_slow_pages_times_out_without_hiding_other_lists(
    tmp_path: Path,
    web: Web,
    monkeypatch: pytest.MonkeyPatch,
    limits: Limits,
) -> None:
    """The time is up after RunPod has answered and two of Vast.ai's pages are read."""
    w, provider, account = house(tmp_path, web)
    slowly(provider, account, monkeypatch)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(limits.pass_when, lambda: len(account.requests) == 2 and len(limits.open) == 1)
        found = await list_instances(w)
    assert [r.platform for r in found.rows] == ["runpod"]
    assert found.unknown == {"vastai": f"vastai did not send a complete response within {timeouts.ASK_S:g} s"}
    assert len(account.requests) == 2, "each page was in time"


async def test_platforms_are_asked_at_the_same_time(
    tmp_path: Path,
    web: Web,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each platform answers only once the other was asked."""
    w, _, _ = house(tmp_path, web)
    asked = {"runpod": anyio.Event(), "vastai": anyio.Event()}

    def after_the_other(name: str) -> Callable[[], Awaitable[Known[tuple[Instance, ...]]]]:
        async def answer() -> Known[tuple[Instance, ...]]:
            asked[name].set()
            for event in asked.values():
                await event.wait()
            return Known(())

        return answer

    for name in asked:
        monkeypatch.setattr(w.provider(name), "list", after_the_other(name))
    assert (await list_instances(w)).unknown == {}


@pytest.mark.slow
async def test_a_machine_query_that_hangs_times_out_and_delays_its_neighbors(
    tmp_path: Path,
    web: Web,
    monkeypatch: pytest.MonkeyPatch,
    limits: Limits,
) -> None:
    w, provider, _ = house(tmp_path, web)
    asked: list[str] = []

    async def never(ident: str) -> Any:
        asked.append(ident)
        await anyio.sleep_forever()

    monkeypatch.setattr(provider, "get", never)
    for n in (1, 2, 3):
        body = {"spec": training(tmp_path / "said", platform="vastai").model_dump(mode="json")}
        w.ledger.append(f"job/j{n}", "job.accepted", body, state=Job.ACCEPTED)
        w.ledger.append(
            f"lease/j{n}-i1", "create.intent", {"job": f"j{n}", "platform": "vastai"}, state=Lease.UNVERIFIED
        )
        w.ledger.append(f"job/j{n}", "job.provisioning", {"lease": f"j{n}-i1", "generation": 1}, state=Job.PROVISIONING)
        seen = Instance(id=f"{4_200_000 + n}", state=InstanceState.BOOTING)
        w.ledger.append(
            f"lease/j{n}-i1", "lease.created", {"instance": seen.model_dump(mode="json")}, state=Lease.METERING
        )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(limits.pass_when, lambda: asked)
        trouble = await reconcile(w)
    assert read_lease(w.ledger, "j1-i1").state is Lease.UNVERIFIED
    assert set(asked) == {"4200001"}
    assert trouble == {f"j{n}": "not checked in this round: vastai responds slowly" for n in (2, 3)}
