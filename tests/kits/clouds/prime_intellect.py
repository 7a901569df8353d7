"""Emulator of Prime Intellect's API by its published description and the `prime` command line, with its traps.

Parameters and fields that the description lacks are refused with its 422 message. If the command line differs from the
description, both are served, and a comment marks the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from clouds.base import PUBLIC_KEY, Emulator, Refuse, Reply, Request, alive, route
from clouds.boxes import Machines
from clouds.platform import Platform
from gpuwarden.core.errors import NoCapacity
from gpuwarden.core.models import Instance, InstanceState, Resources
from gpuwarden.providers.prime_intellect import PrimeIntellect

_S = InstanceState
STATUS = {
    _S.BOOTING: "PROVISIONING",
    _S.RUNNING: "ACTIVE",
    _S.STOPPING: "PENDING",
    _S.INTERRUPTED: "STOPPED",
    _S.STOPPED: "STOPPED",
    _S.TERMINATING: "DELETING",
    _S.FAILED: "ERROR",
    _S.GONE: "TERMINATED",
}
POD_FIELDS = {
    "name", "cloudId", "gpuType", "socket", "gpuCount", "diskSize", "vcpus", "memory", "maxPrice", "image",
    "customTemplateId", "dataCenterId", "country", "security", "envVars", "jupyterPassword", "sshKeyId", "autoRestart",
    "prepaidForHr",
}  # fmt: skip
POD_REQUIRED = {"cloudId", "gpuType", "socket", "gpuCount"}
FILTERS = "page page_size regions gpu_count gpu_type socket security data_center_id cloud_id disks"
LIST = "offset limit"
DISK_USD = 0.0001
"""The hourly price of a gigabyte of disk beyond the disk that an offer includes."""


def error(status: int, detail: str) -> Reply:
    return Reply(status, {"detail": detail})


def invalid(param: str, details: str) -> Reply:
    return Reply(422, {"errors": [{"param": param, "details": details}]})


def spec(default: int | None, least: int | None = None, most: int | None = None, usd: float | None = None) -> Any:
    """Return the allowed values for one resource in an offer."""
    return {
        "minCount": least, "defaultCount": default, "maxCount": most, "pricePerUnit": usd, "step": 1 if least else None,
        "defaultIncludedInPrice": True if usd else None, "additionalInfo": None,
    }  # fmt: skip


class PrimeAccount(Emulator):
    """The account of a user in one team. Terminated Pods appear only in the history."""

    profile_id = "prime-intellect"
    gpus = {"H100_80GB": 2.10, "A100_80GB": 1.20, "L4_24GB": 0.30}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys: list[dict[str, Any]] = []
        for name, public in (("old", "ssh-ed25519 " + "B" * 60), ("mine", f"{PUBLIC_KEY} me@laptop")):
            self.keys.append(self.key_row(name, public))
        self.statuses: dict[str, str] = {}
        self.installing: set[str] = set()
        self.ssh: Any = None
        self.more: list[dict[str, Any]] = []
        """Additional offers."""
        self.odd: dict[str, dict[str, Any]] = {}
        """Fields that override those in a Pod's row."""
        self.teams = ["team1"]
        self.team_money = 40.0
        self.disk_rows: list[dict[str, Any]] = []
        self.most_rows = 2
        """The page size for offers, smaller than in the description, so that there are several pages."""

    def key_row(self, name: str, public: str) -> dict[str, Any]:
        return {
            "id": f"key{len(self.keys)}", "userId": f"user{self.user}", "name": name, "publicKey": public,
            "isPrimary": not self.keys, "isUserKey": True,
        }  # fmt: skip

    def unauthorized(self) -> Reply:
        return error(401, "Invalid API key")

    def unknown_route(self, request: Request) -> Reply:
        return error(404, "Not Found")

    def limited(self) -> Reply:
        return error(429, "Rate limit exceeded")

    def undescribed(self, names: str) -> Reply:
        return invalid(names, "unknown field")

    def _route(self, request: Request) -> Reply:
        """Also serve the path with the API's prefix, which clients append themselves."""
        return super()._route(replace(request, path=request.path.removeprefix("/api/v1")))

    def page(self, request: Request, rows: Sequence[Mapping[str, Any]]) -> Reply:
        offset, limit = int(request.query.get("offset", 0)), min(int(request.query.get("limit", 100)), 100)
        page = rows[offset : offset + limit]
        return Reply(200, {"data": page, "total_count": len(rows), "offset": offset, "limit": limit})

    # ----------------------------------------------------------------------------------------------------------- pods

    @route("GET", "/pods", query=LIST)
    def list_pods(self, request: Request, at: Mapping[str, str]) -> Reply:
        return self.page(request, [self.pod(i) for i in self.listed()])

    @route(
        "POST", "/pods", query="", body="pod provider disks team team_member_ids shared_with_team"
        " teamMemberIds sharedWithTeam",  # the command line spells the last two differently
    )  # fmt: skip
    def create_pod(self, request: Request, at: Mapping[str, str]) -> Reply:
        order, provider = request.body.get("pod", {}), (request.body.get("provider") or {}).get("type")
        if odd := sorted(set(order) - POD_FIELDS) or sorted(n for n in POD_REQUIRED if order.get(n) is None):
            return invalid(f"body.pod.{odd[0]}", "unknown field, or a required one is missing")
        match = [o for o in self.offers() if o["cloudId"] == order["cloudId"] and o["provider"] == provider]
        key = order.get("sshKeyId", self.keys[0]["id"])
        team = (request.body.get("team") or {}).get("teamId")
        if not match or key not in {k["id"] for k in self.keys} or team not in {None, *self.teams}:
            return error(422, "Invalid pod configuration")
        disk, size = match[0]["disk"], order.get("diskSize")
        if size is not None and disk["maxCount"] is not None and not disk["minCount"] <= size <= disk["maxCount"]:
            return invalid("body.pod.diskSize", "outside the offer's range")
        usd = match[0]["prices"]["onDemand"] + max(0, (size or 0) - (disk["defaultCount"] or 0)) * DISK_USD
        if order.get("maxPrice") and usd > order["maxPrice"]:  # SkyPilot sends 0 if it has no price limit
            return error(400, "Price exceeds the maximum price")
        resources = Resources(gpu=order["gpuType"], gpu_count=order["gpuCount"], interruptible=match[0]["isSpot"])
        try:
            made = self.rent(order.get("name") or "", resources, order=order, provider=provider, team=team, usd=usd)
        except NoCapacity:
            return error(400, "The selected configuration is no longer available")
        return Reply(200, self.pod(made))

    @route("GET", "/pods/history", query=f"{LIST} sort_by sort_order")
    def history(self, request: Request, at: Mapping[str, str]) -> Reply:
        gone = [i for ident in self.own if (i := self.see(ident)) is not None and not alive(i)]
        return self.page(request, [self.past(i) for i in gone])

    @route("GET", "/pods/status", query="pod_ids")
    def pod_status(self, request: Request, at: Mapping[str, str]) -> Reply:
        pods = [self.pod(self.need(ident)) for ident in request.query.get("pod_ids", "").split(",") if ident]
        names = (
            "providerType",
            "status",
            "sshConnection",
            "ip",
            "installationStatus",
            "installationFailure",
            "priceHr",
        )
        return Reply(200, {"data": [{"podId": pod["id"], **{n: pod[n] for n in names}} for pod in pods]})

    @route("GET", "/pods/{id}", query="")
    def get_pod(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, self.pod(self.need(at["id"])))

    @route("DELETE", "/pods/{id}", query="")
    def delete_pod(self, request: Request, at: Mapping[str, str]) -> Reply:
        i = self.need(at["id"])
        self.cloud.terminate(i.id)
        return Reply(200, {"status": "DELETING"})

    def need(self, ident: str) -> Instance:
        found = self.see(ident)
        if not alive(found):
            raise Refuse(error(404, f"Pod {ident} not found"))
        assert found is not None
        return found

    def pod(self, i: Instance) -> dict[str, Any]:
        own = self.own[i.id]
        host, port = self.address(i.id)
        running = i.state is _S.RUNNING
        address = f"root@{host} -p {port}" if self.ssh is None else self.ssh
        return {
            "id": i.id,
            "userId": f"user{self.user}",
            "teamId": own.get("team"),
            "name": own["label"],
            "type": "HOSTED",
            "providerType": own["provider"],
            "gpuName": own["order"]["gpuType"],
            "gpuCount": own["order"]["gpuCount"],
            "socket": own["order"].get("socket", "PCIe"),
            "priceHr": own.get("usd", i.price_usd_per_hour),
            "stoppedPriceHr": 0.005,
            "status": self.statuses.get(i.id, STATUS[i.state]),
            "installationStatus": "PENDING" if i.id in self.installing or not running else "FINISHED",
            "installationFailure": None,
            "createdAt": self.iso(i.created_at),
            "sshConnection": address if running else [None],
            "ip": host if running else None,
            "environmentType": own["order"].get("image", "ubuntu_22_cuda_12"),
            "isSpot": own["order"].get("cloudId", "").endswith("-spot"),
            "resources": {"memory": 200, "disk": own["order"].get("diskSize"), "vcpus": 26, "shared_disk": None},
            **self.odd.get(i.id, {}),
        }

    def past(self, i: Instance) -> dict[str, Any]:
        pod = self.pod(i)
        shared = ("id", "name", "providerType", "createdAt", "gpuName", "gpuCount", "priceHr", "userId", "teamId")
        rest = {"type": "Instance", "terminatedAt": self.iso(self.clock.now()), "totalBilledPrice": i.cost_usd}
        return {**{n: pod[n] for n in shared}, **rest}

    # --------------------------------------------------------------------------------------------------------- offers

    def offers(self) -> list[dict[str, Any]]:
        plain = [self.offer(gpu, n, spot=spot) for gpu in self.prices for n in (1, 2, 8) for spot in (False, True)]
        return [*self.more, *plain]

    def offer(self, gpu: str, count: int, *, spot: bool = False, **changes: Any) -> dict[str, Any]:
        usd = self.prices[gpu] * count * (0.5 if spot else 1)
        return {
            "cloudId": f"{gpu}-{count}{'-spot' if spot else ''}",
            "gpuType": gpu,
            "socket": "PCIe",
            "provider": "runpod",
            "region": "united_states",
            "dataCenter": "US-1",
            "country": "US",
            "gpuCount": count,
            "gpuMemory": int(gpu.rpartition("_")[2].removesuffix("GB")),
            "disk": spec(100, 50, 1000, DISK_USD),
            "sharedDisk": spec(None),
            "vcpu": spec(26 * count),
            "memory": spec(200 * count),
            "internetSpeed": None,
            "interconnect": None,
            "interconnectType": None,
            "provisioningTime": 5,
            "stockStatus": "Available",
            "security": "secure_cloud",
            "prices": {"onDemand": usd, "communityPrice": None, "isVariable": False, "currency": "USD"},
            "images": ["ubuntu_22_cuda_12", "cuda_12_4_pytorch_2_6"],
            "isSpot": spot,
            "prepaidTime": None,
            **changes,
        }

    @route("GET", "/availability/gpus", query=FILTERS)
    def availability(self, request: Request, at: Mapping[str, str]) -> Reply:
        same = {"gpu_count": "gpuCount", "gpu_type": "gpuType", "socket": "socket", "security": "security",
                "data_center_id": "dataCenter", "cloud_id": "cloudId"}  # fmt: skip
        wanted = [(same[name], value) for name, value in request.query.items() if name in same]
        rows = [] if self.full() else [o for o in self.offers() if all(str(o[n]) == value for n, value in wanted)]
        if regions := request.query.get("regions"):
            rows = [o for o in rows if o["region"] in regions.split(",")]
        page = int(request.query.get("page", 1))
        size = min(int(request.query.get("page_size", 100)), self.most_rows)
        return Reply(200, {"items": rows[(page - 1) * size : page * size], "totalCount": len(rows)})

    @route("GET", "/availability/multi-node", query=FILTERS)
    def multi_node(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"items": [], "totalCount": 0})

    @route("GET", "/availability/gpu-summary", query="")
    def summary(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {gpu: {"1": {"cheapest": None}} for gpu in self.prices})

    @route("GET", "/availability/disks", query="page page_size regions data_center_id cloud_id")
    def disk_offers(self, request: Request, at: Mapping[str, str]) -> Reply:
        row = {
            "cloudId": "US-1", "provider": "runpod", "dataCenter": "US-1", "country": "US", "region": "united_states",
            "spec": spec(100, 10, 4000, DISK_USD), "stockStatus": "Available", "security": "secure_cloud",
            "isMultinode": True,
        }  # fmt: skip
        return Reply(200, {"items": [row], "totalCount": 1})

    # ------------------------------------------------------------------------------------------- disks, keys, accounts

    @route("GET", "/disks", query=LIST)
    def disks(self, request: Request, at: Mapping[str, str]) -> Reply:
        return self.page(request, self.disk_rows)

    @route("POST", "/disks", query="", body="disk provider team")
    def add_disk(self, request: Request, at: Mapping[str, str]) -> Reply:
        asks, provider = request.body.get("disk") or {}, (request.body.get("provider") or {}).get("type")
        if set(asks) - {"size", "name", "country", "cloudId", "dataCenterId"} or not asks.get("size") or not provider:
            return invalid("body.disk", "unknown field, or the size or the provider is missing")
        now = self.iso(self.clock.now())
        usd = asks["size"] * DISK_USD
        row = {
            "id": f"disk{len(self.disk_rows)}", "name": asks.get("name") or "disk", "createdAt": now, "updatedAt": now,
            "terminatedAt": None, "status": "ACTIVE", "providerType": provider, "size": asks["size"],
            "info": {"country": asks.get("country"), "dataCenterId": asks.get("dataCenterId")}, "priceHr": usd,
            "stoppedPriceHr": usd, "provisioningPriceHr": 0, "userId": f"user{self.user}",
            "teamId": (request.body.get("team") or {}).get("teamId"), "walletId": "w1", "pods": [], "clusters": [],
        }  # fmt: skip
        self.disk_rows.append(row)
        return Reply(200, row)

    def disk(self, ident: str) -> dict[str, Any]:
        found = next((d for d in self.disk_rows if d["id"] == ident), None)
        if found is None:
            raise Refuse(error(404, f"Disk {ident} not found"))
        return found

    @route("GET", "/disks/{id}", query="")
    def get_disk(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, self.disk(at["id"]))

    @route("PATCH", "/disks/{id}", query="", body="name")
    def rename_disk(self, request: Request, at: Mapping[str, str]) -> Reply:
        found = self.disk(at["id"])
        found["name"] = request.body["name"]
        return Reply(200, found)

    @route("DELETE", "/disks/{id}", query="")
    def delete_disk(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.disk_rows.remove(self.disk(at["id"]))
        return Reply(200, {"status": "DELETING"})

    @route("GET", "/billing/wallet", query=f"{LIST} teamId")
    def wallet(self, request: Request, at: Mapping[str, str]) -> Reply:
        team = request.query.get("teamId")
        if team not in {None, *self.teams}:
            return error(403, "Not a member of this team")
        money = self.money if team is None else self.team_money
        reply = {"wallet_id": "w1", "balance_usd": money, "currency": "USD", "total_billings": 0}
        return Reply(200, {**reply, "recent_billings": [], "team_id": team})

    @route("GET", "/user/whoami", query="teamId")
    def whoami(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"data": {"id": f"user{self.user}", "email": "me@example.com", "name": "Me", "scope": {}}})

    @route("GET", "/user/teams", query=LIST)
    def list_teams(self, request: Request, at: Mapping[str, str]) -> Reply:
        rest = {"name": "Team", "slug": "team", "role": "ADMIN", "createdAt": self.iso(0)}
        return self.page(request, [{"teamId": team, **rest} for team in self.teams])

    @route("GET", "/ssh_keys", query=LIST)
    def ssh_keys(self, request: Request, at: Mapping[str, str]) -> Reply:
        return self.page(request, self.keys)

    @route("POST", "/ssh_keys", query="", body="name publicKey")
    def add_key(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.keys.append(self.key_row(request.body["name"], request.body["publicKey"]))
        return Reply(200, self.keys[-1])


def _take_key(account: PrimeAccount, machines: Machines) -> None:
    account.keys[1]["publicKey"] = machines.key


def _reports_no_instances(status: int, body: dict[str, Any]) -> bool:
    if status == 404:
        return isinstance(body.get("detail"), str)
    return body.get("data") == [] and body.get("total_count", 1) <= 0


PLATFORM = Platform(
    name="prime-intellect", account=PrimeAccount, provider=PrimeIntellect, taken="gone", take_key=_take_key,
    creates=r"^POST /pods/$",
    lists=r"^GET /pods/$",
    gets=r"^GET /pods/[^/]+$",
    ends=r"^DELETE /pods/",
    gets_balance=r"^GET /billing/wallet$",
    reports_no_instances=_reports_no_instances,
    spec=("prime-intellect.openapi.yaml", "/api/v1"),
    gaps=("status 404",),  # the description has no reply for it
    facts={
        "rests": ["terminate"], "bills": [], "bills_with_durable_storage": [],
        "reversible": [], "by_hand": False, "spot": True,
        "survives": [
            {"path": "/srv/x", "lives": "nnny"},
        ],
    },
    hasty=(
        "prime pods terminate 7f3a",
        "prime pods terminate 7f3a --yes",
        'timeout 60s prime pods terminate --plain --yes "$pod_id"',
        'uvx prime pods terminate "$POD" --yes',
        "prime sandbox delete sb-1",
    ),
    innocent=(
        "prime pods list",
        "prime pods status 7f3a",
        "prime pods create --id abc --name terminate-test",
        "prime availability list --gpu-type H100_80GB",
        "prime pods create --id h100_1",
    ),
)  # fmt: skip
