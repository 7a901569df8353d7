"""Paperspace: the contract, and one test for each of its traps."""

from __future__ import annotations

import json

import pytest

from clouds.base import Fault
from clouds.paperspace import PaperspaceTeam
from clouds_kit import CloudContract, CloudRig, known, web  # noqa: F401
from gpuwarden.core.errors import BadRequest, Conflict, NoCapacity, NotSupported
from gpuwarden.core.models import InstanceState, Resources, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.providers.paperspace import Paperspace


class TestPaperspace(CloudContract):
    emulator = PaperspaceTeam
    provider = Paperspace
    more_env = {"PAPERSPACE_TEMPLATE": "tpl1", "PAPERSPACE_REGION": "ny2"}
    creates = r"^POST /machines$"
    lists = r"^GET /machines$"
    gets = r"^GET /machines/"
    ends = r"^DELETE /machines/"
    spec = ("paperspace-machines.openapi.yaml", "")
    gaps = ("state: 'off' is not one of", "status 401", "status 404", "GET /auth/session: no such route")
    # YAML made false of off; no error is described; the session is published on a page of its own

    def says_nothing(self, status: int, raw: bytes) -> bool:
        body = json.loads(raw) if raw else None
        return isinstance(body, dict) and body.get("items") == [] and body.get("hasMore") is False

    def team(self, rig: CloudRig) -> PaperspaceTeam:
        assert isinstance(rig.cloud, PaperspaceTeam)
        return rig.cloud

    async def test_what_is_ordered(self, rig: CloudRig) -> None:
        rig.env["PAPERSPACE_NETWORK"] = "net1"
        known(await rig.provider.create(Resources(gpu="H100", gpu_count=8, disk_gb=120), "j1-i1"))
        order = next(a.body for a in rig.cloud.asked if a.method == "POST")
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
    async def test_a_deadline_is_the_platforms_own_shutdown(
        self, rig: CloudRig, deadline_s: int | None, hours: int | None
    ) -> None:
        known(await rig.provider.create(Resources(gpu="H100", deadline_s=deadline_s), "j1-i1"))
        order = next(a.body for a in rig.cloud.asked if a.method == "POST")
        assert order["autoShutdownEnabled"] is (hours is not None)
        assert order.get("autoShutdownTimeout") == hours

    async def test_a_shutdown_that_was_not_taken_is_not_promised(self, rig: CloudRig) -> None:
        asked = Resources(gpu="H100", deadline_s=7200)
        made = known(await rig.provider.create(asked, "j1-i1"))
        assert made.ends_at == pytest.approx(rig.clock.now() + 7200) and "did not take" not in made.why
        self.team(rig).deaf_to_shutdown = True
        made = known(await rig.provider.create(asked, "j2-i1"))
        assert made.ends_at is None and "did not take the shutdown after 2 h" in made.why

    @pytest.mark.parametrize(
        ("told", "taken"),
        [
            ({}, True),
            ({"autoShutdownEnabled": True, "autoShutdownTimeout": 2}, True),
            ({"autoShutdownEnabled": True, "autoShutdownTimeout": "2"}, True),
            ({"autoShutdownEnabled": True, "autoShutdownTimeout": 168}, False),
            ({"autoShutdownEnabled": False}, False),
            ({"autoShutdownEnabled": True, "autoShutdownTimeout": []}, False),
        ],
    )
    async def test_what_a_reply_says_of_the_shutdown(self, rig: CloudRig, told: dict[str, object], taken: bool) -> None:
        body = {"id": "ps1", "name": "gpuwarden-j1-i1", "state": "provisioning", **told}
        rig.cloud.faults = [Fault("other", self.creates, body=json.dumps(body).encode())]
        made = known(await rig.provider.create(Resources(gpu="H100", deadline_s=7200), "j1-i1"))
        assert made.id == "ps1" and (made.ends_at is not None) is taken

    async def test_replies_wrapped_with_an_event_are_read_too(self, rig: CloudRig) -> None:
        self.team(rig).wraps = True
        instance = await self.rent(rig)
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        known(await rig.provider.start(instance.id))
        await rig.settle()
        await self.down(rig, instance.id)
        assert known(await rig.provider.get(instance.id)) is None

    async def test_a_running_machine_is_not_deleted(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        with pytest.raises(Conflict, match="only ones that are off"):
            await rig.provider.terminate(instance.id)
        assert not any(a.method == "DELETE" for a in rig.cloud.asked)

    async def test_a_retired_address_ends_no_machine(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.team(rig).retired = True
        for ask in (lambda: rig.provider.get(instance.id), lambda: rig.provider.terminate(instance.id)):
            answer = await ask()  # type: ignore[no-untyped-call]
            assert isinstance(answer, Unknown) and "not even the list" in answer.why

    async def test_a_404_that_the_list_contradicts_is_not_gone(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        body = b'{"code": "NOT_FOUND", "message": "Machine not found"}'
        rig.cloud.faults = [Fault("other", self.gets, status=404, body=body)]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING
        rig.cloud.faults = [Fault("other", self.gets, status=404, body=body), Fault("html", self.lists)]
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
    async def test_a_list_that_goes_on_nowhere_is_unknown(self, rig: CloudRig, end: dict[str, object]) -> None:
        body = json.dumps({"items": [], "hasMore": True, **end}).encode()
        rig.cloud.faults = [Fault("other", self.lists, count=99, body=body)]
        assert isinstance(await rig.provider.list(), Unknown)

    async def test_serviceready_is_not_ready(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.team(rig).states[instance.id] = "serviceready"
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.BOOTING and seen.place is None and seen.meter is True

    async def test_prices_are_unknown_and_a_cap_is_refused(self, rig: CloudRig) -> None:
        assert known(await rig.provider.quote(self.resources)).price_usd_per_hour is None
        assert (await self.rent(rig)).price_usd_per_hour is None
        with pytest.raises(NotSupported, match="price cap"):
            await rig.provider.create(Resources(gpu="H100", max_price_usd_per_hour=9.0), "token-2")
        assert len(rig.cloud.own) == 1

    async def test_what_has_to_be_set_is_said(self, rig: CloudRig) -> None:
        del rig.env["PAPERSPACE_TEMPLATE"]
        assert [f.severity for f in await rig.provider.check()] == [Severity.ERROR]
        with pytest.raises(BadRequest, match="PAPERSPACE_TEMPLATE"):
            await rig.provider.create(self.resources, "token-1")

    async def test_a_disk_too_large_is_refused(self, rig: CloudRig) -> None:
        with pytest.raises(BadRequest, match="largest disk"):
            await rig.provider.create(Resources(gpu="H100", disk_gb=2001), "token-1")

    async def test_out_of_capacity_is_no_capacity(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 0}))
        with pytest.raises(NoCapacity):
            await rig.provider.create(self.resources, "token-1")

    async def test_a_deletion_answered_with_an_error_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        for body in (b'{"code": "INTERNAL", "message": "no"}', b'{"error": "no"}', b"[]", b"null"):
            rig.cloud.faults = [Fault("other", self.ends, body=body)]
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
