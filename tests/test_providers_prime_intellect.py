"""Prime Intellect: the contract, and one test for each of its traps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clouds.base import Fault
from clouds.prime_intellect import PrimeAccount
from clouds_kit import CloudContract, CloudRig, known, web  # noqa: F401
from gpuwarden.core.errors import BadRequest, NoCapacity
from gpuwarden.core.models import InstanceState, Resources, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.providers.prime_intellect import PrimeIntellect


class TestPrimeIntellect(CloudContract):
    emulator = PrimeAccount
    provider = PrimeIntellect
    creates = r"^POST /pods/$"
    lists = r"^GET /pods/$"
    gets = r"^GET /pods/[^/]+$"
    asks_balance = r"^GET /billing/wallet$"
    ends = r"^DELETE /pods/"

    def says_nothing(self, status: int, raw: bytes) -> bool:
        body = json.loads(raw) if raw else None
        if not isinstance(body, dict):
            return False
        if status == 404:
            return isinstance(body.get("detail"), str)
        return body.get("data") == [] and body.get("total_count", 1) <= 0

    def account(self, rig: CloudRig) -> PrimeAccount:
        assert isinstance(rig.cloud, PrimeAccount)
        return rig.cloud

    async def test_what_is_ordered(self, rig: CloudRig) -> None:
        asked = Resources(gpu="H100", gpu_count=2, disk_gb=200, max_price_usd_per_hour=4.5)
        known(await rig.provider.create(asked, "j1-i1"))
        order = next(a.body for a in rig.cloud.asked if a.method == "POST")
        assert order["provider"] == {"type": "runpod"}
        pod = order["pod"]
        assert pod["name"] == "gpuwarden-j1-i1" and pod["cloudId"] == "H100_80GB-2" and pod["gpuCount"] == 2
        assert pod["maxPrice"] == 4.5 and pod["sshKeyId"] == "key1" and pod["diskSize"] == 200
        assert pod["image"] == "cuda_12_4_pytorch_2_6" and pod["autoRestart"] is False

    async def test_the_cap_is_held(self, rig: CloudRig) -> None:
        with pytest.raises(NoCapacity):
            await rig.provider.create(Resources(gpu="H100", max_price_usd_per_hour=2.0), "j1-i1")
        assert rig.cloud.own == {}

    async def test_spot_is_its_own_offer(self, rig: CloudRig) -> None:
        assert known(await rig.provider.quote(self.resources)).price_usd_per_hour == 2.1
        spot = Resources(gpu="H100", interruptible=True)
        assert known(await rig.provider.quote(spot)).price_usd_per_hour == 1.05
        known(await rig.provider.create(spot, "j1-i1"))
        assert next(a.body for a in rig.cloud.asked if a.method == "POST")["pod"]["cloudId"] == "H100_80GB-1-spot"

    async def test_offers_that_do_not_count(self, rig: CloudRig) -> None:
        cheap: dict[str, Any] = {"onDemand": 0.01, "currency": "USD"}
        make = self.account(rig).offer
        self.account(rig).more = [
            make("H100_80GB", 1, cloudId="prepaid", prepaidTime=24, prices=cheap),
            make("H100_80GB", 1, cloudId="out", stockStatus="Unavailable", prices=cheap),
            make("H100_80GB", 1, cloudId="nobody", provider=None, prices=cheap),
            make("H100_80GB", 1, cloudId="free", prices={"onDemand": 0.0, "currency": "USD"}),
            make("H100_80GB", 1, cloudId="foreign", prices={"onDemand": 0.02, "currency": "EUR"}),
        ]
        assert known(await rig.provider.quote(self.resources)).price_usd_per_hour == 2.1

    async def test_all_pages_of_offers_are_read(self, rig: CloudRig) -> None:
        assert known(await rig.provider.quote(Resources(gpu="L4"))).price_usd_per_hour == 0.3
        assert sum(a.path.startswith("/availability") for a in rig.cloud.asked) == 3

    async def test_an_unreadable_page_of_offers_is_unknown(self, rig: CloudRig) -> None:
        rig.cloud.faults = [Fault("error_500", r"/availability", skip=1)]
        assert isinstance(await rig.provider.quote(Resources(gpu="L4")), Unknown)

    @pytest.mark.slow
    async def test_all_pages_of_pods_are_read(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 300}))
        order = {"gpuType": "L4_24GB", "gpuCount": 1}
        for n in range(205):
            rig.cloud.rent(f"gpuwarden-t{n}", Resources(gpu="L4_24GB"), order=order, provider="runpod")
        await rig.settle()
        assert len({i.id for i in known(await rig.provider.list())}) == 205
        assert [i.token for i in known(await rig.provider.find("t204"))] == ["t204"]

    async def test_a_list_shorter_than_its_total_is_unknown(self, rig: CloudRig) -> None:
        for body in ({"data": [], "total_count": 2}, {"data": [], "total_count": None}, {"data": []}):
            rig.cloud.faults = [Fault("other", self.lists, count=9, body=json.dumps(body).encode())]
            assert isinstance(await rig.provider.list(), Unknown)

    async def test_an_address_that_does_not_exist_is_no_proof_of_absence(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        rig.cloud.faults = [Fault("other", self.gets, status=404, body=b'{"detail": "Not Found"}')]
        assert isinstance(await rig.provider.get(instance.id), Unknown)

    async def test_a_404_that_the_list_contradicts_is_not_gone(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        rig.cloud.faults = [Fault("other", self.gets, status=404, body=b'{"detail": "Pod not found"}')]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING

    async def test_a_status_that_prime_does_not_know_is_unknown_and_still_listed(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.account(rig).statuses[instance.id] = "UNKNOWN"
        assert isinstance(await rig.provider.get(instance.id), Unknown)
        (listed,) = known(await rig.provider.list())
        assert listed.meter is None and listed.place is None

    async def test_no_place_before_the_image_is_installed(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.account(rig).installing.add(instance.id)
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING and seen.place is None and seen.meter is True

    @pytest.mark.parametrize(
        ("told", "place"),
        [
            ("root@1.2.3.4 -p 22", ("root", "1.2.3.4", 22)),
            ("ubuntu@host.example", ("ubuntu", "host.example", None)),
            (["root@1.2.3.4 -p 2200"], ("root", "1.2.3.4", 2200)),
            ([None], None),
            ("root@1.2.3.4 -p 22; rm -rf /", None),
            ("-oProxyCommand=x@h", None),
            ("", None),
        ],
    )
    async def test_the_address_is_read_from_a_command(self, rig: CloudRig, told: Any, place: Any) -> None:
        instance = await self.rent(rig)
        self.account(rig).ssh = told
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None
        found = seen.place and (seen.place.user, seen.place.host, seen.place.port)
        assert found == place

    async def test_what_was_billed_is_in_the_history(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        await self.down(rig, instance.id)
        gone = known(await rig.provider.get(instance.id))
        assert gone is not None and gone.state is InstanceState.GONE
        assert gone.cost_usd == pytest.approx(rig.cloud.cloud.truth(instance.id).cost_usd)

    async def test_the_key_is_ours_or_the_order_is_refused(self, rig: CloudRig) -> None:
        self.account(rig).keys = self.account(rig).keys[:1]
        with pytest.raises(BadRequest, match="none of the SSH keys"):
            await rig.provider.create(self.resources, "token-1")
        assert [f.severity for f in await rig.provider.check()] == [Severity.ERROR]
        del rig.env["GPUWARDEN_SSH_PUBLIC_KEY"]
        rig.env["HOME"] = "/nowhere"
        known(await rig.provider.create(self.resources, "token-1"))
        assert next(a.body for a in rig.cloud.asked if a.method == "POST")["pod"]["sshKeyId"] == "key0"

    async def test_the_last_one_going_in_between_is_no_capacity(self, rig: CloudRig) -> None:
        body = b'{"detail": "The selected configuration is no longer available"}'
        rig.cloud.faults = [Fault("other", self.creates, status=400, body=body)]
        with pytest.raises(NoCapacity):
            await rig.provider.create(self.resources, "token-1")

    async def test_an_end_answered_with_an_error_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        for body in (b'{"detail": "no"}', b'{"error": {"message": "no"}}', b"[]"):
            rig.cloud.faults = [Fault("other", self.ends, body=body)]
            assert isinstance(await rig.provider.terminate(instance.id), Unknown)
