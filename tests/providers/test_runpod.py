"""RunPod: the contract, and one test for each of its pitfalls."""

from __future__ import annotations

import json

import pytest

from clouds.base import PUBLIC_KEY, Fault
from clouds.runpod import PLATFORM, RunPodCloud
from clouds_kit import CloudRig, CloudTests, known
from gpuwarden.core.errors import BadRequest, Conflict, NoCapacity, NotSupported
from gpuwarden.core.models import InstanceState, Resources, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.providers.runpod import RunPod
from wording import Wording


class TestRunPod(CloudTests):
    platform = PLATFORM

    async def test_the_balance_includes_the_hourly_spend(self, rig: CloudRig) -> None:
        assert isinstance(rig.cloud, RunPodCloud)
        for spends in (3.25, None):
            rig.cloud.spends = spends
            assert known(await rig.provider.balance()).per_hour == spends

    async def test_the_graphql_api_is_on_the_same_host(self, rig: CloudRig) -> None:
        assert isinstance(rig.provider, RunPod)
        plain = RunPod(rig.provider.profile, rig.clock, {"RUNPOD_API_KEY": "k" * 20})
        assert plain.graph.url == "https://api.runpod.io" and plain.client.url == "https://api.runpod.io/v2"

    @pytest.mark.parametrize(
        "body",
        [
            b'{"errors": [{"message": "not authorized"}], "data": null}',
            b'{"errors": [{"message": "x"}], "data": {"myself": {"clientBalance": 5.0}}}',
            b'{"data": {"myself": null}}',
        ],
    )
    async def test_a_balance_error_with_status_200_is_unknown(self, rig: CloudRig, body: bytes) -> None:
        rig.cloud.faults = [Fault("other", "graphql", body=body)]
        assert isinstance(await rig.provider.balance(), Unknown)

    async def test_create_sends_the_expected_order(self, rig: CloudRig) -> None:
        known(await rig.provider.create(Resources(gpu="H100", gpu_count=2, disk_gb=200), "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.method == "POST")
        assert order["name"] == "gpuwarden-j1-i1"
        assert order["gpu"] == {"id": "NVIDIA H100 80GB HBM3", "count": 2}
        assert order["mounts"] == {"persistent": {"size": 200, "path": "/workspace"}}
        assert order["ports"] == ["22/tcp"] and order["startSsh"] is True
        assert order["env"] == {"PUBLIC_KEY": PUBLIC_KEY}
        assert rig.env["RUNPOD_API_KEY"] not in json.dumps(order)
        assert "interruptible" not in order

    async def test_durable_storage_is_the_network_volume_at_the_profiles_path(self, rig: CloudRig) -> None:
        known(await rig.provider.create(Resources(gpu="H100", durable_storage=True), "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.method == "POST")
        assert order["mounts"] == {"network": [{"volumeId": "vol1", "path": "/workspace"}]}
        assert order["dataCenterIds"] == ["EU-RO-1"] and order["cloud"] == "SECURE"

    @pytest.mark.parametrize("count", [0, 2])
    async def test_durable_storage_needs_exactly_one_volume(self, rig: CloudRig, count: int, wording: Wording) -> None:
        assert isinstance(rig.cloud, RunPodCloud)
        rig.cloud.volumes = [{**rig.cloud.volumes[0], "id": f"v{n}"} for n in range(count)]
        with pytest.raises(BadRequest) as refused:
            await rig.provider.create(Resources(gpu="H100", durable_storage=True), "j1-i1")
        wording(refused, count)
        assert rig.cloud.own == {}

    async def test_cluster_pods_are_listed_but_cannot_be_terminated(self, rig: CloudRig) -> None:
        assert isinstance(rig.cloud, RunPodCloud)
        instance = await self.rent(rig)
        rig.cloud.cluster_pods = [instance.id]
        assert [i.id for i in known(await rig.provider.list())] == [instance.id]
        with pytest.raises(Conflict):
            await rig.provider.terminate(instance.id)

    async def test_interruptible_pods_are_refused_before_any_request(self, rig: CloudRig) -> None:
        with pytest.raises(NotSupported):
            await rig.provider.create(Resources(gpu="H100", interruptible=True), "j1-i1")
        assert rig.cloud.requests == []

    async def test_a_stop_in_the_wrong_state_is_a_conflict(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        with pytest.raises(Conflict, match="not valid for status EXITED"):
            await rig.provider.stop(instance.id)

    async def test_a_lock_blocks_the_stop_and_is_shown(self, rig: CloudRig, wording: Wording) -> None:
        instance = await self.rent(rig)
        rig.cloud.own[instance.id]["locked"] = True
        with pytest.raises(Conflict, match="locked"):
            await rig.provider.stop(instance.id)
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None
        wording(seen.why)

    async def test_a_stopped_pods_zero_price_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.STOPPED and seen.meter is False
        assert seen.price_usd_per_hour is None and seen.stopped_usd_per_hour is None

    async def test_an_exited_pod_with_a_price_still_bills(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        known(await rig.provider.stop(instance.id))
        await rig.settle()
        body = next(t.body for a, t in reversed(rig.cloud.exchanges) if a.method == "POST")
        lie = {**body, "status": "EXITED", "cost": 2.99, "runtime": None}
        rig.cloud.faults = [Fault("other", self.platform.gets, body=json.dumps(lie).encode())]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.STOPPED and seen.meter is True

    async def test_the_old_port_is_ignored_after_a_restart(self, rig: CloudRig) -> None:
        first = await self.rent(rig)
        assert first.place is not None
        known(await rig.provider.stop(first.id))
        await rig.settle()
        known(await rig.provider.start(first.id))
        rig.clock.time += 12  # RUNNING again, but with the previous port mapping
        early = known(await rig.provider.get(first.id))
        assert early is not None and early.state is InstanceState.RUNNING and early.place is None
        await rig.settle()
        late = known(await rig.provider.get(first.id))
        assert late is not None and late.place is not None and late.place.port != first.place.port

    async def test_an_uptime_from_before_the_start_is_stale(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        body = json.loads(json.dumps(rig.cloud.exchanges[-1][1].body))
        body["runtime"]["uptime"] = 99_999
        rig.cloud.faults = [Fault("other", self.platform.gets, body=json.dumps(body).encode())]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.place is None

    async def test_a_pod_without_its_gpu_is_reported(self, rig: CloudRig, wording: Wording) -> None:
        instance = await self.rent(rig)
        body = {k: v for k, v in rig.cloud.exchanges[-1][1].body.items() if k != "gpu"}
        rig.cloud.faults = [Fault("other", self.platform.gets, body=json.dumps(body).encode())]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None
        wording(seen.why)

    async def test_a_price_of_zero_is_unknown_and_passes_no_cap(self, rig: CloudRig) -> None:
        assert isinstance(rig.cloud, RunPodCloud)
        rig.cloud.prices = dict.fromkeys(rig.cloud.prices, 0.0)
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour is None
        with pytest.raises(NoCapacity):
            await rig.provider.create(Resources(gpu="H100", max_price_usd_per_hour=5.0), "j1-i1")

    async def test_the_cap_applies_to_the_price_of_all_gpus(self, rig: CloudRig) -> None:
        with pytest.raises(NoCapacity):
            await rig.provider.create(Resources(gpu="H100", gpu_count=2, max_price_usd_per_hour=5.0), "j1-i1")
        known(await rig.provider.create(Resources(gpu="H100", gpu_count=2, max_price_usd_per_hour=6.0), "j1-i1"))
        assert len(rig.cloud.own) == 1

    async def test_a_pod_billed_above_the_cap_is_reported(self, rig: CloudRig, wording: Wording) -> None:
        rig.cloud.prices["NVIDIA H100 80GB HBM3"] = 1.0  # the list price; 2.99 is billed
        made = known(await rig.provider.create(Resources(gpu="H100", max_price_usd_per_hour=2.0), "j1-i1"))
        assert made.price_usd_per_hour == 2.99
        wording(made.why)

    async def test_l4_is_not_l40s(self, rig: CloudRig, wording: Wording) -> None:
        assert known(await rig.provider.quote(Resources(gpu="L4"))).price_usd_per_hour == 0.43
        assert known(await rig.provider.quote(Resources(gpu="RTX4090"))).price_usd_per_hour == 0.69
        with pytest.raises(BadRequest) as refused:
            await rig.provider.quote(Resources(gpu="40"))
        wording(refused, "40")

    async def test_out_of_stock_raises_no_capacity(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 0}))
        with pytest.raises(NoCapacity):
            await rig.provider.create(rig.resources, "j1-i1")

    async def test_the_last_machine_sold_in_between_raises_no_capacity(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 1}))
        known(await rig.provider.create(rig.resources, "j1-i1"))
        with pytest.raises(NoCapacity, match="no longer any instances"):
            await rig.provider.create(rig.resources, "j2-i1")

    @pytest.mark.slow
    async def test_the_final_cost_comes_from_the_bill(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        await self.down(rig, instance.id)
        gone = known(await rig.provider.get(instance.id))
        assert gone is not None and gone.state is InstanceState.GONE
        assert gone.cost_usd == pytest.approx(rig.cloud.cloud.truth(instance.id).cost_usd)
        request = [a for a in rig.cloud.requests if a.path == "/billing/pods"]
        assert request and all(int(a.query["lastN"]) >= 365 for a in request), "the default is a month"
        assert not any(a.path == "/billing/endpoints" for a in rig.cloud.requests)

    async def test_a_reply_about_another_pod_is_unknown(self, rig: CloudRig) -> None:
        one, two = await self.rent(rig, "token-1"), await self.rent(rig, "token-2")
        body = next(t.body for a, t in rig.cloud.exchanges if a.path == f"/pods/{two.id}")
        rig.cloud.faults = [Fault("other", self.platform.gets, body=json.dumps(body).encode())]
        assert isinstance(await rig.provider.get(one.id), Unknown)

    async def test_a_404_contradicted_by_the_list_is_not_gone(self, rig: CloudRig, wording: Wording) -> None:
        instance = await self.rent(rig)
        body = b'{"title": "Not Found", "status": 404, "detail": "route not found"}'
        rig.cloud.faults = [Fault("other", self.platform.gets, status=404, body=body)]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING
        rig.cloud.faults = [Fault("other", "GET", status=404, count=9, body=body)]
        answer = await rig.provider.get(instance.id)
        assert isinstance(answer, Unknown)
        wording(answer.why)

    @pytest.mark.parametrize(
        "body", [b'{"title": "Not Found"}', b'{"status": 404}', b"{}", b"404", b"<html>404</html>"]
    )
    async def test_an_unrelated_404_is_unknown(self, rig: CloudRig, body: bytes) -> None:
        rig.cloud.faults = [Fault("other", self.platform.gets, status=404, body=body)]
        assert isinstance(await rig.provider.get("abc123"), Unknown)

    async def test_check_reports_a_missing_ssh_key(self, rig: CloudRig) -> None:
        assert isinstance(rig.cloud, RunPodCloud)
        del rig.env["GPUWARDEN_SSH_PUBLIC_KEY"]
        rig.env["HOME"] = "/nowhere"
        assert await rig.provider.check() == []
        rig.cloud.ssh_keys = []
        assert [f.severity for f in await rig.provider.check()] == [Severity.ERROR]

    async def test_a_deadline_sets_no_end_date_on_runpod(self, rig: CloudRig) -> None:
        made = known(await rig.provider.create(Resources(gpu="H100", disk_gb=80, deadline_s=3600), "token-1"))
        assert made.ends_at is None and len(rig.cloud.own) == 1
        assert [a.line for a in rig.cloud.requests if a.method == "POST" and "mutation" in a.line] == []

    # -------------------------------------------------------------------------------------------------- community cloud

    async def test_the_community_cloud_is_used_if_the_user_names_it(self, rig: CloudRig, wording: Wording) -> None:
        rig.env["RUNPOD_CLOUD"] = "community"
        quote = known(await rig.provider.quote(rig.resources))
        assert quote.price_usd_per_hour == pytest.approx(2.99 / 2) and "Community Cloud" in quote.note
        made = known(await rig.provider.create(rig.resources, "token-1"))
        assert rig.cloud.own[made.id]["order"]["cloud"] == "COMMUNITY"
        assert {a.query["cloud"] for a in rig.cloud.requests if a.path == "/catalog/gpus"} == {"COMMUNITY"}
        with pytest.raises(NoCapacity):  # at most four per machine
            await rig.provider.quote(Resources(gpu="H100", gpu_count=8))
        with pytest.raises(NotSupported) as refused:
            await rig.provider.quote(Resources(gpu="H100", durable_storage=True))
        wording(refused, "Secure Cloud")
        rig.env["RUNPOD_CLOUD"] = "ANY"
        with pytest.raises(BadRequest, match="RUNPOD_CLOUD"):
            await rig.provider.quote(rig.resources)

    # --------------------------------------------------------------------------------------------------------- odd rows

    async def test_an_odd_row_hides_no_others(self, rig: CloudRig) -> None:
        odd, good = await self.rent(rig, "token-1"), await self.rent(rig, "token-2")
        known(await rig.provider.list())
        body = json.loads(json.dumps(rig.cloud.exchanges[-1][1].body))
        for row in body["pods"]:
            if row["id"] == odd.id:
                row |= {"status": "MIGRATING", "cost": "2.99"}
        rig.cloud.faults = [Fault("other", self.platform.lists, count=2, body=json.dumps(body).encode())]
        seen = {i.id: i for i in known(await rig.provider.list())}
        assert seen[good.id].state is InstanceState.RUNNING
        assert seen[odd.id].state is InstanceState.UNCLEAR and seen[odd.id].meter is None
        assert [i.id for i in known(await rig.provider.find("token-1"))] == [odd.id]
        body["pods"][0]["name"] = None
        rig.cloud.faults = [Fault("other", self.platform.lists, count=2, body=json.dumps(body).encode())]
        assert isinstance(await rig.provider.list(), Unknown)
        assert isinstance(await rig.provider.find("token-2"), Unknown)
