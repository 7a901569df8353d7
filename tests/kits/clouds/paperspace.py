"""Emulator of Paperspace's API by DigitalOcean's description, as used by the provider and SkyPilot, with its traps.

According to the official command line's description and SkyPilot, a change is answered with status 200, the machine,
and the event that changes it. A third-party description shows only the machine (`wraps` False).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clouds.base import Emulator, Refuse, Reply, Request, alive, route
from clouds.boxes import Machines
from clouds.platform import Platform
from gpuwarden.core.errors import Conflict, NoCapacity
from gpuwarden.core.models import Instance, InstanceState, Resources
from gpuwarden.providers.paperspace import Paperspace
from gpuwarden.rehearsal.model import Fault as CloudFault

_S = InstanceState
STATE = {
    _S.BOOTING: "provisioning",
    _S.RUNNING: "ready",
    _S.STOPPING: "stopping",
    _S.STOPPED: "off",
    _S.TERMINATING: "stopping",
    _S.FAILED: "failed",
}


def error(status: int, code: str, message: str) -> Reply:
    return Reply(status, {"code": code, "message": message})


LIST = "after limit orderBy order name"
MACHINE = (
    "autoShutdownEnabled autoShutdownForce autoShutdownTimeout autoSnapshotEnabled autoSnapshotFrequency"
    " autoSnapshotSaveCount diskSize machineType name networkId publicIpType restorePointEnabled restorePointFrequency"
)
DISK_USD_A_MONTH = {50: 5, 100: 7, 250: 10, 500: 20, 1000: 40, 2000: 80}


class PaperspaceTeam(Emulator):
    """A team. With `retired`, every address returns 404, as the older API does now."""

    tells_port = False
    profile_id = "paperspace"
    gpus = {"H100": 5.95, "A4000": 0.76, "A6000": 1.89}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wraps = True
        self.deletes_running = False
        """Whether a running machine can be deleted. SkyPilot relies on this, contrary to the documentation."""
        self.scripts: list[dict[str, Any]] = []
        self.networks: list[dict[str, Any]] = []
        self.templates = [
            self.template("told", "ML-in-a-Box Ubuntu 20.04", 2022, "H100", "A4000"),
            self.template("tml", "ML-in-a-Box Ubuntu 22.04", 2024, "H100", "H100x8", "A6000"),
            self.template("tsrv", "Ubuntu 24.04 Server", 2026, "H100", "H100x8", "A4000", "A6000"),
        ]
        self.custom = [self.template("tpl1", "of the team", 2025, "H100", "H100x8", "A4000")]
        self.odd: dict[str, dict[str, Any]] = {}
        """Fields that override those in a machine's row."""
        self.retired = False
        self.states: dict[str, str] = {}

    def unauthorized(self) -> Reply:
        return error(401, "UNAUTHORIZED", "Invalid API key")

    def unknown_route(self, request: Request) -> Reply:
        return error(404, "NOT_FOUND", "Not found")

    def limited(self) -> Reply:
        return error(429, "TOO_MANY_REQUESTS", "Too many requests")

    def undescribed(self, names: str) -> Reply:
        return error(400, "BAD_REQUEST", f"Unrecognized key(s) in object: {names}")

    def template(self, ident: str, name: str, year: int, *kinds: str) -> dict[str, Any]:
        fits = [{"machineTypeLabel": kind, "isAvailable": kind in kinds} for kind in ("H100", "H100x8", *self.gpus)]
        return {
            "id": ident, "name": name, "agentType": "LinuxHeadless", "operatingSystemLabel": "Ubuntu",
            "availableMachineTypes": fits, "defaultSizeGb": 50, "dtCreated": f"{year}-01-01T00:00:00Z",
        }  # fmt: skip

    def page(self, request: Request, rows: list[dict[str, Any]]) -> Reply:
        limit, after = min(int(request.query.get("limit", 15)), 120), request.query.get("after")
        if name := request.query.get("name"):
            rows = [row for row in rows if name in row["name"]]
        start = next((n + 1 for n, row in enumerate(rows) if row["id"] == after), 0) if after else 0
        page, more = rows[start : start + limit], start + limit < len(rows)
        body = {"items": page, "hasMore": more}
        return Reply(200, {**body, "nextPage": page[-1]["id"]} if more else body)

    @route("GET", "/os-templates", query=LIST)
    def os_templates(self, request: Request, at: Mapping[str, str]) -> Reply:
        return self.page(request, self.templates)

    @route("GET", "/custom-templates", query=f"{LIST} machineId")
    def custom_templates(self, request: Request, at: Mapping[str, str]) -> Reply:
        return self.page(request, self.custom)

    @route("GET", "/machine-availability", query="machineType region")
    def availability(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"available": not self.full()})

    @route("GET", "/startup-scripts", query=LIST)
    def list_scripts(self, request: Request, at: Mapping[str, str]) -> Reply:
        return self.page(request, self.scripts)

    @route("POST", "/startup-scripts", query="", body="name script isRunOnce")
    def add_script(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.scripts.append({"id": f"ss{len(self.scripts)}", "name": request.body["name"], "isRunOnce": True})
        return Reply(200, self.scripts[-1])

    @route("PUT", "/startup-scripts/{id}", query="", body="name script isRunOnce isEnabled description")
    def set_script(self, request: Request, at: Mapping[str, str]) -> Reply:
        (found,) = [row for row in self.scripts if row["id"] == at["id"]]
        found["name"] = request.body["name"]
        return Reply(200, found)

    @route("GET", "/private-networks", query=f"{LIST} region")
    def list_networks(self, request: Request, at: Mapping[str, str]) -> Reply:
        return self.page(request, self.networks)

    @route("POST", "/private-networks", query="", body="name region migrateMachines")
    def add_network(self, request: Request, at: Mapping[str, str]) -> Reply:
        row = {"id": f"n{len(self.networks)}", **request.body, "network": "10.0.0.0", "netmask": "255.0.0.0"}
        self.networks.append({**row, "dtCreated": self.iso(0)})
        return Reply(200, self.networks[-1])

    @route("DELETE", "/private-networks/{id}", query="")
    def delete_network(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.networks = [row for row in self.networks if row["id"] != at["id"]]
        return Reply(200, {"id": at["id"]})

    def _route(self, request: Request) -> Reply:
        return self.unknown_route(request) if self.retired else super()._route(request)

    @route("GET", "/machines", query=f"{LIST} region agentType machineType")
    def list_machines(self, request: Request, at: Mapping[str, str]) -> Reply:
        return self.page(request, [self.machine(i) for i in self.listed()])

    @route(
        "POST", "/machines", query="",
        body=f"{MACHINE} accessorIds emailPassword enableNvlink region startOnCreate startupScriptId templateId"
        " takeInitialSnapshot",
    )  # fmt: skip
    def create_machine(self, request: Request, at: Mapping[str, str]) -> Reply:
        body = request.body
        if not {"name", "machineType", "templateId", "region", "diskSize"} <= set(body):
            return error(400, "BAD_REQUEST", "missing fields")
        gpu, _, count = body["machineType"].partition("x")
        if gpu not in self.prices:
            return error(400, "BAD_REQUEST", "unknown machine type")
        try:
            made = self.rent(body["name"], Resources(gpu=gpu, gpu_count=int(count or 1)), order=body)
        except NoCapacity:
            return error(400, "OUT_OF_CAPACITY", "We are currently out of capacity for this machine type")
        return self.changed(made, 200 if self.wraps else 201)

    @route("GET", "/machines/{id}", query="")
    def get_machine(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, self.machine(self.need(at["id"])))

    @route("PUT", "/machines/{id}", query="", body=f"{MACHINE} restorePointSnapshotId")
    def update_machine(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.need(at["id"])
        self.own[i.id]["order"] = self.own[i.id]["order"] | request.body
        return self.changed(i, 200)

    @route("GET", "/auth/session", query="")
    def session(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"user": {"id": "u1"}, "team": {"id": f"team{self.user}", "isPrivate": True}})

    @route("DELETE", "/machines/{id}", query="")
    def delete_machine(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.need(at["id"])
        if self.deletes_running and i.state is not _S.STOPPED:
            self.cloud.inject(i.id, CloudFault(kind="vanish"))
            return self.changed(i, 200)
        try:
            self.cloud.terminate(i.id)
        except Conflict:
            return error(400, "BAD_REQUEST", "Machine must be off")
        return self.changed(i, 200) if self.wraps else Reply(204)

    @route("PATCH", "/machines/{id}/start", query="", body="")
    def start(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.need(at["id"])
        try:
            self.cloud.start(i.id)
        except Conflict as refusal:
            return error(409, "CONFLICT", refusal.message)
        self.booted(i.id)
        return self.changed(self.need(i.id), 200)

    @route("PATCH", "/machines/{id}/stop", query="", body="")
    def stop(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.need(at["id"])
        self.cloud.stop(i.id)
        return self.changed(self.need(i.id), 200)

    def changed(self, i: Instance, status: int) -> Reply:
        shown = self.machine(i)
        return Reply(
            status,
            {"event": {"id": "e1", "name": "start", "state": "new", "machineId": i.id}, "data": shown}
            if self.wraps
            else shown,
        )

    def shutdown(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Return the order's shutdown setting. Unknown fields are silently ignored."""
        hours = order.get("autoShutdownTimeout") if order.get("autoShutdownEnabled") else None
        return {"autoShutdownEnabled": hours is not None, "autoShutdownTimeout": hours}

    def need(self, ident: str) -> Instance:
        found = self.see(ident)
        if not alive(found):
            raise Refuse(error(404, "NOT_FOUND", "Machine not found"))
        assert found is not None
        return found

    def machine(self, i: Instance) -> dict[str, Any]:
        order = self.own[i.id]["order"]
        return {
            "id": i.id,
            "name": order["name"],
            "state": self.states.get(i.id, STATE[i.state]),
            "machineType": order["machineType"],
            "region": order["region"],
            "publicIp": self.address(i.id)[0] if i.state is _S.RUNNING else None,
            "privateIp": "10.0.0.4",
            "os": "Ubuntu",
            "agentType": "LinuxHeadless",
            "cpus": 16,
            "ram": 200 << 30,
            "storageTotal": order.get("diskSize", 100) << 30,
            "storageUsed": 1 << 30,
            "usageRate": self.rate(order["machineType"]),
            "storageRate": DISK_USD_A_MONTH[order.get("diskSize", 100)],
            **self.shutdown(order),
            "dtCreated": self.iso(i.created_at),
            **self.odd.get(i.id, {}),
        }

    def rate(self, kind: str) -> float:
        gpu, _, count = kind.partition("x")
        return self.prices[gpu] * int(count or 1)


def _take_key(account: PaperspaceTeam, machines: Machines) -> None:
    machines.image_keys = [machines.key]


PLATFORM = Platform(
    name="paperspace", account=PaperspaceTeam, provider=Paperspace, taken="stopped", priced=False, take_key=_take_key,
    creates=r"^POST /machines$",
    lists=r"^GET /machines$",
    gets=r"^GET /machines/",
    ends=r"^DELETE /machines/",
    reports_no_instances=lambda status, body: body.get("items") == [] and body.get("hasMore") is False,
    spec=("paperspace-machines.openapi.yaml", ""),
    gaps=(
        "state: 'off' is not one of",  # YAML parsed off as false
        "status 401", "status 404", "status 400",  # the description has no errors
        "GET /auth/session: no such route", "GET /os-templates: no such route", "GET /custom-templates: no such route",
        "GET /machine-availability: no such route",  # published on separate pages
        "POST /machines: status 200", "DELETE /machines/",  # the official description has 200 and a body for both
    ),
    env=(("PAPERSPACE_TEMPLATE", "tpl1"), ("PAPERSPACE_REGION", "ny2")),
    facts={
        "rests": ["stop", "terminate"], "bills": ["stop", "terminate"],
        "bills_with_durable_storage": ["stop", "terminate"],
        "reversible": ["stop"], "by_hand": False, "spot": False,
        "survives": [
            {"path": "/home/paperspace/x", "lives": "ynny"},
        ],
    },
    hasty=(
        "pspace machine delete ps123",
        "pspace machine stop ps123",
    ),
    innocent=(
        "pspace machine list",
    ),
)  # fmt: skip
