"""Emulator of the parts of AutoDL's Pro API the provider uses, with its traps. Nearly all replies have status 200."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from clouds.base import Emulator, Refuse, Reply, Request, alive, route
from clouds.platform import Platform
from gpuwarden.core.errors import Conflict, NoCapacity
from gpuwarden.core.models import Instance, InstanceState, Resources
from gpuwarden.providers.autodl import AutoDL

_S = InstanceState
PRO = "/api/v1/dev/instance/pro"
PASSWORD = "jbeOXgTWUxq"
STATUS = {
    _S.BOOTING: "starting",
    _S.RUNNING: "running",
    _S.STOPPING: "shutting_down",
    _S.STOPPED: "shutdown",
    _S.TERMINATING: "releasing",
    _S.FAILED: "starting",
}
FIELDS = {
    "data_center_list", "req_gpu_amount", "expand_system_disk_by_gb", "gpu_spec_uuid", "image_uuid", "cuda_v_from",
    "instance_name", "start_command",
}  # fmt: skip
REQUIRED = {"req_gpu_amount", "expand_system_disk_by_gb", "gpu_spec_uuid", "image_uuid", "cuda_v_from"}


def answer(data: Any) -> Reply:
    return Reply(200, {"code": "Success", "data": data, "msg": "", "request_id": "983edb8c8c8553db"})


def error(code: str, msg: str) -> Reply:
    return Reply(200, {"code": code, "data": None, "msg": msg, "request_id": "983edb8c8c8553db"})


class AutoDLAccount(Emulator):
    """A verified account with some credit."""

    profile_id = "autodl"
    gpus = {"h800": 1.25, "v-48g": 0.4, "5090-p": 0.42}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.verified = True
        self.statuses: dict[str, str] = {}
        self.odd: dict[str, dict[str, Any]] = {}
        """Fields that override those in an instance's row."""

    def authorized(self, request: Request) -> bool:
        return request.headers.get("authorization") == self.key  # no "Bearer"

    def unauthorized(self) -> Reply:
        return error("AuthorizeFailed", "登录超时,请重新登录")

    def unknown_route(self, request: Request) -> Reply:
        return Reply(404, None)

    def undescribed(self, names: str) -> Reply:
        return error("RequestParameterIsWrong", "请求参数错误")

    def limited(self) -> Reply:
        return Reply(429, {"code": "RequestTooFrequent", "data": None, "msg": "请求过于频繁"})

    @route("POST", f"{PRO}/list", query="", body="page_index page_size")
    def list_instances(self, request: Request, at: Mapping[str, str]) -> Reply:
        size, page = request.body["page_size"], request.body["page_index"]
        rows = [self.row(i) for i in self.listed()]
        start = (page - 1) * size
        pages = -(-len(rows) // size)
        return answer(
            {
                "list": rows[start : start + size],
                "page_index": page,
                "page_size": size,
                "offset": start,
                "max_page": pages,
                "result_total": len(rows),
                "page": page,
            }
        )

    @route("POST", f"{PRO}/create")
    def create(self, request: Request, at: Mapping[str, str]) -> Reply:
        body = request.body
        if not self.verified:
            return error("TORealName", "未完成实名认证,认证后才可使用")
        if not set(body) >= REQUIRED or set(body) - FIELDS or not 1 <= body["req_gpu_amount"] <= 4:
            return error("RequestParameterIsWrong", "请求参数错误")
        if body["gpu_spec_uuid"] not in self.prices:
            return error("InternalError", "算力规格不存在")
        resources = Resources(gpu=body["gpu_spec_uuid"], gpu_count=body["req_gpu_amount"])
        try:
            made = self.rent(body.get("instance_name", ""), resources, order=body)
        except NoCapacity:
            return error("InternalError", "当前算力规格暂无库存, 请修改配置或稍等再试")
        return answer(made.id)

    @route("GET", f"{PRO}/status", query="instance_uuid")
    def status(self, request: Request, at: Mapping[str, str]) -> Reply:
        return answer(self.row(self.queried(request))["status"])

    @route("GET", f"{PRO}/snapshot", query="instance_uuid")
    def snapshot(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.queried(request)
        host, port = self.address(i.id)
        return answer(
            {
                "region_sign": "bj-B1",
                "payg_price": round((i.price_usd_per_hour or 0) * 7 * 1000),
                "snapshot_gpu_alias_name": "NVIDIA H800",
                "ssh_command": f"ssh -p {port} root@{host}",
                "proxy_host": host,
                "root_password": PASSWORD,
                "ssh_port": port,
                "jupyter_token": "xxx",
            }
        )

    @route("POST", f"{PRO}/power_off", query="", body="instance_uuid")
    def power_off(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.cloud.stop(self.need(request.body["instance_uuid"]).id)
        return answer(None)

    @route("POST", f"{PRO}/power_on", query="", body="instance_uuid payload start_command")
    def power_on(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.need(request.body["instance_uuid"])
        if request.body.get("payload") != "gpu":
            return error("RequestParameterIsWrong", "请求参数错误")
        try:
            self.cloud.start(i.id)
        except Conflict:
            return error("InternalError", "实例状态错误")
        self.booted(i.id)
        return answer(None)

    @route("POST", f"{PRO}/release", query="", body="instance_uuid")
    def release(self, request: Request, at: Mapping[str, str]) -> Reply:
        try:
            self.cloud.terminate(self.need(request.body["instance_uuid"]).id)
        except Conflict:
            return error("InternalError", "请先关机实例")
        return answer(None)

    @route("POST", "/api/v1/dev/wallet/balance", query="", body="")
    def balance(self, request: Request, at: Mapping[str, str]) -> Reply:
        return answer({"assets": round(self.money * 7 * 1000), "accumulate": 1000, "voucher_balance": 0})

    def queried(self, request: Request) -> Instance:
        """Return the instance named in the query string; the documented JSON body is ignored."""
        if "instance_uuid" not in request.query:
            raise Refuse(error("RequestParameterIsWrong", "请求参数错误"))
        return self.need(request.query["instance_uuid"])

    def need(self, ident: str) -> Instance:
        found = self.see(ident)
        if not alive(found):
            raise Refuse(error("RecordNotFoundError", "记录不存在"))
        assert found is not None
        return found

    def row(self, i: Instance) -> dict[str, Any]:
        china = datetime.fromtimestamp(i.created_at or 0, UTC).astimezone(timezone(timedelta(hours=8)))
        return {
            "created_at": china.isoformat(timespec="seconds"),
            "uuid": i.id,
            "machine_id": "4d67438b4f",
            "region_sign": "neimeng-C",
            "status": self.statuses.get(i.id, STATUS[i.state]),
            "sub_status": "",
            "start_mode": "gpu",
            "charge_type": "payg",
            "req_gpu_amount": self.own[i.id]["order"]["req_gpu_amount"],
            "name": self.own[i.id]["label"],
            "gpu_spec_uuid": self.own[i.id]["order"]["gpu_spec_uuid"],
            **self.odd.get(i.id, {}),
        }


def _reports_no_instances(status: int, body: dict[str, Any]) -> bool:
    data = body.get("data")
    empty = isinstance(data, dict) and data.get("list") == [] and data.get("result_total", 1) <= 0
    return body.get("code") == "RecordNotFoundError" or (body.get("code") == "Success" and empty)


PLATFORM = Platform(
    name="autodl", account=AutoDLAccount, provider=AutoDL, gpu="H800", taken="stopped", priced=False,
    creates=r"^POST .*/pro/create$",
    lists=r"^POST .*/pro/list$",
    gets=r"^GET .*/pro/status$",
    ends=r"^POST .*/pro/release$",
    gets_balance=r"^POST /api/v1/dev/wallet/balance$",
    reports_no_instances=_reports_no_instances,
    names_account=False,
    env=(("AUTODL_CNY_PER_USD", "7.0"),),
    facts={
        "rests": ["stop", "terminate"], "bills": ["stop"], "bills_with_durable_storage": ["stop"],
        "reversible": ["stop"], "by_hand": False, "spot": False,
        "survives": [
            {"path": "/opt/x", "lives": "ynny"},
            {"path": "/root/autodl-tmp/x", "lives": "ynny"},
            {"path": "/root/autodl-tmp/x", "durable": True, "lives": "ynny"},
            {"path": "/root/autodl-fs/x", "lives": "nnnn"},
            {"path": "/root/autodl-fs/x", "durable": True, "lives": "nnnn"},
        ],
    },
)  # fmt: skip
