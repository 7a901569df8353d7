"""An account's balance as a danger clock: its date, its alert and its unknowns."""

from __future__ import annotations

from pathlib import Path

import pytest

from clouds.autodl import AutoDLAccount
from clouds.base import KEY, Emulator, Fault, Web
from clouds.lambda_cloud import LambdaAccount
from clouds.prime_intellect import PrimeAccount
from clouds.runpod import RunPodCloud
from clouds.vastai import VastCloud
from fakes import FakeClock
from gpuwarden.core.deadlines import Funds
from gpuwarden.core.models import Balance, Instance, Known, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli import console
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.inventory import Inventory, list_instances
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.providers._rented import HttpProvider
from gpuwarden.providers.autodl import AutoDL
from gpuwarden.providers.lambda_cloud import LambdaCloud
from gpuwarden.providers.prime_intellect import PrimeIntellect
from gpuwarden.providers.runpod import RunPod
from gpuwarden.providers.vastai import Vast
from lifecycle_kit import open_house
from wording import Wording

pytestmark = pytest.mark.anyio
HOUR = 3600.0
TOLD = [(VastCloud, Vast, "H100 SXM"), (RunPodCloud, RunPod, "NVIDIA L4"), (PrimeAccount, PrimeIntellect, "L4_24GB")]


class Account:
    """An installation with one platform's account, in which another user rented the machines."""

    def __init__(
        self, home: Path, server: Web, emulator: type[Emulator], provider: type[HttpProvider], **more: str
    ) -> None:
        self.clock = FakeClock()
        self.cloud = emulator(home / "cloud", self.clock)
        self.cloud.money = 25.0
        api = provider.api
        env = {api.key_variable: KEY, api.url_variable: server.add(self.cloud), **more}
        self.ctx: Context = open_house(home, self.clock)
        self.ctx.env = env
        self.name = self.cloud.profile.id
        self.ctx._providers[self.name] = provider(self.cloud.profile, self.clock, env)
        self.watcher = Watcher(self.ctx)

    def rent(self, gpu: str, count: int = 1) -> Instance:
        order = {"gpuType": gpu, "gpuCount": count, "gpu": {"id": gpu, "count": count}, "image": "x"}
        order |= {"req_gpu_amount": count, "gpu_spec_uuid": gpu}
        order |= {"name": "theirs", "region_name": "us-east-1", "ssh_key_names": ["k"]}
        order |= {"instance_type_name": f"gpu_{count}x_{gpu.split()[0].lower()}"}
        more = {"order": order, "gpu": gpu, "count": count, "started": self.clock.now(), "locked": False}
        made = self.cloud.rent("somebody-elses", Resources(gpu=gpu, gpu_count=count), provider="runpod", **more)
        self.clock.advance(60)
        return made

    async def seen(self) -> tuple[Inventory, Funds]:
        inventory = await list_instances(self.ctx)
        (funds,) = inventory.accounts
        return inventory, funds

    async def go(self, hours: float = 0.0) -> list[str]:
        """Run one round of the watch, with its lists; return the alerts it raised (+) and cleared (-)."""
        self.clock.advance(hours * HOUR + 601)
        done = await self.watcher.round()
        return [("+" if a.raised else "-") + a.kind for a in done.news]


@pytest.mark.parametrize(("emulator", "provider", "gpu"), TOLD, ids=lambda v: getattr(v, "__name__", ""))
async def test_the_list_shows_when_the_balance_runs_out(
    tmp_path: Path,
    web: Web,
    emulator: type[Emulator],
    provider: type[HttpProvider],
    gpu: str,
    wording: Wording,
) -> None:
    account = Account(tmp_path, web, emulator, provider)
    first, price = account.rent(gpu), account.cloud.prices[gpu]
    inventory, funds = await account.seen()
    assert [r.billing for r in inventory.rows] == [True]
    assert funds.clock is not None
    assert funds.clock.at == pytest.approx(account.clock.now() + 25.0 / price * HOUR, abs=60)
    wording(funds.clock.trigger, "$25.00", usd_per_hour(price))
    assert funds.clock.effect == next(
        c.effect for c in account.cloud.profile.danger_clocks if c.counts_from == "balance"
    )
    told = results.listed(inventory).short()["accounts"]
    assert told[0]["clock"]["at"] == funds.clock.at and told[0]["balance"] == 25.0
    account.rent(gpu)
    _, both = await account.seen()
    assert both.clock is not None and both.clock.at < funds.clock.at
    for ident in list(account.cloud.own):
        account.cloud.cloud.terminate(ident)
    account.clock.advance(120)
    assert (await list_instances(account.ctx)).accounts == (), first


async def test_the_terminal_shows_when_the_balance_runs_out(
    tmp_path: Path, web: Web, capsys: pytest.CaptureFixture[str]
) -> None:
    account = Account(tmp_path, web, VastCloud, Vast)
    account.rent("H100 SXM")
    known = results.listed((await account.seen())[0])
    console.listed(known)
    account.cloud.faults = [Fault("error_500", "users/current")]
    unknown = results.listed((await account.seen())[0])
    console.listed(unknown)
    said = " ".join(capsys.readouterr().out.split())
    assert known.accounts[0].clock is not None and known.accounts[0].clock.trigger.strip("⟦⟧") in said
    assert "$25.00" in said and "$2.20/h" in said
    assert unknown.accounts[0].note and unknown.accounts[0].note.strip("⟦⟧") in said


