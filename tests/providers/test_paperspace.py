"""Paperspace: the contract, and one test for each of its pitfalls."""

from __future__ import annotations

import json

import pytest

from clouds.base import Fault
from clouds.paperspace import PLATFORM, PaperspaceTeam
from clouds_kit import CloudRig, CloudTests, known
from gpuwarden.core.errors import BadRequest, Conflict, NoCapacity, NotSupported
from gpuwarden.core.models import InstanceState, Resources, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.interfaces.mcp.wording import in_calls
from wording import Wording


class TestPaperspace(CloudTests):
    platform = PLATFORM

    def team(self, rig: CloudRig) -> PaperspaceTeam:
        assert isinstance(rig.cloud, PaperspaceTeam)
        return rig.cloud

    async def test_create_sends_the_expected_order(self, rig: CloudRig) -> None:
        rig.env["PAPERSPACE_NETWORK"] = "net1"
        known(await rig.provider.create(Resources(gpu="H100", gpu_count=8, disk_gb=120), "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.method == "POST")
        assert order == {
            "name": "gpuwarden-j1-i1",
            "machineType": "H100x8",
            "templateId": "tpl1",
            "region": "ny2",
            "networkId": "net1",
            "diskSize": 250,
            "publicIpType": "dynamic",
            "startOnCreate": True,
            "autoShutdownEnabled": False,
        }

    @pytest.mark.parametrize(
        ("deadline_s", "hours"), [(1, 1), (3600, 1), (3601, 2), (168 * 3600, 168), (168 * 3600 + 1, None), (None, None)]
    )
    async def test_a_deadline_becomes_the_platforms_auto_shutdown(
        self, rig: CloudRig, deadline_s: int | None, hours: int | None
    ) -> None:
        known(await rig.provider.create(Resources(gpu="H100", deadline_s=deadline_s), "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.method == "POST")
        assert order["autoShutdownEnabled"] is (hours is not None)
        assert order.get("autoShutdownTimeout") == hours

    async def test_a_requested_auto_shutdown_sets_no_end_time(self, rig: CloudRig) -> None:
        made = known(await rig.provider.create(Resources(gpu="H100", deadline_s=7200), "j1-i1"))
        assert made.ends_at is None

    async def test_replies_without_an_event_are_read_too(self, rig: CloudRig) -> None:
        self.team(rig).wraps = False
        instance = await self.rent(rig)
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        known(await rig.provider.start(instance.id))
        await rig.settle()
        await self.down(rig, instance.id)
        assert known(await rig.provider.get(instance.id)) is None

    async def test_a_running_machine_is_not_deleted(self, rig: CloudRig, wording: Wording) -> None:
        instance = await self.rent(rig)
        with pytest.raises(Conflict) as refused:
            await rig.provider.terminate(instance.id)
        wording(refused, instance.id)
        assert not any(a.method == "DELETE" for a in rig.cloud.requests)

    async def test_a_retired_endpoint_is_unknown(self, rig: CloudRig, wording: Wording) -> None:
        instance = await self.rent(rig)
        self.team(rig).retired = True
        for ask in (lambda: rig.provider.get(instance.id), lambda: rig.provider.terminate(instance.id)):
            answer = await ask()  # type: ignore[no-untyped-call]
            assert isinstance(answer, Unknown)
            wording(answer.why)

    async def test_a_404_contradicted_by_the_list_is_not_gone(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        body = b'{"code": "NOT_FOUND", "message": "Machine not found"}'
        rig.cloud.faults = [Fault("other", self.platform.gets, status=404, body=body)]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING
        rig.cloud.faults = [
            Fault("other", self.platform.gets, status=404, body=body),
            Fault("html", self.platform.lists),
        ]
        assert isinstance(await rig.provider.get(instance.id), Unknown)

    @pytest.mark.slow
    async def test_all_pages_are_read(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 300}))
        order = {"name": "", "machineType": "A4000", "region": "ny2"}
        for n in range(230):
            rig.cloud.rent(f"gpuwarden-t{n}", Resources(gpu="A4000"), order={**order, "name": f"gpuwarden-t{n}"})
        await rig.settle()
        assert len({i.id for i in known(await rig.provider.list())}) == 230
        assert [i.token for i in known(await rig.provider.find("t229"))] == ["t229"]

    @pytest.mark.parametrize("end", [{}, {"nextPage": ""}, {"nextPage": None}, {"nextPage": "x"}])
    async def test_a_list_without_a_usable_next_page_is_unknown(self, rig: CloudRig, end: dict[str, object]) -> None:
        body = json.dumps({"items": [], "hasMore": True, **end}).encode()
        rig.cloud.faults = [Fault("other", self.platform.lists, count=99, body=body)]
        assert isinstance(await rig.provider.list(), Unknown)

    async def test_serviceready_is_not_ready(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.team(rig).states[instance.id] = "serviceready"
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.BOOTING and seen.place is None and seen.meter is True

    async def test_quotes_use_the_price_of_the_same_machine_type(self, rig: CloudRig) -> None:
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour is None
        instance = await self.rent(rig)
        assert instance.price_usd_per_hour == pytest.approx(5.95 + 7 / 730)
        quote = known(await rig.provider.quote(rig.resources))
        assert quote.price_usd_per_hour == instance.price_usd_per_hour and instance.id in quote.note
        assert known(await rig.provider.quote(Resources(gpu="A4000"))).price_usd_per_hour is None
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        off = known(await rig.provider.get(instance.id))
        assert off is not None and (off.price_usd_per_hour, off.meter) == (None, False)
        assert off.stopped_usd_per_hour == pytest.approx(7 / 730)

    @pytest.mark.parametrize(
        ("rates", "price", "stopped"),
        [
            ({"usageRate": 2.3, "storageRate": 7}, 2.3 + 7 / 730, 7 / 730),
            ({"usageRate": 2.3, "storageRate": 0.0096}, 2.3096, 0.0096),
            ({"usageRate": 2.3, "storageRate": 0}, 2.3, None),
            ({"usageRate": 0, "storageRate": 7}, None, 7 / 730),
            ({"usageRate": None, "storageRate": None}, None, None),
        ],
    )
    async def test_rates_become_dollars_an_hour(
        self, rig: CloudRig, rates: dict[str, object], price: float | None, stopped: float | None
    ) -> None:
        instance = await self.rent(rig)
        self.team(rig).odd[instance.id] = rates
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.price_usd_per_hour == (pytest.approx(price) if price else None)
        assert seen.stopped_usd_per_hour == (pytest.approx(stopped) if stopped else None)

    async def test_a_cap_is_unsupported_before_a_machine_exists(self, rig: CloudRig, wording: Wording) -> None:
        with pytest.raises(NotSupported) as refused:
            await rig.provider.create(Resources(gpu="H100", max_price_usd_per_hour=9.0), "token-2")
        wording(refused)
        assert rig.cloud.own == {}

    async def test_a_sold_out_machine_is_reported_by_the_quote(self, rig: CloudRig, wording: Wording) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 0}))
        with pytest.raises(NoCapacity) as refused:
            await rig.provider.quote(rig.resources)
        wording(refused, "H100", "ny2")
        rig.cloud.faults = [Fault("error_500", "availability")]
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour is None

    async def test_the_newest_standard_template_for_the_machine_type_is_used(
        self, rig: CloudRig, wording: Wording
    ) -> None:
        del rig.env["PAPERSPACE_TEMPLATE"]
        for gpu, count, template in (("H100", 1, "tml"), ("H100", 8, "tml"), ("A4000", 1, "told")):
            known(await rig.provider.create(Resources(gpu=gpu, gpu_count=count), f"{gpu}-{count}"))
            assert next(a.body for a in reversed(rig.cloud.requests) if a.method == "POST")["templateId"] == template
        self.team(rig).templates.pop(0)
        with pytest.raises(BadRequest) as caught:
            await rig.provider.create(Resources(gpu="A4000"), "j2-i1")
        wording(caught, "A4000")
        assert "tsrv" in in_calls(caught.value.next_steps)
        rig.cloud.faults = [Fault("html", "/os-templates")]
        assert isinstance(await rig.provider.create(rig.resources, "j3-i1"), Unknown)
        assert len(rig.cloud.own) == 3

    async def test_a_template_for_another_machine_type_is_refused(self, rig: CloudRig, wording: Wording) -> None:
        for template in ("told", "tpl1"):
            rig.env["PAPERSPACE_TEMPLATE"] = template
            with pytest.raises(BadRequest) as refused:
                await rig.provider.create(Resources(gpu="A6000"), "j1-i1")
            wording(refused, template, "A6000")
        rig.env["PAPERSPACE_TEMPLATE"] = "not-listed"
        known(await rig.provider.create(Resources(gpu="A6000"), "j1-i1"))

    @pytest.mark.parametrize(
        "odd", [{"state": "hibernating"}, {"usageRate": "5.95"}, {"dtCreated": 7}, {"publicIp": 1}]
    )
    async def test_an_odd_machine_hides_no_others(self, rig: CloudRig, odd: dict[str, object]) -> None:
        one, two = await self.rent(rig, "token-1"), await self.rent(rig, "token-2")
        self.team(rig).odd[one.id] = odd
        rows = {i.id: i for i in known(await rig.provider.list())}
        assert rows[two.id].state is InstanceState.RUNNING and rows[two.id].place is not None
        assert rows[one.id].meter is None and rows[one.id].place is None
        assert [i.id for i in known(await rig.provider.find("token-1"))] == [one.id]
        assert isinstance(await rig.provider.get(one.id), Unknown)

    @pytest.mark.parametrize("odd", [{"id": None}, {"name": None}])
    async def test_an_unidentifiable_machine_makes_the_list_unknown(
        self, rig: CloudRig, odd: dict[str, object]
    ) -> None:
        self.team(rig).odd[(await self.rent(rig)).id] = odd
        assert isinstance(await rig.provider.list(), Unknown)

    async def test_a_missing_region_setting_is_reported(self, rig: CloudRig) -> None:
        del rig.env["PAPERSPACE_REGION"]
        assert [f.severity for f in await rig.provider.check()] == [Severity.ERROR]
        with pytest.raises(BadRequest, match="PAPERSPACE_REGION"):
            await rig.provider.create(rig.resources, "token-1")

    async def test_a_disk_too_large_is_refused(self, rig: CloudRig, wording: Wording) -> None:
        with pytest.raises(BadRequest) as refused:
            await rig.provider.create(Resources(gpu="H100", disk_gb=2001), "token-1")
        wording(refused, 2001)

    async def test_out_of_stock_raises_no_capacity(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 0}))
        with pytest.raises(NoCapacity):
            await rig.provider.create(rig.resources, "token-1")

    async def test_a_deletion_answered_with_an_error_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        for body in (b'{"code": "INTERNAL", "message": "no"}', b'{"error": "no"}', b"[]", b"null"):
            rig.cloud.faults = [Fault("other", self.platform.ends, body=body)]
            assert isinstance(await rig.provider.terminate(instance.id), Unknown)

    async def test_the_address_after_a_start_is_read_again(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        assert instance.place is not None and instance.place.port is None and instance.place.user == "paperspace"
        addresses = iter(["127.0.0.9"] * 9)
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        rig.cloud.address = lambda ident: (next(addresses), 22)
        known(await rig.provider.start(instance.id))
        await rig.settle()
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.place is not None and seen.place.host == "127.0.0.9"
