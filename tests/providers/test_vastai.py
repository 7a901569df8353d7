"""Vast.ai: the contract, and one test for each of its pitfalls."""

from __future__ import annotations

import json

import pytest

from clouds.base import PUBLIC_KEY, Fault, Request
from clouds.vastai import PLATFORM, VastCloud
from clouds_kit import CloudRig, CloudTests, known
from contract_provider import Desk
from gpuwarden.core.errors import AuthFailed, BadRequest, NoCapacity, RateLimited
from gpuwarden.core.guidance import manual_text
from gpuwarden.core.models import InstanceState, Resources, Unknown
from gpuwarden.core.states import Job, Lease
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.lifecycle.execution.provisioning import provisioning, refresh_lease
from gpuwarden.lifecycle.leases.termination import request_end
from gpuwarden.lifecycle.records import read_job
from gpuwarden.providers.base import Bidder
from gpuwarden.providers.vastai import Vast
from wording import Wording

BID = Resources(gpu="H100", interruptible=True)


class TestVast(CloudTests):
    platform = PLATFORM

    def cloud(self, rig: CloudRig) -> VastCloud:
        assert isinstance(rig.cloud, VastCloud)
        return rig.cloud

    async def test_the_balance_is_the_credit_if_reported(self, rig: CloudRig) -> None:
        assert known(await rig.provider.balance()).amount == 1000.0
        assert rig.cloud.exchanges[-1][1].body["balance"] == -3.5
        self.cloud(rig).tells_credit = False
        rig.cloud.money = 12.0
        reply = known(await rig.provider.balance())
        assert reply.amount == 12.0
        assert rig.cloud.exchanges[-1][1].body["api_key"] == rig.env["VAST_API_KEY"] not in repr(reply)

    async def test_create_sends_the_expected_order(self, rig: CloudRig) -> None:
        known(await rig.provider.create(Resources(gpu="H100", disk_gb=80), "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.path.startswith("/api/v0/asks/"))
        assert order["label"] == "gpuwarden-j1-i1" and order["disk"] == 80
        assert order["runtype"] == "ssh_direct" and order["cancel_unavail"] is True
        assert PUBLIC_KEY in order["onstart"] and ".no_auto_tmux" in order["onstart"]
        assert "price" not in order and "volume_info" not in order
        assert rig.env["VAST_API_KEY"] not in json.dumps(order)

    async def test_offers_above_the_cap_are_not_rented(self, rig: CloudRig) -> None:
        with pytest.raises(NoCapacity):
            await rig.provider.create(Resources(gpu="H100", max_price_usd_per_hour=2.0), "j1-i1")
        with pytest.raises(NoCapacity):
            await rig.provider.create(Resources(gpu="H100", gpu_count=2, max_price_usd_per_hour=3.0), "j1-i1")
        assert rig.cloud.own == {}

    async def test_a_bid_with_its_disk_stays_within_the_cap(self, rig: CloudRig) -> None:
        """The minimum bid is 1.1001, and the disk costs another 0.02."""
        assert known(await rig.provider.quote(BID)).price_usd_per_hour == pytest.approx(1.1001 * 1.5 + 0.02, abs=0.001)
        for cap, bid in ((None, 1.321), (1.3, 1.28), (1.1202, 1.1001)):
            wanted = BID.model_copy(update={"max_price_usd_per_hour": cap})
            if bid == 1.1001:  # 1.1002 is left for the bid, and bids are in tenths of a cent
                with pytest.raises(NoCapacity):
                    await rig.provider.create(wanted, "j1-i1")
                continue
            made = known(await rig.provider.create(wanted, "j1-i1"))
            order = next(a.body for a in reversed(rig.cloud.requests) if a.path.startswith("/api/v0/asks/"))
            assert order["price"] == bid and made.price_usd_per_hour == pytest.approx(bid + 0.02)

    async def test_offers_are_queried_by_gpu_name(self, rig: CloudRig, wording: Wording) -> None:
        self.cloud(rig).prices = {"H100 SXM": 2.2, "H100 NVL": 2.3, "L40S": 0.7, "L4": 0.4}
        for request, names in (("H100", ["H100 SXM", "H100 NVL"]), ("L4", ["L4"])):
            known(await rig.provider.quote(Resources(gpu=request)))
            query = next(a.body for a in reversed(rig.cloud.requests) if a.path == "/api/v0/bundles/")
            assert query["gpu_name"] == {"in": names}
        assert [a.path for a in rig.cloud.requests].count("/api/v0/gpu_names/unique/") == 1
        with pytest.raises(BadRequest) as refused:
            await rig.provider.quote(Resources(gpu="B300"))
        wording(refused, "B300")
        assert "H100 NVL" in in_calls(refused.value.next_steps)

    async def test_without_gpu_names_a_truncated_offer_list_is_unknown(
        self, rig: CloudRig, monkeypatch: pytest.MonkeyPatch, wording: Wording
    ) -> None:
        rig.cloud.faults = [Fault("html", "gpu_names", count=9)]
        assert known(await rig.provider.quote(Resources(gpu="H100"))).price_usd_per_hour == 2.2
        monkeypatch.setattr("gpuwarden.providers.vastai.OFFERS", 1)  # the cheapest offer is a 4090
        answer = await rig.provider.quote(Resources(gpu="H100"))
        assert isinstance(answer, Unknown)
        wording(answer.why)

    async def test_a_contract_made_by_a_refused_bid_is_ended(self, rig: CloudRig, wording: Wording) -> None:
        """The platform answers with an error and status 400, but a stopped contract exists, and its disk bills."""
        self.cloud(rig).makes_underbid = True
        desk = Desk(rig, "H100", interruptible=True)
        await desk.rent()
        (refused,) = [reply for _, reply in rig.cloud.exchanges if reply.status == 400]
        assert refused.body["success"] is False and refused.body["new_contract"] == 4200001
        assert desk.lease.instance_id == "4200001" and desk.job is Job.FAILED
        wording(read_job(desk.ctx.ledger, "j1").why)
        await rig.settle()
        await desk.looks()
        assert rig.rented() == [] and desk.lease.state is Lease.STOPPED
        desk.ctx.ledger.close()

    async def test_ending_a_refused_bids_contract_is_retried_until_gone(self, rig: CloudRig) -> None:
        """A stopped contract isn't enough, because its disk bills."""
        self.cloud(rig).makes_underbid = True
        self.cloud(rig).deaf_ends = 2
        desk = Desk(rig, "H100", interruptible=True)
        await desk.rent()
        for _ in range(8):
            await refresh_lease(desk.ctx, desk.lease_id)
            await rig.settle()
        assert rig.rented() == [] and desk.lease.state is Lease.STOPPED
        desk.ctx.ledger.close()

    async def test_a_volume_is_created_at_the_profiles_path(self, rig: CloudRig) -> None:
        known(await rig.provider.create(Resources(gpu="H100", durable_storage=True), "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.path.startswith("/api/v0/asks/"))
        assert order["volume_info"] == {"create_new": True, "volume_id": 9101, "size": 50, "mount_path": "/data"}

    async def test_the_contracts_end_is_reported(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        assert instance.ends_at == (instance.created_at or 0) + 30 * 86400
        rig.cloud.end_date = 1_900_000_000.5  # type: ignore[attr-defined]
        (listed,) = known(await rig.provider.list())
        assert listed.ends_at == 1_900_000_000.5

    async def outbid(self, rig: CloudRig, least: float = 1.4) -> str:
        """Return an instance that bid 1.321 and was outbid."""
        made = known(await rig.provider.create(BID, "token-1"))
        await rig.settle()
        self.cloud(rig).least["H100 SXM"] = least
        rig.cloud.cloud.preempt(rig.cloud.inner(made.id))
        rig.clock.time += 1
        return made.id

    async def test_an_outbid_instance_is_interrupted_and_resumes(self, rig: CloudRig) -> None:
        """The instance looks as if it was simply stopped: all three states are `stopped`."""
        ident = await self.outbid(rig)
        seen = known(await rig.provider.get(ident))
        assert seen is not None and seen.state is InstanceState.INTERRUPTED and seen.meter is False
        row = rig.cloud.exchanges[-1][1].body["instances"]
        assert {row["cur_state"], row["intended_status"], row["next_state"]} == {"stopped"}
        await rig.settle()
        seen = known(await rig.provider.get(ident))
        assert seen is not None and seen.state is InstanceState.RUNNING

    async def test_a_bid_instance_stopped_by_us_is_shown_as_stopped(self, rig: CloudRig) -> None:
        made = known(await rig.provider.create(BID, "token-1"))
        await rig.settle()
        known(await rig.provider.stop(made.id))
        await rig.settle()
        for states in (InstanceState.STOPPED, InstanceState.RUNNING):
            seen = known(await rig.provider.get(made.id))
            assert seen is not None and seen.state is states
            known(await rig.provider.start(made.id))
            await rig.settle()

    async def test_another_process_recognizes_a_requested_stop_of_a_bid(self, rig: CloudRig) -> None:
        """The request is in the ledger, but another process's adapter doesn't know about it."""
        desk = Desk(rig, "H100", interruptible=True)
        await desk.rent()
        await rig.settle()
        await desk.looks()
        await request_end(desk.ctx, desk.lease_id, "stop")
        assert isinstance(rig.provider, Vast)
        rig.provider._stopped.clear()
        await rig.settle()
        await desk.looks()
        assert desk.lease.state is Lease.STOPPED
        desk.ctx.ledger.close()

    async def test_an_outbid_instance_is_not_counted_as_stopped(self, rig: CloudRig) -> None:
        desk = Desk(rig, "H100", interruptible=True)
        await desk.rent()
        await rig.settle()
        await desk.looks()
        self.cloud(rig).cloud.configure(rig.cloud.cloud.settings.model_copy(update={"resume_s": 10**6}))
        rig.cloud.cloud.preempt(rig.cloud.inner(str(desk.lease.instance_id)))
        await rig.settle()
        await desk.looks()
        assert desk.lease.state is not Lease.STOPPED
        desk.ctx.ledger.close()

    async def test_a_bid_is_raised_only_if_needed_and_within_the_cap(self, rig: CloudRig) -> None:
        """The instance's bid is 1.321, and 1.4 wins."""
        assert isinstance(rig.provider, Bidder)
        ident = await self.outbid(rig)
        for most, least, bid in ((1.41, 1.4, None), (1.52, 1.4, 1.5), (9.0, 1.1, None), (9.0, 1.5, 1.8)):
            self.cloud(rig).least["H100 SXM"] = least
            rig.cloud.requests.clear()
            known(await rig.provider.raise_bid(ident, most))
            sent = [a.body for a in rig.cloud.requests if a.method == "PUT"]
            assert sent == ([] if bid is None else [{"client_id": "me", "price": bid}]), (most, least)
        await rig.settle()
        seen = known(await rig.provider.get(ident))
        assert seen is not None and seen.state is InstanceState.RUNNING
        assert seen.price_usd_per_hour == pytest.approx(1.82)

    async def test_a_jobs_bid_is_raised_within_the_checked_price(self, rig: CloudRig) -> None:
        quoted = known(await rig.provider.quote(BID)).price_usd_per_hour
        desk = Desk(rig, "H100", interruptible=True, price=quoted)
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"resume_s": 10**6}))
        await desk.rent()
        self.cloud(rig).least["H100 SXM"] = 1.4
        rig.clock.time += 15
        rig.cloud.cloud.preempt(rig.cloud.inner(str(desk.lease.instance_id)))
        before = len(rig.cloud.requests)
        await provisioning(desk.ctx, read_job(desk.ctx.ledger, "j1"))
        (sent,) = [a.body for a in rig.cloud.requests[before:] if "bid_price" in a.path]
        assert quoted is not None and 1.4 < sent["price"] <= quoted - 0.019
        await rig.settle()
        assert rig.cloud.cloud.truth(rig.rented()[0]).state is InstanceState.RUNNING
        desk.ctx.ledger.close()

    # ---------------------------------------------------------------------------------------------------- odd rows

    async def test_odd_statuses_and_ports_are_tolerated(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.cloud(rig).odd[instance.id] = {"actual_status": "scheduling"}
        (seen,) = known(await rig.provider.list())
        assert seen.state is InstanceState.BOOTING and seen.meter is None and "scheduling" in seen.why
        self.cloud(rig).odd[instance.id] = {"ports": None, "ssh_port": "12345"}
        (seen,) = known(await rig.provider.list())
        assert seen.place is not None and seen.place.port == 12345
        self.cloud(rig).odd[instance.id] = {"ports": None, "ssh_port": "none yet"}
        (seen,) = known(await rig.provider.list())
        assert seen.state is InstanceState.RUNNING and seen.place is None

    async def test_an_odd_row_hides_no_others(self, rig: CloudRig, wording: Wording) -> None:
        odd, good = await self.rent(rig, "token-1"), await self.rent(rig, "token-2")
        self.cloud(rig).odd[odd.id] = {"dph_total": "2.20", "intended_status": 7}
        seen = {i.id: i for i in known(await rig.provider.list())}
        assert seen[good.id].state is InstanceState.RUNNING
        assert seen[odd.id].state is InstanceState.UNCLEAR and seen[odd.id].meter is None
        assert known(await rig.provider.find("token-1")) == (seen[odd.id],)
        assert isinstance(await rig.provider.get(odd.id), Unknown)
        assert known(await rig.provider.get(good.id)) is not None
        rig.cloud.faults = [Fault("other", self.platform.gets, body=b'{"instances": null}')]
        answer = await rig.provider.get(odd.id)
        assert isinstance(answer, Unknown)
        wording(answer.why)

    @pytest.mark.parametrize("odd", [{"id": "x"}, {"id": None}, {"label": 7, "dph_total": "x"}])
    async def test_an_unidentifiable_row_makes_the_list_unknown(self, rig: CloudRig, odd: object) -> None:
        instance = await self.rent(rig)
        assert isinstance(odd, dict)
        page = rig.cloud.list_instances(_request(), {}).body  # type: ignore[attr-defined]
        page["instances"][0] |= odd
        rig.cloud.faults = [Fault("other", self.platform.lists, count=9, body=json.dumps(page).encode())]
        for answer in (await rig.provider.list(), await rig.provider.find(instance.token)):
            assert isinstance(answer, Unknown), answer

    async def test_a_null_instance_is_gone(self, rig: CloudRig) -> None:
        rig.cloud.faults = [Fault("other", self.platform.gets, body=b'{"instances": null}')]
        assert known(await rig.provider.get("4200001")) is None

    @pytest.mark.parametrize("body", [b'{"instances": []}', b'{"instances": ""}', b"{}", b'""', b"null", b"[]"])
    async def test_an_ambiguous_empty_reply_is_unknown(self, rig: CloudRig, body: bytes) -> None:
        rig.cloud.faults = [Fault("other", ".", count=9, body=body)]
        assert isinstance(await rig.provider.get("4200001"), Unknown)
        assert isinstance(await rig.provider.list(), Unknown)
        assert isinstance(await rig.provider.find("token-1"), Unknown)

    async def test_the_retired_list_endpoint_is_not_used(self, rig: CloudRig) -> None:
        await self.rent(rig)
        known(await rig.provider.list())
        assert not any(a.method == "GET" and a.path.rstrip("/") == "/api/v0/instances" for a in rig.cloud.requests)

    async def test_a_retired_list_is_unknown(self, rig: CloudRig) -> None:
        body = b'{"success": false, "error": "deprecated_endpoint", "msg": "gone"}'
        rig.cloud.faults = [Fault("other", self.platform.lists, status=410, body=body)]
        assert isinstance(await rig.provider.list(), Unknown)

    async def test_several_pages_are_read_within_the_rate_limit(self, rig: CloudRig) -> None:
        for n in range(57):
            rig.cloud.rent(f"gpuwarden-t{n}", Resources(gpu="L40S"), order={}, gpu="L40S", count=1)
        await rig.settle()
        assert len({i.id for i in known(await rig.provider.list())}) == 57
        assert [i.token for i in known(await rig.provider.find("t56"))] == ["t56"]
        assert not any(reply.status == 429 for _, reply in rig.cloud.exchanges)

    @pytest.mark.parametrize("ident", [-1, 10**18, 10**400])
    async def test_a_contract_with_an_unusable_id_is_unknown(self, rig: CloudRig, ident: int) -> None:
        body = json.dumps({"success": True, "new_contract": ident}).encode()
        rig.cloud.faults = [Fault("other", self.platform.creates, body=body)]
        assert isinstance(await rig.provider.create(rig.resources, "token-1"), Unknown)

    async def test_a_page_without_new_rows_makes_the_list_unknown(self, rig: CloudRig, wording: Wording) -> None:
        for n in range(99):
            page = {"success": True, "instances": [], "next_token": f"t{n}", "total_instances": 1}
            rig.cloud.faults.append(Fault("other", self.platform.lists, body=json.dumps(page).encode()))
        answer = await rig.provider.list()
        assert isinstance(answer, Unknown)
        wording(answer.why)
        assert len(rig.cloud.requests) == 1

    async def test_a_list_that_stops_early_is_unknown(self, rig: CloudRig, wording: Wording) -> None:
        for n in range(30):
            rig.cloud.rent(f"gpuwarden-t{n}", Resources(gpu="L40S"), order={}, gpu="L40S", count=1)
        await rig.settle()
        page = rig.cloud.list_instances(_request(), {}).body  # type: ignore[attr-defined]
        rig.cloud.faults = [Fault("other", self.platform.lists, body=json.dumps({**page, "next_token": None}).encode())]
        answer = await rig.provider.list()
        assert isinstance(answer, Unknown)
        wording(answer.why, 25, 30)
        rig.cloud.faults = [Fault("other", self.platform.lists, count=99, body=json.dumps(page).encode())]
        answer = await rig.provider.list()
        assert isinstance(answer, Unknown)
        wording(answer.why)

    async def test_a_404_for_a_bad_key_raises_auth_failed(self, rig: CloudRig) -> None:
        self.cloud(rig).bad_key_is_404 = True
        rig.env["VAST_API_KEY"] = "wrong-key-0123456789"
        for ask in (rig.provider.list, lambda: rig.provider.get("4200001"), lambda: rig.provider.terminate("4200001")):
            with pytest.raises(AuthFailed):
                await ask()

    async def test_a_sold_offer_is_skipped(self, rig: CloudRig) -> None:
        self.cloud(rig).prices = {"H100 SXM": 2.2, "H100 NVL": 2.3, "H100 PCIE": 2.4}
        self.cloud(rig).stale_offers = {101}
        made = known(await rig.provider.create(rig.resources, "token-1"))
        assert made.price_usd_per_hour == 2.3
        self.cloud(rig).stale_offers = {101, 201, 301}
        with pytest.raises(NoCapacity):
            await rig.provider.create(rig.resources, "token-2")
        assert len(rig.cloud.own) == 1

    @pytest.mark.parametrize("prices", [{"H100 SXM": 2.2}, {"H100 SXM": 2.2, "H100 NVL": 2.3}])
    async def test_an_offer_is_never_ordered_twice(
        self, rig: CloudRig, prices: dict[str, float], wording: Wording
    ) -> None:
        cloud = self.cloud(rig)
        cloud.prices, cloud.stale_offers = prices, {101, 201}
        with pytest.raises(NoCapacity) as gone:
            await rig.provider.create(rig.resources, "token-1")
        ordered = [request.path for request in cloud.requests if request.line.startswith("PUT /api/v0/asks/")]
        assert len(ordered) == len(set(ordered)) == len(prices)
        assert not gone.value.unsent, "an order was sent"
        wording(manual_text(gone.value.next_steps))

    async def test_an_instance_from_a_refused_order_is_used_before_another_order(self, rig: CloudRig) -> None:
        cloud = self.cloud(rig)
        cloud.prices = {"H100 SXM": 2.2, "H100 NVL": 2.3}
        cloud.faults = [
            Fault("refused", self.platform.creates, status=410, body=b'{"error": "no_such_ask", "msg": "gone"}')
        ]
        made = known(await rig.provider.create(rig.resources, "token-1"))
        assert [cloud.numbered(made.id)] == list(cloud.own) and made.token == "token-1"

    async def test_no_other_offer_is_ordered_while_the_list_is_unreadable(self, rig: CloudRig) -> None:
        cloud = self.cloud(rig)
        cloud.prices, cloud.stale_offers = {"H100 SXM": 2.2, "H100 NVL": 2.3}, {101}
        cloud.faults = [Fault("error_500", self.platform.lists)]
        assert isinstance(await rig.provider.create(rig.resources, "token-1"), Unknown)
        assert not cloud.own

    async def test_an_ignored_terminate_is_visible_and_can_be_repeated(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        self.cloud(rig).deaf_ends = 1
        known(await rig.provider.terminate(instance.id))
        await rig.settle()
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING
        known(await rig.provider.terminate(instance.id))
        await rig.settle()
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.GONE

    async def test_the_final_cost_comes_from_the_charges(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        await self.down(rig, instance.id)
        gone = known(await rig.provider.get(instance.id))
        truth = rig.cloud.cloud.truth(rig.cloud.inner(instance.id))
        assert gone is not None and gone.cost_usd == pytest.approx(truth.cost_usd, abs=0.001)

    async def test_status_200_with_an_error_body_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        body = b'{"success": false, "error": "internal", "msg": "try again"}'
        rig.cloud.faults = [Fault("other", ".", count=99, body=body)]
        assert isinstance(await rig.provider.stop(instance.id), Unknown)
        assert isinstance(await rig.provider.terminate(instance.id), Unknown)
        assert isinstance(await rig.provider.create(rig.resources, "token-2"), Unknown)

    async def test_the_rate_limits_threshold_becomes_the_wait(self, rig: CloudRig) -> None:
        rig.cloud.faults = [Fault("limited", ".", count=99)]
        with pytest.raises(RateLimited) as caught:
            await rig.provider.terminate("4200001")
        assert caught.value.after_s == 4.5

    async def test_without_a_direct_port_the_proxy_is_the_address(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        assert instance.place is not None and instance.place.host == "127.0.0.1"
        body = rig.cloud.get_instance(_request(), {"id": instance.id}).body  # type: ignore[attr-defined]
        body["instances"]["ports"] = [8080]  # another documented format for a single instance
        rig.cloud.faults = [Fault("other", self.platform.gets, body=json.dumps(body).encode())]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.place is not None and seen.place.host == "ssh5.vast.ai"

    @pytest.mark.parametrize(
        ("actual", "intended", "contract", "state", "meter"),
        [
            (None, "running", "running", InstanceState.BOOTING, None),
            (None, "stopped", "stopped", InstanceState.STOPPED, False),
            ("created", "running", "running", InstanceState.BOOTING, None),
            ("exited", "running", "running", InstanceState.FAILED, True),
            ("exited", "stopped", "running", InstanceState.STOPPED, None),
            ("stopped", "running", "stopped", InstanceState.BOOTING, None),
            ("offline", "running", "running", InstanceState.INTERRUPTED, None),
            ("unknown", "running", "running", InstanceState.INTERRUPTED, None),
            ("frozen", "running", "running", InstanceState.INTERRUPTED, None),
            ("rebooting", "running", "running", InstanceState.BOOTING, None),
            ("running", "stopped", "running", InstanceState.STOPPING, True),
        ],
    )
    async def test_every_status_maps_to_a_state_and_meter(
        self, rig: CloudRig, actual: str | None, intended: str, contract: str, state: InstanceState, meter: bool | None
    ) -> None:
        instance = await self.rent(rig)
        body = rig.cloud.get_instance(_request(), {"id": instance.id}).body  # type: ignore[attr-defined]
        body["instances"] |= {"actual_status": actual, "intended_status": intended, "cur_state": contract}
        rig.cloud.faults = [Fault("other", self.platform.gets, body=json.dumps(body).encode())]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and (seen.state, seen.meter) == (state, meter)
        assert seen.place is None


def _request() -> Request:
    return Request("GET", "/", {}, {}, None)
