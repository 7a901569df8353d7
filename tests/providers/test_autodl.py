"""AutoDL: the contract, and one test for each of its pitfalls."""

from __future__ import annotations

import json

import pytest

from clouds.autodl import PASSWORD, PLATFORM, AutoDLAccount
from clouds.base import PUBLIC_KEY, Fault
from clouds_kit import CloudRig, CloudTests, known
from gpuwarden.core.errors import AuthFailed, BadRequest, Conflict, NoCapacity, NotSupported, RateLimited
from gpuwarden.core.models import Balance, InstanceState, Known, Resources, Unknown
from gpuwarden.core.rules import Severity
from wording import Wording

ORDER = {"req_gpu_amount": 1, "gpu_spec_uuid": "h800"}


class TestAutoDL(CloudTests):
    platform = PLATFORM

    def cloud(self, rig: CloudRig) -> AutoDLAccount:
        assert isinstance(rig.cloud, AutoDLAccount)
        return rig.cloud

    async def test_the_balance_is_read_in_thousandths_of_a_yuan(self, rig: CloudRig) -> None:
        del rig.env["AUTODL_CNY_PER_USD"]
        assert known(await rig.provider.balance()) == Balance(amount=7000.0, currency="CNY")
        for rate in ("nonsense", "0", "nan", "-7"):
            rig.env["AUTODL_CNY_PER_USD"] = rate
            assert known(await rig.provider.balance()).currency == "CNY"

    async def test_create_sends_the_expected_order(self, rig: CloudRig) -> None:
        known(await rig.provider.create(Resources(gpu="5090", gpu_count=2, disk_gb=80), "j1-i1"))
        order = next(a.body for a in rig.cloud.requests if a.path.endswith("/create"))
        assert order["instance_name"] == "gpuwarden-j1-i1" and order["gpu_spec_uuid"] == "5090-p"
        assert order["req_gpu_amount"] == 2 and order["expand_system_disk_by_gb"] == 50
        assert PUBLIC_KEY in order["start_command"]

    async def test_the_token_is_sent_without_bearer(self, rig: CloudRig) -> None:
        known(await rig.provider.list())
        assert rig.cloud.requests[-1].headers["authorization"] == rig.env["AUTODL_TOKEN"]

    async def test_the_id_is_sent_in_the_query_not_the_body(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        request = next(a for a in rig.cloud.requests if a.path.endswith("/snapshot"))
        assert request.query == {"instance_uuid": instance.id} and request.body is None

    async def test_terminate_never_releases_a_running_instance(self, rig: CloudRig, wording: Wording) -> None:
        instance = await self.rent(rig)
        with pytest.raises(Conflict) as refused:
            await rig.provider.terminate(instance.id)
        wording(refused, instance.id)
        assert not any(a.path.endswith("/release") for a in rig.cloud.requests)

    async def test_terminate_during_the_shutdown_is_a_conflict(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        known(await rig.provider.stop(instance.id))
        with pytest.raises(Conflict, match="shutting_down"):
            await rig.provider.terminate(instance.id)

    async def test_a_refused_release_is_a_conflict(self, rig: CloudRig, wording: Wording) -> None:
        instance = await self.rent(rig)
        rig.cloud.faults = [
            Fault("other", self.platform.gets, body=b'{"code": "Success", "data": "shutdown", "msg": ""}'),
        ]
        with pytest.raises(Conflict) as refused:
            await rig.provider.terminate(instance.id)
        wording(refused)

    async def test_status_200_with_an_error_code_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        body = '{"code": "InternalError", "data": {"list": [], "max_page": 0, "result_total": 0}, "msg": "系统错误"}'
        rig.cloud.faults = [Fault("other", ".", count=99, body=body.encode())]
        assert isinstance(await rig.provider.list(), Unknown)
        assert isinstance(await rig.provider.get(instance.id), Unknown)
        assert isinstance(await rig.provider.stop(instance.id), Unknown)
        assert isinstance(await rig.provider.create(rig.resources, "token-2"), Unknown)

    @pytest.mark.parametrize(
        ("code", "msg", "error"),
        [
            ("TORealName", "未完成实名认证,认证后才可使用", AuthFailed),
            ("AuthorizeFailed", "登录超时", AuthFailed),
            ("InternalError", "当前算力规格暂无库存, 请修改配置或稍等再试", NoCapacity),
            ("InternalError", "余额不足", BadRequest),
            ("InternalError", "请求过于频繁", RateLimited),
            ("RequestParameterIsWrong", "请求参数错误", BadRequest),
        ],
    )
    async def test_refusal_codes_map_to_errors(
        self, rig: CloudRig, code: str, msg: str, error: type[Exception]
    ) -> None:
        body = json.dumps({"code": code, "msg": msg, "data": None}).encode()
        rig.cloud.faults = [Fault("other", self.platform.creates, body=body)]
        with pytest.raises(error):
            await rig.provider.create(rig.resources, "token-1")
        assert rig.cloud.faults[0].count == 0

    async def test_an_unverified_account_can_list_but_not_rent(self, rig: CloudRig, wording: Wording) -> None:
        self.cloud(rig).verified = False
        known(await rig.provider.list())
        with pytest.raises(AuthFailed) as refused:
            await rig.provider.create(rig.resources, "token-1")
        wording(refused)

    async def test_out_of_stock_raises_no_capacity(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 0}))
        with pytest.raises(NoCapacity):
            await rig.provider.create(rig.resources, "token-1")

    @pytest.mark.slow
    async def test_all_pages_are_read(self, rig: CloudRig) -> None:
        rig.cloud.cloud.configure(rig.cloud.cloud.settings.model_copy(update={"capacity": 200}))
        for n in range(120):
            rig.cloud.rent(f"gpuwarden-t{n}", Resources(gpu="h800"), order=ORDER)
        await rig.settle()
        assert len({i.id for i in known(await rig.provider.list())}) == 120
        assert [i.token for i in known(await rig.provider.find("t119"))] == ["t119"]

    async def test_a_list_that_stops_early_is_unknown(self, rig: CloudRig) -> None:
        for data in (
            {"list": [], "max_page": 1, "result_total": 3},
            {"list": [], "max_page": 0, "result_total": 1},
            {"list": None, "max_page": 0, "result_total": 0},
        ):
            body = json.dumps({"code": "Success", "data": data, "msg": ""}).encode()
            rig.cloud.faults = [Fault("other", self.platform.lists, count=9, body=body)]
            assert isinstance(await rig.provider.list(), Unknown)

    async def test_a_new_status_is_unknown_and_hides_no_other_row(self, rig: CloudRig) -> None:
        one, two = await self.rent(rig, "token-1"), await self.rent(rig, "token-2")
        self.cloud(rig).statuses[one.id] = "migrating"
        assert isinstance(await rig.provider.get(one.id), Unknown)
        rows = {i.id: i for i in known(await rig.provider.list())}
        assert rows[one.id].meter is None and rows[one.id].token == "token-1" and rows[one.id].place is None
        assert rows[two.id].state is InstanceState.RUNNING
        assert [i.id for i in known(await rig.provider.find("token-1"))] == [one.id]

    @pytest.mark.parametrize(
        ("odd", "listed"),
        [({"created_at": "soon"}, 2), ({"status": None}, 2), ({"uuid": None}, None), ({"name": 7}, None)],
    )
    async def test_an_odd_row_hides_no_others_if_it_is_identifiable(
        self, rig: CloudRig, odd: dict[str, object], listed: int | None
    ) -> None:
        one, _ = await self.rent(rig, "token-1"), await self.rent(rig, "token-2")
        self.cloud(rig).odd[one.id] = odd
        answer = await rig.provider.list()
        assert (len(answer.value) if isinstance(answer, Known) else None) == listed

    async def test_yuan_are_converted_only_at_the_users_rate(self, rig: CloudRig) -> None:
        del rig.env["AUTODL_CNY_PER_USD"]
        instance = await self.rent(rig)
        assert instance.price_usd_per_hour is None
        assert known(await rig.provider.quote(rig.resources)).price_usd_per_hour is None
        for rate, price in (("7.0", 1.25), ("0", None), ("nan", None), ("x", None)):
            rig.env["AUTODL_CNY_PER_USD"] = rate
            seen = known(await rig.provider.get(instance.id))
            assert seen is not None
            assert seen.price_usd_per_hour == (pytest.approx(price) if price else None)

    async def test_an_unenforceable_cap_is_refused(self, rig: CloudRig, wording: Wording) -> None:
        with pytest.raises(NotSupported) as refused:
            await rig.provider.create(Resources(gpu="H800", max_price_usd_per_hour=9.0), "token-1")
        wording(refused)
        assert rig.cloud.own == {}

    async def test_the_snapshots_password_is_never_kept_or_shown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        assert any(PASSWORD in json.dumps(t.body) for _, t in rig.cloud.exchanges)
        assert PASSWORD not in instance.model_dump_json() + repr(vars(rig.provider))
        rig.cloud.faults = [Fault("truncated", "/snapshot$")]
        seen = known(await rig.provider.get(instance.id))
        assert seen is not None and seen.state is InstanceState.RUNNING and seen.place is None
        assert PASSWORD not in seen.why

    async def test_check_reports_missing_credit(self, rig: CloudRig) -> None:
        rig.cloud.money = 0
        assert [f.severity for f in await rig.provider.check()] == [Severity.ERROR]

    @pytest.mark.parametrize(("gpu", "count"), [("H800", 5), ("RTX", 1), ("no such/gpu", 1)])
    async def test_unsupported_gpus_and_counts_are_refused(self, rig: CloudRig, gpu: str, count: int) -> None:
        with pytest.raises(BadRequest):
            await rig.provider.create(Resources(gpu=gpu, gpu_count=count), "token-1")
        assert rig.cloud.requests == []

    async def test_durable_storage_is_unsupported(self, rig: CloudRig, wording: Wording) -> None:
        with pytest.raises(NotSupported) as refused:
            await rig.provider.create(Resources(gpu="H800", durable_storage=True), "token-1")
        wording(refused)
