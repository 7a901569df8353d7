"""Emulator of the parts of Lambda's API, description 1.10, that the provider and other clients use, with its traps.

SkyPilot, dstack, and lambda-cloud-client still send the older description's `quantity`, always 1, so it is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from clouds.base import PUBLIC_KEY, Emulator, Refuse, Reply, Request, alive, route
from clouds.boxes import Machines
from clouds.platform import Platform
from gpuwarden.core.errors import NoCapacity
from gpuwarden.core.models import Instance, InstanceState, Resources
from gpuwarden.providers.lambda_cloud import LambdaCloud

_S = InstanceState
STATUS = {
    _S.BOOTING: "booting",
    _S.RUNNING: "active",
    _S.FAILED: "unhealthy",
    _S.TERMINATING: "terminating",
    _S.GONE: "terminated",
}
REGIONS = ("us-east-1", "us-west-1")


def error(status: int, code: str, message: str, suggestion: str = "Check it.") -> Reply:
    return Reply(status, {"error": {"code": code, "message": message, "suggestion": suggestion}})


class LambdaAccount(Emulator):
    """An account with one SSH key and one filesystem. It allows two requests per second and one launch per 12 s."""

    tells_port = False
    profile_id = "lambda"
    gpus = {"H100 (80 GB PCIe)": 2.49, "A10 (24 GB PCIe)": 0.75, "GH200 (96 GB)": 1.49}
    window = (2, 1.0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ssh_keys = [{"id": "k1", "name": "laptop", "public_key": f"{PUBLIC_KEY} me@laptop"}]
        self.filesystems = [self.filesystem("gpuwarden", "us-west-1")]
        self.firewall: list[dict[str, Any]] = []
        self.launches: list[float] = []
        self.odd: dict[str, dict[str, Any]] = {}
        """Fields that override those in an instance's row."""
        self.unhealthy: set[str] = set()
        self.launch_twice = False

    def unauthorized(self) -> Reply:
        return error(401, "global/invalid-api-key", "API key was invalid, expired, or deleted.")

    def unknown_route(self, request: Request) -> Reply:
        return error(404, "global/not-found", "no such route")

    def limited(self) -> Reply:
        return error(429, "global/rate-limited", "Too many requests.")

    def undescribed(self, names: str) -> Reply:
        return error(400, "global/invalid-parameters", f"Invalid request data: unknown {names}.")

    @staticmethod
    def filesystem(name: str, region: str) -> dict[str, Any]:
        user = {"id": "u1", "email": "me@example.com", "status": "active"}
        return {
            "id": f"fs-{name}",
            "name": name,
            "mount_point": f"/lambda/nfs/{name}",
            "created": "2026-01-01T00:00:00Z",
            "created_by": user,
            "is_in_use": False,
            "region": {"name": region, "description": region},
        }

    def kind(self, gpu: str, count: int) -> dict[str, Any]:
        return {
            "name": f"gpu_{count}x_{gpu.split()[0].lower()}",
            "description": f"{count}x {gpu}",
            "gpu_description": gpu,
            "price_cents_per_hour": round(self.prices[gpu] * 100) * count,
            "specs": {"vcpus": 26, "memory_gib": 200, "storage_gib": 512, "gpus": count},
        }

    def kinds(self) -> dict[str, dict[str, Any]]:
        return {(k := self.kind(gpu, n))["name"]: {**k, "gpu": gpu} for gpu in self.prices for n in (1, 8)}

    @route("GET", "/api/v1/instance-types", query="")
    def instance_types(self, request: Request, at: Mapping[str, str]) -> Reply:
        regions = [] if self.full() else [{"name": r, "description": r} for r in REGIONS]
        shown = {name: {k: v for k, v in kind.items() if k != "gpu"} for name, kind in self.kinds().items()}
        data = {n: {"instance_type": k, "regions_with_capacity_available": regions} for n, k in shown.items()}
        return Reply(200, {"data": data})

    @route("GET", "/api/v1/instances", query="cluster_id")
    def list_instances(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"data": [self.instance(i) for i in self.listed()]})

    @route("GET", "/api/v1/instances/{id}", query="")
    def get_instance(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"data": self.instance(self.need(at["id"]))})

    @route("POST", "/api/v1/instances/{id}", query="", body="name")
    def rename(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.need(at["id"])
        self.own[i.id]["order"] = self.own[i.id]["order"] | request.body
        return Reply(200, {"data": self.instance(i)})

    @route(
        "POST", "/api/v1/instance-operations/launch", query="",
        body="region_name instance_type_name ssh_key_names file_system_names file_system_mounts hostname name image"
        " user_data tags firewall_rulesets quantity",
    )  # fmt: skip
    def launch(self, request: Request, at: Mapping[str, str]) -> Reply:
        body, now = request.body, self.clock.now()
        if not {"region_name", "instance_type_name", "ssh_key_names"} <= set(body) or body.get("quantity", 1) != 1:
            return error(400, "global/invalid-parameters", "Invalid request data.")
        if len(body.get("name") or "") > 64 or not isinstance(body.get("name", ""), str):
            return error(400, "global/invalid-parameters", "name: too long, or not text")
        if self.launches and now - self.launches[-1] < 12:
            return self.limited()
        kind = self.kinds().get(body["instance_type_name"])
        names = {k["name"] for k in self.ssh_keys}
        if kind is None or len(body["ssh_key_names"]) != 1 or not set(body["ssh_key_names"]) <= names:
            return error(400, "global/invalid-parameters", "Invalid request data.")
        mounts = [f for f in self.filesystems if f["name"] in body.get("file_system_names", [])]
        if any(f["region"]["name"] != body["region_name"] for f in mounts):
            return error(400, "instance-operations/launch/file-system-in-wrong-region", "Wrong region.")
        resources = Resources(gpu=kind["gpu"], gpu_count=kind["specs"]["gpus"], durable_storage=bool(mounts))
        try:
            made = [
                self.rent(body.get("name", ""), resources, order=body) for _ in range(2 if self.launch_twice else 1)
            ]
        except NoCapacity:
            code = "instance-operations/launch/insufficient-capacity"
            return error(400, code, "Not enough capacity to fulfill launch request.")
        self.launches.append(now)
        return Reply(200, {"data": {"instance_ids": [m.id for m in made]}})

    @route("POST", "/api/v1/instance-operations/restart", query="", body="instance_ids")
    def restart(self, request: Request, at: Mapping[str, str]) -> Reply:
        restarted = [self.need(i) for i in request.body["instance_ids"]]
        return Reply(200, {"data": {"restarted_instances": [self.instance(i) for i in restarted]}})

    @route("POST", "/api/v1/instance-operations/terminate", query="", body="instance_ids")
    def terminate(self, request: Request, at: Mapping[str, str]) -> Reply:
        ended = [self.need(i) for i in request.body["instance_ids"]]
        for i in ended:
            self.cloud.terminate(i.id)
        return Reply(200, {"data": {"terminated_instances": [self.instance(self.need(i.id)) for i in ended]}})

    @route("GET", "/api/v1/ssh-keys", query="")
    def keys(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"data": self.ssh_keys})

    @route("POST", "/api/v1/ssh-keys", query="", body="name public_key")
    def add_key(self, request: Request, at: Mapping[str, str]) -> Reply:
        name, given = request.body.get("name", ""), request.body.get("public_key")
        if not 1 <= len(name) <= 64 or name in {k["name"] for k in self.ssh_keys}:
            return error(400, "global/duplicate", "The name is taken, or is not one.")
        key = {"id": f"k{len(self.ssh_keys) + 1}", "name": name, "public_key": given or PUBLIC_KEY}
        self.ssh_keys.append(key)
        return Reply(200, {"data": key if given else {**key, "private_key": "-----BEGIN EXAMPLE-----"}})

    @route("DELETE", "/api/v1/ssh-keys/{id}", query="")
    def delete_key(self, request: Request, at: Mapping[str, str]) -> Reply:
        left = [k for k in self.ssh_keys if k["id"] != at["id"]]
        if len(left) == len(self.ssh_keys):
            return error(404, "global/object-does-not-exist", "Specified SSH key does not exist.")
        self.ssh_keys = left
        return Reply(200, {"data": {}})

    @route("GET", "/api/v1/regions", query="")
    def regions(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"data": [{"name": r, "description": r} for r in REGIONS]})

    @route("GET", "/api/v1/firewall-rules", query="")
    def rules(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"data": self.firewall})

    @route("PUT", "/api/v1/firewall-rules", query="", body="data")
    def set_rules(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.firewall = request.body["data"]
        return Reply(200, {"data": self.firewall})

    @route("GET", "/api/v1/audit-events", query="start end page_token resource_type")
    def audit_events(self, request: Request, at: Mapping[str, str]) -> Reply:
        made = {
            "service_name": "cloud",
            "resource_name": "api_key",
            "action": "created",
            "catalog_version": "2025-09-06",
            "event_id": "0123456789abcdef0123456789abcdef",
            "event_time": "2025-09-15T10:30:45.123456Z",
            "actor_lrn": None,
            "resource_lrns": ["lrn:cloud:api_key:ffee"],
            "resource_owner_lrn": f"lrn:cloud:account:{self.user:032x}",
            "request_api_key_lrn": None,
            "additional_details": {},
        }
        return Reply(200, {"data": [made], "page_token": None})

    @route("GET", "/api/v1/file-systems", query="")
    def file_systems(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"data": self.filesystems})

    @route("POST", "/api/v1/filesystems", query="", body="name region")
    def add_file_system(self, request: Request, at: Mapping[str, str]) -> Reply:
        if request.body.get("region") not in REGIONS or not re.fullmatch(
            r"[a-zA-Z]+[0-9a-zA-Z-]*", request.body["name"]
        ):
            return error(400, "global/invalid-parameters", "Invalid request data.")
        self.filesystems.append(self.filesystem(request.body["name"], request.body["region"]))
        return Reply(200, {"data": self.filesystems[-1]})

    @route("DELETE", "/api/v1/filesystems/{id}", query="")
    def delete_file_system(self, request: Request, at: Mapping[str, str]) -> Reply:
        left = [f for f in self.filesystems if f["id"] != at["id"]]
        if len(left) == len(self.filesystems):
            return error(404, "global/object-does-not-exist", "Specified filesystem does not exist.")
        self.filesystems = left
        return Reply(200, {"data": {"deleted_ids": [at["id"]]}})

    def need(self, ident: str) -> Instance:
        found = self.see(ident)
        if not alive(found):
            raise Refuse(error(404, "global/object-does-not-exist", "Specified instance does not exist."))
        assert found is not None
        return found

    def instance(self, i: Instance) -> dict[str, Any]:
        order = self.own[i.id]["order"]
        kind = {k: v for k, v in self.kinds()[order["instance_type_name"]].items() if k != "gpu"}
        verbs = ("migrate", "rebuild", "restart", "cold_reboot", "terminate")
        shown = {
            "id": i.id,
            "name": order.get("name") or "",
            "status": "unhealthy" if i.id in self.unhealthy else STATUS[i.state],
            "ssh_key_names": order["ssh_key_names"],
            "file_system_names": order.get("file_system_names", []),
            "region": {"name": order["region_name"], "description": order["region_name"]},
            "instance_type": kind,
            "actions": {verb: {"available": True} for verb in verbs},
        }
        host = self.address(i.id)[0]
        at = {} if i.state is _S.BOOTING else {"ip": host, "private_ip": host}
        return {**shown, **at, **self.odd.get(i.id, {})}