async def test_a_low_balance_raises_one_alert_and_new_credit_clears_it(
    tmp_path: Path, web: Web, wording: Wording
) -> None:
    account = Account(tmp_path, web, VastCloud, Vast)
    account.rent("H100 SXM")
    account.cloud.money = 2.2 * (account.ctx.policy.watch.danger_hours + 2)
    assert await account.go() == []
    account.cloud.money = 2.2 * (account.ctx.policy.watch.danger_hours - 2)
    assert await account.go() == ["+danger_clock"]
    assert await account.go() == []
    (alert,) = account.watcher._raised.values()
    wording(alert.text, "vastai", "$2.20/h")
    account.cloud.faults = [Fault("error_500", "users/current", count=3)]
    assert await account.go() == [], "an unknown balance clears nothing"
    account.watcher = Watcher(account.ctx)
    account.ctx.funds.clear()
    assert await account.go() == [], "nor does a process that has not seen it"
    account.cloud.faults.clear()
    account.cloud.money = 500.0
    assert await account.go() == ["-danger_clock"]


async def test_the_balance_alert_clears_with_the_last_machine(tmp_path: Path, web: Web) -> None:
    account = Account(tmp_path, web, VastCloud, Vast)
    made = account.rent("H100 SXM")
    account.cloud.money = 1.0
    assert await account.go() == ["+danger_clock"]
    account.cloud.cloud.terminate(made.id)
    assert await account.go() == ["-danger_clock"]


@pytest.mark.parametrize("money", [0.0, -3.0])
async def test_the_end_date_of_an_exhausted_balance_is_now(
    tmp_path: Path, web: Web, money: float, wording: Wording
) -> None:
    account = Account(tmp_path, web, VastCloud, Vast)
    account.rent("H100 SXM")
    account.cloud.money = money
    _, funds = await account.seen()
    assert funds.clock is not None and funds.clock.at == funds.at
    wording(funds.clock.trigger)


async def test_an_unknown_balance_has_no_date(tmp_path: Path, web: Web, wording: Wording) -> None:
    account = Account(tmp_path, web, VastCloud, Vast)
    account.rent("H100 SXM")
    account.cloud.faults = [Fault("html", "users/current")]
    inventory, funds = await account.seen()
    assert isinstance(funds.balance, Unknown) and funds.clock is None
    (told,) = results.listed(inventory).accounts
    assert told.balance is None and told.clock is None
    wording(told.note)


async def test_the_platforms_reported_spending_counts_if_it_is_higher(tmp_path: Path, web: Web) -> None:
    account = Account(tmp_path, web, RunPodCloud, RunPod)
    account.rent("NVIDIA L4")
    assert isinstance(account.cloud, RunPodCloud)
    account.cloud.spends = 5.0  # volumes and endpoints, which no list of Pods contains
    assert (await account.seen())[1].burn == 5.0
    account.cloud.spends = 0.1
    assert (await account.seen())[1].burn == 0.43


async def test_a_balance_in_yuan_without_a_rate_has_no_date(tmp_path: Path, web: Web, wording: Wording) -> None:
    account = Account(tmp_path, web, AutoDLAccount, AutoDL)
    account.rent("h800")
    _, funds = await account.seen()
    assert isinstance(funds.balance, Known) and funds.balance.value == Balance(amount=175.0, currency="CNY")
    assert funds.clock is None and not funds.whole
    wording(results.listed((await account.seen())[0]).accounts[0].note)


async def test_a_platform_without_a_balance_is_not_mentioned(tmp_path: Path, web: Web) -> None:
    account = Account(tmp_path, web, LambdaAccount, LambdaCloud)
    made = account.rent(next(iter(account.cloud.prices)))
    inventory = await list_instances(account.ctx)
    assert [r.instance_id for r in inventory.rows] == [made.id] and not inventory.unknown
    assert inventory.accounts == () and "accounts" not in results.listed(inventory).short()


def funds(amount: float, burn: float, *, whole: bool = True) -> Funds:
    return Funds("p", Known(Balance(amount=amount)), burn, whole, 1_800_000_000.0, "gone")


def test_an_unknown_price_makes_the_date_a_latest_date(wording: Wording) -> None:
    clock = funds(10.0, 2.0, whole=False).clock
    assert clock is not None
    wording(clock.trigger, "$10.00", "$2.00/h", "2027-01-15 13:00 UTC")


@pytest.mark.parametrize(("amount", "burn"), [(10.0, 0.0), (10.0, -1.0), (1e17, 1e-17), (8.784, 0.001 - 1e-9)])
def test_no_spending_or_a_distant_end_has_no_date(amount: float, burn: float) -> None:
    assert funds(amount, burn).clock is None
