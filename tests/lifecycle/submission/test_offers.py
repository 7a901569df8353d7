"""`gpuwarden offers`: price, capacity and files that survive a stop, across several platforms."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from mcp.client.client import Client

from cli_kit import Cli
from clouds.base import KEY, Emulator, Fault
from clouds_house import PLATFORMS
from clouds_kit import Web
from fakes import FakeClock, Limits
from gpuwarden.core.errors import NotFound, NotSupported
from gpuwarden.core.models import Answer, Capacity, Quote, Resources
from gpuwarden.core.policy import Policy
from gpuwarden.interfaces.cli import console
from gpuwarden.interfaces.mcp.server import make_server
from gpuwarden.interfaces.results.offers import offered
from gpuwarden.lifecycle import timeouts
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.offers import offers
from gpuwarden.providers.base import Provider
from lifecycle_kit import clock_of_today, open_house
from wording import Wording

pytestmark = pytest.mark.anyio
ASKED = {"runpod": "H100", "vastai": "H100", "lambda": "H100"}
H100 = Resources(gpu="H100")


@pytest.fixture
def clock() -> FakeClock:
    return clock_of_today()


@pytest.fixture
def accounts(
    tmp_path: Path,
    web: Web,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Emulator]:
    """Return three accounts with keys; the other platforms have none."""
    made = {}
    for platform in PLATFORMS:
        monkeypatch.delenv(platform.provider.api.key_variable, raising=False)
        if platform.name in ASKED:
            account = made[platform.name] = platform.account(tmp_path / platform.name, clock)
            monkeypatch.setenv(platform.provider.api.key_variable, KEY)
            monkeypatch.setenv(platform.provider.api.url_variable, web.add(account))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return made


@pytest.fixture
def three(accounts: dict[str, Emulator], clock: FakeClock, tmp_path: Path) -> Iterator[Context]:
    three = open_house(tmp_path / "house", clock)
    three.env = dict(os.environ)
    yield three
    three.ledger.close()


async def test_every_configured_platform_is_asked_and_the_cheapest_is_first(three: Context) -> None:
    found = await offers(three, H100)
    assert {o.platform for o in found} == set(ASKED)
    assert all(o.capacity is Capacity.AVAILABLE for o in found)
    prices = [o.price for o in found]
    assert prices == sorted(p for p in prices if p is not None) and len(set(prices)) > 1


async def test_offers_show_what_survives_a_stop(three: Context) -> None:
    by_name = {o.platform: o for o in await offers(three, H100)}
    assert by_name["lambda"].survives_stop is None, "Lambda has no stop"
    assert by_name["runpod"].survives_stop == ("/workspace", "/workspace (network-volume)")
    for offer in by_name.values():
        for mount in offer.survives_stop or ():
            if " " not in mount:
                assert offer.profile is not None and offer.profile.survives(mount, "stop")


@pytest.mark.parametrize("kind", ["lost_request", "html", "error_500", "truncated"])
async def test_a_platform_that_does_not_answer_is_unknown_and_listed_last(
    kind: str, three: Context, accounts: dict[str, Emulator]
) -> None:
    accounts["vastai"].faults = [Fault(kind, "", count=10**6)]  # type: ignore[arg-type]
    found = await offers(three, H100)
    assert (found[-1].platform, found[-1].capacity, found[-1].price) == ("vastai", Capacity.UNKNOWN, None)
    assert all(o.capacity is Capacity.AVAILABLE for o in found[:-1])


async def test_no_capacity_and_not_sold_differ_from_unknown(three: Context, accounts: dict[str, Emulator]) -> None:
    account = accounts["lambda"].cloud
    account.configure(account.settings.model_copy(update={"capacity": 0}))
    by_name = {o.platform: o for o in await offers(three, H100)}
    assert by_name["lambda"].capacity is Capacity.NONE
    assert {o.capacity for o in await offers(three, Resources(gpu="TPU v9"))} <= {Capacity.NOT_SOLD, Capacity.NONE}


async def test_a_slow_platform_times_out_as_unknown(three: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Resources] = []

    async def never(resources: Resources) -> Answer[Quote]:
        asked.append(resources)
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(three.provider("runpod"), "quote", never)
    limits = Limits()
    monkeypatch.setattr(timeouts, "anyio", limits)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(limits.pass_when, lambda: asked and len(limits.open) == 1)  # the others have answered
        found = await offers(three, H100)
    assert (found[-1].platform, found[-1].capacity) == ("runpod", Capacity.UNKNOWN)
    assert len(found) == 3


async def test_a_platform_that_the_policy_forbids_is_not_asked(three: Context, accounts: dict[str, Emulator]) -> None:
    three.policy = Policy(platforms=("runpod",))
    assert [o.platform for o in await offers(three, H100)] == ["runpod"]
    assert accounts["vastai"].requests == []


async def test_offers_from_the_local_platform_are_refused(three: Context) -> None:
    with pytest.raises(NotSupported):
        await offers(three, H100, ("local",))


async def test_one_failing_platform_hides_no_other(
    three: Context, accounts: dict[str, Emulator], monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    async def breaks(resources: Resources) -> Answer[Quote]:
        raise KeyError("price")

    rows = offered(await offers(three, H100, ("runpod", "local", "runpood"))).offers
    assert [(row.platform, row.capacity) for row in rows] == [
        ("runpod", Capacity.AVAILABLE), ("local", Capacity.UNKNOWN), ("runpood", Capacity.UNKNOWN),
    ]  # fmt: skip
    assert "runpood" in rows[2].note
    wording(rows[1].note)
    with pytest.raises(NotFound):
        await offers(three, H100, ("runpood",))
    monkeypatch.setattr(three.provider("vastai"), "quote", breaks)
    found = await offers(three, H100)
    assert (found[-1].platform, found[-1].capacity, len(found)) == ("vastai", Capacity.UNKNOWN, 3)


async def test_a_plug_in_that_fails_to_load_hides_no_other_offer(
    three: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Context.provider

    def provider(self: Context, platform: str) -> Provider:
        if platform == "lambda":
            raise NotSupported("its extra is not installed")
        return real(self, platform)

    monkeypatch.setattr(Context, "provider", provider)
    async with Client(make_server(three), mode="2026-07-28") as client:
        reply = (await client.call_tool("list_instances", {"offers_for": "H100"})).structured_content or {}
    assert "its extra is not installed" in reply["unknown"]["lambda"]
    rows = {row["platform"]: row for row in reply["offers"]}
    assert set(rows) == set(ASKED) and rows["lambda"]["capacity"] == "unknown"
    assert "its extra is not installed" in rows["lambda"]["note"]


async def test_a_profile_with_an_error_hides_no_other(three: Context, tmp_path: Path) -> None:
    three.own_profiles = tmp_path / "profiles"
    three.own_profiles.mkdir()
    (three.own_profiles / "runpod.md").write_text("---\nid: runpod\nkindd: on-demand\n---\n")
    found = await offers(three, H100)
    assert {o.platform for o in found[:-1]} == {"vastai", "lambda"} and found[-1].platform == "runpod"
    assert found[-1].capacity is Capacity.UNKNOWN and "runpod.md" in offered(found).offers[-1].note
    unknown = (await list_instances(three)).unknown
    assert set(unknown) == {"runpod"} and "runpod.md" in unknown["runpod"]
    three.policy = Policy(platforms=("vastai",))
    assert not (await list_instances(three)).unknown


async def test_list_instances_shows_offers_only_for_a_named_gpu(three: Context) -> None:
    async with Client(make_server(three), mode="2026-07-28") as client:
        silent = await client.call_tool("list_instances", {})
        reply = await client.call_tool("list_instances", {"offers_for": "H100"})
    assert (silent.structured_content or {})["offers"] == []
    listed = (reply.structured_content or {})["offers"]
    assert {row["platform"] for row in listed} == set(ASKED)
    assert all(row["capacity"] == "available" and row["price_usd_per_hour"] > 0 for row in listed)


def test_the_command_prints_the_same_offers_as_its_json(
    run: Cli, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(console.out, "width", console.PIPED)
    words = ("offers", "--gpu", "H100", "--platform", "rehearsal/vastai", "--platform", "rehearsal/lambda")
    code, body = run(*words)
    assert code == 0
    assert [o["platform"] for o in body["offers"]] and all(o["price_usd_per_hour"] > 0 for o in body["offers"])
    code, text = run.shown(*words)
    (row,) = [line for line in text.splitlines() if line.startswith("rehearsal/lambda")]
    assert code == 0 and next(o for o in body["offers"] if o["platform"] == "rehearsal/lambda")["survives_stop"] is None
    wording(re.split(r" {2,}", row)[3])
    code, text = run.shown(*words, "--platform", "runpood")
    assert code == 0 and "rehearsal/lambda" in text and text.count("runpood") >= 2
    code, body = run(*words, "--platform", "runpood")
    assert body["code"] == "unknown" and body["message"] in " ".join(text.split())
    wording(body["message"])
    code, body = run("offers", "--gpu", "H100")
    assert (code, body["code"]) == (0, "not_configured")
