"""Prime Intellect: the contract, and one test for each of its pitfalls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clouds.base import Fault
from clouds.prime_intellect import DISK_USD, PLATFORM, PrimeAccount, spec
from clouds_kit import CloudRig, CloudTests, known
from gpuwarden.core.errors import BadRequest, NoCapacity
from gpuwarden.core.models import InstanceState, Resources, Unknown
from gpuwarden.core.rules import Severity
from wording import Wording


class TestPrimeIntellect(CloudTests):
    platform = PLATFORM

    def account(self, rig: CloudRig) -> PrimeAccount:
        assert isinstance(rig.cloud, PrimeAccount)
        return rig.cloud

    async def test_create_sends_the_expected_order(self, rig: CloudRig) -> None:
        request = Resources(gpu="H100", gpu_count=2, disk_gb=200, max_price_usd_per_hour=4.5)
        known(await rig.provider.create(request, "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.method == "POST")
        assert order["provider"] == {"type": "runpod"}
        pod = order["pod"]
        assert pod["name"] == "gpuwarden-j1-i1" and pod["cloudId"] == "H100_80GB-2" and pod["gpuCount"] == 2
        assert pod["maxPrice"] == 4.5 and pod["sshKeyId"] == "key1" and pod["diskSize"] == 200
        assert pod["image"] == "cuda_12_4_pytorch_2_6" and pod["autoRestart"] is False
        assert pod["vcpus"] == 52 and pod["memory"] == 400 and "team" not in order

    async def test_an_offer_above_the_cap_is_not_rented(self, rig: CloudRig) -> None:
        with pytest.raises(NoCapacity):
            await rig.provider.create(Resources(gpu="H100", max_price_usd_per_hour=2.0), "j1-i1")
        assert rig.cloud.own == {}

    async def test_a_spot_request_gets_the_spot_offer(self, rig: CloudRig) -> None:
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour == 2.1
        spot = Resources(gpu="H100", interruptible=True)
        assert known(await rig.provider.quote(spot)).price_usd_per_hour == 1.05
        known(await rig.provider.create(spot, "j1-i1"))
        assert next(a.body for a in rig.cloud.requests if a.method == "POST")["pod"]["cloudId"] == "H100_80GB-1-spot"

    async def test_unusable_offers_are_ignored(self, rig: CloudRig) -> None:
        cheap: dict[str, Any] = {"onDemand": 0.01, "currency": "USD"}
        make = self.account(rig).offer
        self.account(rig).more = [
            make("H100_80GB", 1, cloudId="prepaid", prepaidTime=24, prices=cheap),
            make("H100_80GB", 1, cloudId="out", stockStatus="Unavailable", prices=cheap),
            make("H100_80GB", 1, cloudId="nobody", provider=None, prices=cheap),
            make("H100_80GB", 1, cloudId="free", prices={"onDemand": 0.0, "currency": "USD"}),
            make("H100_80GB", 1, cloudId="foreign", prices={"onDemand": 0.02, "currency": "EUR"}),
        ]
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour == 2.1

    async def test_all_pages_of_offers_are_read(self, rig: CloudRig) -> None:
        assert known(await rig.provider.quote(Resources(gpu="L4"))).price_usd_per_hour == 0.3
        assert sum(a.path.startswith("/availability") for a in rig.cloud.requests) == 3

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
            rig.cloud.faults = [Fault("other", self.platform.lists, count=9, body=json.dumps(body).encode())]
            assert isinstance(await rig.provider.list(), Unknown)

    async def test_a_route_404_does_not_prove_absence(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        rig.cloud.faults = [Fault("other", self.platform.gets, status=404, body=b'{"detail": "Not Found"}')]
        assert isinstance(await rig.provider.get(instance.id), Unknown)

    async def test_a_404_contradicted_by_the_list_is_not_gone(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        rig.cloud.faults = [Fault("other", self.platform.gets, status=404, body=b'{"detail": "Pod not found"}')]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING

    async def test_an_unknown_status_is_unknown_but_still_listed(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.account(rig).statuses[instance.id] = "UNKNOWN"
        assert isinstance(await rig.provider.get(instance.id), Unknown)
        (listed,) = known(await rig.provider.list())
        assert listed.meter is None and listed.place is None

    async def test_a_pod_has_no_place_until_its_image_is_installed(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.account(rig).installing.add(instance.id)
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING and seen.place is None and seen.meter is True

    @pytest.mark.parametrize(
        ("reply", "place"),
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
    async def test_the_address_is_parsed_from_the_ssh_command(self, rig: CloudRig, reply: Any, place: Any) -> None:
        instance = await self.rent(rig)
        self.account(rig).ssh = reply
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None
        found = seen.place and (seen.place.user, seen.place.host, seen.place.port)
        assert found == place

    async def test_the_final_cost_comes_from_the_history(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        await self.down(rig, instance.id)
        gone = known(await rig.provider.get(instance.id))
        assert gone is not None and gone.state is InstanceState.GONE
        assert gone.cost_usd == pytest.approx(rig.cloud.cloud.truth(instance.id).cost_usd)

    async def test_an_order_without_our_ssh_key_is_refused(self, rig: CloudRig, wording: Wording) -> None:
        self.account(rig).keys = self.account(rig).keys[:1]
        with pytest.raises(BadRequest) as refused:
            await rig.provider.create(rig.resources, "token-1")
        wording(refused)
        assert [f.severity for f in await rig.provider.check()] == [Severity.ERROR]
        del rig.env["GPUWARDEN_SSH_PUBLIC_KEY"]
        rig.env["HOME"] = "/nowhere"
        known(await rig.provider.create(rig.resources, "token-1"))
        assert next(a.body for a in rig.cloud.requests if a.method == "POST")["pod"]["sshKeyId"] == "key0"

    async def test_the_last_offer_sold_in_between_raises_no_capacity(self, rig: CloudRig) -> None:
        body = b'{"detail": "The selected configuration is no longer available"}'
        rig.cloud.faults = [Fault("other", self.platform.creates, status=400, body=body)]
        with pytest.raises(NoCapacity):
            await rig.provider.create(rig.resources, "token-1")

    async def test_an_end_answered_with_an_error_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        for body in (b'{"detail": "no"}', b'{"error": {"message": "no"}}', b"[]"):
            rig.cloud.faults = [Fault("other", self.platform.ends, body=body)]
            assert isinstance(await rig.provider.terminate(instance.id), Unknown)

    # ------------------------------------------------------------------------------------- teams, amounts, odd rows

    async def test_a_team_owns_the_pod_and_its_wallet_pays(self, rig: CloudRig) -> None:
        rig.env["PRIME_TEAM_ID"] = "team1"
        instance = await self.rent(rig)
        assert next(a.body for a in rig.cloud.requests if a.method == "POST")["team"] == {"teamId": "team1"}
        assert rig.cloud.own[instance.id]["team"] == "team1"
        assert known(await rig.provider.balance()).amount == 40.0
        assert await rig.provider.check() == []

    async def test_an_inaccessible_team_is_an_error_finding(self, rig: CloudRig) -> None:
        rig.env["PRIME_TEAM_ID"] = "team2"
        (finding,) = await rig.provider.check()
        assert finding.severity is Severity.ERROR and "PRIME_TEAM_ID" in finding.message

    async def test_a_quote_adds_disk_beyond_the_included_size(self, rig: CloudRig) -> None:
        for disk_gb, ordered, usd in ((None, 100, 2.1), (80, 80, 2.1), (600, 600, 2.1 + 500 * DISK_USD)):
            quote = known(await rig.provider.quote(Resources(gpu="H100", disk_gb=disk_gb)))
            assert quote.price_usd_per_hour == pytest.approx(usd)
            assert quote.note.endswith(f"26 vCPUs, 200 GB memory, {ordered} GB disk")
        made = known(await rig.provider.create(Resources(gpu="H100", disk_gb=600), "j1-i1"))
        assert made.price_usd_per_hour == pytest.approx(2.1 + 500 * DISK_USD)

    async def test_a_cap_counts_the_disk(self, rig: CloudRig) -> None:
        with pytest.raises(NoCapacity):
            await rig.provider.create(Resources(gpu="H100", disk_gb=600, max_price_usd_per_hour=2.11), "j1-i1")
        assert rig.cloud.own == {}

    async def test_an_offer_with_too_small_a_disk_is_skipped(self, rig: CloudRig) -> None:
        make = self.account(rig).offer
        self.account(rig).more = [
            make("H100_80GB", 1, cloudId="small", disk=spec(100), prices={"onDemand": 1.0, "currency": "USD"}),
            make("H100_80GB", 1, cloudId="steps", disk={**spec(100, 100, 950, 0.0), "step": 200},
                 prices={"onDemand": 1.5, "currency": "USD"}),
        ]  # fmt: skip
        orders = []
        for disk_gb in (100, 150, 750, 900):
            known(await rig.provider.create(Resources(gpu="H100", disk_gb=disk_gb), f"j{disk_gb}-i1"))
            pod = rig.cloud.requests[-1].body["pod"]
            orders.append((pod["cloudId"], pod["diskSize"]))
        assert orders == [("small", 100), ("steps", 300), ("steps", 900), ("steps", 900)]
        with pytest.raises(NoCapacity, match="5000"):
            await rig.provider.create(Resources(gpu="H100", disk_gb=5000), "j1-i1")

    async def test_vcpus_and_memory_not_included_are_added_to_the_price(self, rig: CloudRig) -> None:
        apart = {**spec(8, 2, 32, 0.01), "defaultIncludedInPrice": False}
        cheap = {"onDemand": 1.0, "currency": "USD"}
        self.account(rig).more = [self.account(rig).offer("H100_80GB", 1, vcpu=apart, memory=apart, prices=cheap)]
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour == pytest.approx(1.16)

    @pytest.mark.parametrize(
        "odd",
        [{"status": "MIGRATING"}, {"priceHr": "2.10"}, {"sshConnection": 7}, {"createdAt": "soon"}, {"priceHr": 1e30}],
    )
    async def test_an_odd_pod_hides_no_others(self, rig: CloudRig, odd: dict[str, Any]) -> None:
        one, two = await self.rent(rig, "token-1"), await self.rent(rig, "token-2")
        self.account(rig).odd[one.id] = odd
        rows = {i.id: i for i in known(await rig.provider.list())}
        assert rows[two.id].state is InstanceState.RUNNING and rows[two.id].price_usd_per_hour == 2.1
        assert rows[one.id].token == "token-1" and rows[one.id].meter is None and rows[one.id].place is None
        assert [i.id for i in known(await rig.provider.find("token-1"))] == [one.id]
        assert isinstance(await rig.provider.get(one.id), Unknown)

    @pytest.mark.parametrize("odd", [{"id": None}, {"id": "a b"}, {"name": 7}])
    async def test_an_unidentifiable_pod_makes_the_list_unknown(self, rig: CloudRig, odd: dict[str, Any]) -> None:
        self.account(rig).odd[(await self.rent(rig)).id] = odd
        assert isinstance(await rig.provider.list(), Unknown)
        assert isinstance(await rig.provider.find("token-1"), Unknown)

    async def test_an_odd_offer_hides_no_others(self, rig: CloudRig) -> None:
        make = self.account(rig).offer
        self.account(rig).more = [
            make("H100_80GB", 1, prices={"onDemand": "1.00"}), make("H100_80GB", 1, prepaidTime="a month"),
            make("H100_80GB", 1, prepaidTime=24.0, prices={"onDemand": 0.5}), {**make("H100_80GB", 1), "disk": None},
        ]  # fmt: skip
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour == 2.1
        body = json.dumps({"items": [{"gpu": "H100"}], "totalCount": 1}).encode()
        rig.cloud.faults = [Fault("other", r"/availability", body=body)]
        assert isinstance(await rig.provider.quote(rig.resources), Unknown)

    @pytest.mark.parametrize(
        ("stopped", "meter", "price"), [(0.005, False, None), (0.0, False, None), (None, True, 2.1)]
    )
    async def test_a_stopped_pod_without_its_own_price_bills_the_full_price(
        self, rig: CloudRig, stopped: float | None, meter: bool, price: float | None
    ) -> None:
        instance = await self.rent(rig)
        self.account(rig).odd[instance.id] = {"status": "STOPPED", "stoppedPriceHr": stopped}
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and (seen.meter, seen.price_usd_per_hour) == (meter, price)

    async def test_primes_own_422_is_a_refusal(self, rig: CloudRig) -> None:
        body = b'{"errors": [{"param": "body.pod.diskSize", "details": "is too small"}]}'
        rig.cloud.faults = [Fault("other", self.platform.creates, status=422, body=body)]
        with pytest.raises(BadRequest, match="is too small"):
            await rig.provider.create(rig.resources, "token-1")
