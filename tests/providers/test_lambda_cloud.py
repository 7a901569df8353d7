"""Lambda: the contract, and one test for each of its pitfalls."""

from __future__ import annotations

import json
import re

import pytest

from clouds.base import PUBLIC_KEY, Fault, Request
from clouds.lambda_cloud import PLATFORM, LambdaAccount
from clouds_kit import CloudRig, CloudTests, known
from gpuwarden.core.errors import BadRequest, NoCapacity, RateLimited
from gpuwarden.core.models import InstanceState, Resources, Unknown
from gpuwarden.core.rules import Severity
from wording import Wording

ASKED = Request("GET", "/", {}, {}, None)
DURABLE = Resources(gpu="H100", durable_storage=True)


class TestLambda(CloudTests):
    platform = PLATFORM

    def cloud(self, rig: CloudRig) -> LambdaAccount:
        assert isinstance(rig.cloud, LambdaAccount)
        return rig.cloud

    async def test_create_sends_the_expected_order(self, rig: CloudRig) -> None:
        known(await rig.provider.create(Resources(gpu="A10", gpu_count=8), "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.method == "POST")
        assert order == {
            "region_name": "us-east-1",
            "instance_type_name": "gpu_8x_a10",
            "ssh_key_names": ["laptop"],
            "name": "gpuwarden-j1-i1",
        }

    @pytest.mark.parametrize("status", [401, 403])
    @pytest.mark.parametrize("body", [b'{"error": "Forbidden"}', b'{"message": "Forbidden"}', b'{"error": {}}'])
    async def test_a_gateways_json_error_is_unknown_not_a_bad_key(
        self, rig: CloudRig, status: int, body: bytes, wording: Wording
    ) -> None:
        rig.cloud.faults = [Fault("other", ".", count=9, status=status, body=body)]
        answer = await rig.provider.list()
        assert isinstance(answer, Unknown)
        wording(answer.why)
        assert [f.severity for f in await rig.provider.check()] == [Severity.UNKNOWN]

    async def test_an_absurdly_large_price_is_unknown(self, rig: CloudRig) -> None:
        await self.rent(rig)
        await rig.provider.list()
        text = json.dumps(rig.cloud.exchanges[-1][1].body)
        (price,) = set(re.findall(r'"price_cents_per_hour": (\d+)', text))
        body = text.replace(f'hour": {price}', f'hour": {10**400}').encode()
        rig.cloud.faults = [Fault("other", self.platform.lists, body=body)]
        assert isinstance(await rig.provider.list(), Unknown)

    @pytest.mark.parametrize(
        "odd", [{"status": "paused"}, {"ip": 7}, {"instance_type": None}, {"instance_type": {"name": "gpu_1x_h100"}}]
    )
    async def test_an_odd_row_hides_no_others(self, rig: CloudRig, odd: dict[str, object]) -> None:
        one = await self.rent(rig, "token-1")
        two = await self.rent(rig, "token-2")
        self.cloud(rig).odd[one.id] = odd
        rows = {i.id: i for i in known(await rig.provider.list())}
        assert rows[two.id].state is InstanceState.RUNNING and rows[two.id].price_usd_per_hour == 2.49
        assert rows[one.id].meter is None and rows[one.id].place is None
        assert [i.id for i in known(await rig.provider.find("token-1"))] == [one.id]
        assert isinstance(await rig.provider.get(one.id), Unknown)

    @pytest.mark.parametrize("odd", [{"id": None}, {"id": "../x"}, {"name": 7}])
    async def test_an_unidentifiable_row_makes_the_list_unknown(self, rig: CloudRig, odd: dict[str, object]) -> None:
        self.cloud(rig).odd[(await self.rent(rig)).id] = odd
        assert isinstance(await rig.provider.list(), Unknown)
        assert isinstance(await rig.provider.find("token-1"), Unknown)

    async def test_an_odd_type_key_or_filesystem_hides_no_others(self, rig: CloudRig) -> None:
        cloud = self.cloud(rig)
        cloud.ssh_keys.insert(0, {"id": "k0", "name": "no key"})
        cloud.filesystems.insert(0, {"id": "fs0", "name": "other"})
        body = rig.cloud.instance_types(ASKED, {}).body  # type: ignore[attr-defined]
        body["data"]["gpu_1x_new"] = {"instance_type": {"name": "gpu_1x_new", "price_cents_per_hour": "call us"}}
        rig.cloud.faults = [Fault("other", "/instance-types$", count=9, body=json.dumps(body).encode())]
        made = known(await rig.provider.create(DURABLE, "j1-i1"))
        assert made.price_usd_per_hour == 2.49

    async def test_malformed_instance_types_are_unknown_not_sold_out(self, rig: CloudRig) -> None:
        rig.cloud.faults = [Fault("other", "/instance-types$", body=b'{"data": {"gpu_1x_new": {"cents": 1}}}')]
        assert isinstance(await rig.provider.quote(rig.resources), Unknown)

    async def test_the_longest_allowed_token_is_found_whole(self, rig: CloudRig, wording: Wording) -> None:
        token = "j" * 54
        known(await rig.provider.create(rig.resources, token))
        await rig.settle()
        assert [i.token for i in known(await rig.provider.find(token))] == [token]
        with pytest.raises(BadRequest) as refused:
            await rig.provider.create(rig.resources, token + "j")
        wording(refused, token + "j")

    async def test_a_machine_shut_down_from_inside_still_bills(self, rig: CloudRig, wording: Wording) -> None:
        instance = await self.rent(rig)
        self.cloud(rig).unhealthy.add(instance.id)
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.FAILED and seen.meter is True
        wording(seen.why)

    async def test_an_immediate_second_launch_is_rate_limited(self, rig: CloudRig) -> None:
        known(await rig.provider.create(rig.resources, "token-1"))
        with pytest.raises(RateLimited):
            await rig.provider.create(rig.resources, "token-2")
        assert len(rig.cloud.own) == 1

    async def test_reads_respect_the_rate_limit(self, rig: CloudRig) -> None:
        before = rig.clock.now()
        for _ in range(6):
            known(await rig.provider.list())
        assert rig.clock.now() - before >= 5
        assert not any(reply.status == 429 for _, reply in rig.cloud.exchanges)

    async def test_two_instances_for_one_launch_are_both_found(self, rig: CloudRig) -> None:
        self.cloud(rig).launch_twice = True
        assert isinstance(await rig.provider.create(rig.resources, "token-1"), Unknown)
        await rig.settle()
        assert len(known(await rig.provider.find("token-1"))) == 2

    async def test_no_region_with_stock_raises_no_capacity(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 0}))
        with pytest.raises(NoCapacity):
            await rig.provider.create(rig.resources, "token-1")

    async def test_stock_sold_in_between_raises_no_capacity(self, rig: CloudRig) -> None:
        body = {"error": {"code": "instance-operations/launch/insufficient-capacity", "message": "sorry"}}
        rig.cloud.faults = [Fault("other", self.platform.creates, status=400, body=json.dumps(body).encode())]
        with pytest.raises(NoCapacity, match="sorry"):
            await rig.provider.create(rig.resources, "token-1")

    async def test_the_filesystem_decides_the_region(self, rig: CloudRig) -> None:
        known(await rig.provider.create(DURABLE, "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.method == "POST")
        assert order["file_system_names"] == ["gpuwarden"] and order["region_name"] == "us-west-1"

    async def test_a_missing_or_misplaced_filesystem_is_refused(self, rig: CloudRig, wording: Wording) -> None:
        self.cloud(rig).filesystems = []
        with pytest.raises(BadRequest) as refused:
            await rig.provider.create(DURABLE, "j1-i1")
        wording(refused, 0)
        self.cloud(rig).filesystems = [{**LambdaAccount.filesystem("gpuwarden", "us-west-1"), "mount_point": "/data"}]
        with pytest.raises(BadRequest, match="/data"):
            await rig.provider.create(DURABLE, "j1-i1")
        assert rig.cloud.own == {}

    async def test_a_launch_needs_our_ssh_key_or_a_named_key(self, rig: CloudRig, wording: Wording) -> None:
        other = {"id": "k2", "name": "other", "public_key": "ssh-ed25519 " + "A" * 60}
        self.cloud(rig).ssh_keys = [other]
        with pytest.raises(BadRequest) as refused:
            await rig.provider.create(rig.resources, "token-1")
        wording(refused)
        assert [f.severity for f in await rig.provider.check()] == [Severity.ERROR]
        rig.env["LAMBDA_SSH_KEY_NAME"] = "other"
        known(await rig.provider.create(rig.resources, "token-1"))
        assert next(a.body for a in rig.cloud.requests if a.method == "POST")["ssh_key_names"] == ["other"]

    async def test_the_only_ssh_key_is_used_by_default(self, rig: CloudRig) -> None:
        del rig.env["GPUWARDEN_SSH_PUBLIC_KEY"]
        rig.env["HOME"] = "/nowhere"
        known(await rig.provider.create(rig.resources, "token-1"))
        assert PUBLIC_KEY not in json.dumps([a.body for a in rig.cloud.requests])

    async def test_a_termination_reply_without_the_instance_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        rig.cloud.faults = [Fault("other", self.platform.ends, body=b'{"data": {"terminated_instances": []}}')]
        assert isinstance(await rig.provider.terminate(instance.id), Unknown)

    async def test_an_unrelated_404_is_not_gone(self, rig: CloudRig) -> None:
        for body in (b'{"error": {"code": "global/not-found", "message": "no such route"}}', b"<html>404</html>", b""):
            rig.cloud.faults = [Fault("other", self.platform.gets, status=404, body=body)]
            assert isinstance(await rig.provider.get("abc"), Unknown)

    async def test_cents_become_dollars_and_zero_unknown(self, rig: CloudRig) -> None:
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour == 2.49
        rig.cloud.prices = dict.fromkeys(rig.cloud.prices, 0.0)
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour is None

    async def test_a_terminated_instance_is_left_out_of_the_list(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        body = {"data": [{**rig.cloud.get_instance(ASKED, {"id": instance.id}).body["data"], "status": "terminated"}]}  # type: ignore[attr-defined]
        rig.cloud.faults = [Fault("other", self.platform.lists, body=json.dumps(body).encode())]
        assert known(await rig.provider.list()) == ()