def _take_key(account: LambdaAccount, machines: Machines) -> None:
    account.ssh_keys[0]["public_key"] = machines.key


def _reports_no_instances(status: int, body: dict[str, Any]) -> bool:
    error = body.get("error")
    gone = isinstance(error, dict) and error.get("code") == "global/object-does-not-exist"
    return (status in {404, 410} and gone) or body.get("data") == []


PLATFORM = Platform(
    name="lambda", account=LambdaAccount, provider=LambdaCloud, taken="gone", take_key=_take_key,
    creates=r"^POST /api/v1/instance-operations/launch$",
    lists=r"^GET /api/v1/instances$",
    gets=r"^GET /api/v1/instances/",
    ends=r"^POST /api/v1/instance-operations/terminate$",
    reports_no_instances=_reports_no_instances,
    spec=("lambda-cloud.openapi.json", ""),
    durable="/lambda/nfs/gpuwarden/out",
    facts={
        "rests": ["terminate"], "bills": [], "bills_with_durable_storage": ["terminate"],
        "reversible": [], "by_hand": False, "spot": False,
        "survives": [
            {"path": "/home/ubuntu/x", "lives": "nnny"},
            {"path": "/home/ubuntu/x", "durable": True, "lives": "nnny"},
            {"path": "/lambda/nfs/gpuwarden/x", "lives": "nnnn"},
            {"path": "/lambda/nfs/gpuwarden/x", "durable": True, "lives": "nyny"},
            {"path": "/lambda/nfs/typo/x", "durable": True, "lives": "nnny"},
        ],
    },
    hasty=(
        "lambda terminate 0920582c",
        "lambda-cli instances terminate 0920582c",
        "lambda instance terminate 0920582c --yes",
    ),
    innocent=(
        "lambda ls",
        "lambda instances list",
    ),
)  # fmt: skip
