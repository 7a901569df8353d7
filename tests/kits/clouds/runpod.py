"""Emulator of RunPod's REST v2 and older GraphQL APIs, as used by the provider and other clients, with their traps.

REST follows the published description: parameters and fields that it lacks are refused. REST v1 is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clouds.base import Refuse, Reply, Request, alive, route
from clouds.platform import Platform
from clouds.runpod_graph import STATUS, OlderInterface, displayed
from clouds.runpod_schema import DATA_CENTER
from gpuwarden.core.errors import Conflict, NoCapacity, NotFound
from gpuwarden.core.models import Instance, InstanceState, Resources
from gpuwarden.providers.runpod import RunPod

_S = InstanceState
ACTIONS = {
    "RUNNING": ["stop", "restart", "terminate"],
    "EXITED": ["start", "terminate"],
    "ERROR": ["start", "terminate"],
    "PROVISIONING": ["stop", "terminate"],
    "STARTING": ["stop", "terminate"],
    "TERMINATED": [],
}
CREATE_FIELDS = {
    "name", "image", "args", "disk", "ports", "env", "registry", "cloud", "cpu", "gpu", "dataCenterIds",
    "globalNetworking", "mounts", "startJupyter", "startSsh", "templateId",
    "entrypoint", "cmd",  # newer than the description, as are the last two of GPU_FIELDS; dstack sends them
}  # fmt: skip
GPU_FIELDS = {"id", "count", "allowedCudaVersions", "minCudaVersion", "minRamPerGpu", "minVcpuCountPerGpu"}
PARAMETERS = {
    "/pods": {"includeClusterPods"},
    "/catalog/gpus": {"include", "product", "count", "cloud", "countryCodes", "cudaVersions", "minCudaVersion"},
    "/billing/pods": {"startTime", "endTime", "bucketSize", "lastN", "podId"},
}


def problem(status: int, title: str, detail: str, **more: Any) -> Reply:
    return Reply(status, {"title": title, "status": status, "detail": detail, **more}, type="application/problem+json")


class RunPodCloud(OlderInterface):
    """An account with a network volume and one cluster Pod, which plain lists hide."""

    profile_id = "runpod"
    stale_ready_s = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ssh_keys: list[str] = ["ssh-ed25519 AAAA me@example.com"]
        self.volumes = [{"id": "vol1", "name": "gpuwarden", "size": 100, "dataCenter": "EU-RO-1", "type": "STANDARD"}]
        self.cluster_pods: list[str] = []
        self.spends: float | None = 0.0

    def unauthorized(self) -> Reply:
        return problem(401, "Unauthorized", "missing bearer token")

    def unknown_route(self, request: Request) -> Reply:
        if request.path.startswith("/v1/"):
            return problem(410, "Gone", "REST v1 was retired on 2026-11-15; use v2")
        return problem(404, "Not Found", "route not found")

    def undescribed(self, names: str) -> Reply:
        return problem(400, "Bad Request", f"unknown property {names}")

    def limited(self) -> Reply:
        reply = problem(429, "Too Many Requests", "rate limit exceeded for the minute window")
        reply.headers["Retry-After"] = "12"
        return reply

    def authorized(self, request: Request) -> bool:
        """Return whether a key is accepted. GPU prices are public in GraphQL; a wrong key is refused everywhere."""
        return super().authorized(request) or (request.path == "/graphql" and "authorization" not in request.headers)

    @staticmethod
    def parameters(request: Request) -> None:
        """Raise Refuse for a parameter that the description lacks."""
        if unknown := sorted(set(request.query) - PARAMETERS.get(request.path.rstrip("/"), set())):
            errors = [f"{name}: unknown parameter" for name in unknown]
            raise Refuse(problem(400, "Bad Request", "Request validation failed.", errors=errors))

    # ---------------------------------------------------------------------------------------------------------- pods

    @route("GET", "/pods")
    def list_pods(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.parameters(request)
        hidden = set() if request.query.get("includeClusterPods") == "true" else set(self.cluster_pods)
        return Reply(200, {"pods": [self.pod(i) for i in self.listed() if i.id not in hidden]})

    @route("POST", "/pods")
    def create_pod(self, request: Request, at: Mapping[str, str]) -> Reply:
        body = request.body
        extra = sorted(set(body) - CREATE_FIELDS)
        if extra or not body.get("name"):
            errors = [f"$: additional properties '{e}' not allowed" for e in extra] or ["$.name: required"]
            return problem(422, "Unprocessable Entity", "Request validation failed.", errors=errors)
        if ("gpu" in body) == ("cpu" in body) or "image" not in body:
            return problem(400, "Bad Request", "exactly one of gpu or cpu must be set")
        mounts = body.get("mounts", {})
        if "persistent" in mounts and "network" in mounts:
            return problem(400, "Bad Request", "mounts.persistent and mounts.network are mutually exclusive")
        if any("path" not in m for m in mounts.get("network", [])):
            return problem(422, "Unprocessable Entity", "Request validation failed.", errors=["path: required"])
        if set(body.get("gpu", {})) - GPU_FIELDS or body.get("cloud", "SECURE") not in {"SECURE", "COMMUNITY"}:
            return problem(422, "Unprocessable Entity", "Request validation failed.", errors=["$.gpu or $.cloud"])
        if body.get("cloud") == "COMMUNITY" and ("network" in mounts or body.get("dataCenterIds")):
            return problem(400, "Bad Request", "network volumes and data centers are of the secure cloud")
        try:
            return Reply(201, self.pod(self.deploy(body)))
        except NoCapacity:
            return problem(400, "Bad Request", "There are no longer any instances available with the requested specs")

    def deploy(self, order: dict[str, Any], **own: Any) -> Instance:
        """Rent a Pod. Raises NoCapacity."""
        gpu, count = order["gpu"]["id"], order["gpu"].get("count", 1)
        if gpu not in self.prices or count > (4 if order.get("cloud") == "COMMUNITY" else 8):
            raise NoCapacity("no such machine")
        resources = Resources(gpu=gpu, gpu_count=count, durable_storage="network" in order.get("mounts", {}))
        return self.rent(order["name"], resources, order=order, started=self.clock.now(), locked=False, **own)

    @route("GET", "/pods/{id}")
    def get_pod(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, self.pod(self.need(at["id"])))

    @route("PATCH", "/pods/{id}")
    def patch_pod(self, request: Request, at: Mapping[str, str]) -> Reply:
        pod = self.need(at["id"])
        self.own[pod.id]["locked"] = request.body.get("locked", self.own[pod.id]["locked"])
        return Reply(200, self.pod(pod))

    @route("DELETE", "/pods/{id}")
    def delete_pod(self, request: Request, at: Mapping[str, str]) -> Reply:
        pod = self.need(at["id"])
        if pod.id in self.cluster_pods:
            return problem(409, "Conflict", "pod belongs to a cluster")
        self.cloud.terminate(pod.id)
        return Reply(204)

    @route("POST", "/pods/{id}/action")
    def act(self, request: Request, at: Mapping[str, str]) -> Reply:
        pod, action = self.need(at["id"]), request.body.get("action")
        if action not in {"start", "stop", "restart", "terminate"} or set(request.body) != {"action"}:
            return problem(422, "Unprocessable Entity", "Request validation failed.", errors=["$.action: not allowed"])
        if action not in ACTIONS[STATUS[pod.state]]:
            return problem(409, "Conflict", f"action {action} is not valid for status {STATUS[pod.state]}")
        if action == "stop" and self.own[pod.id]["locked"]:
            return problem(409, "Conflict", "pod is locked")
        try:
            if action == "start":
                self.cloud.start(pod.id)
                self.own[pod.id] |= {"started": self.clock.now(), "old": self.address(pod.id)}
                self.booted(pod.id)
            elif action == "stop":
                self.cloud.stop(pod.id)
            elif action == "terminate":
                self.cloud.terminate(pod.id)
                return Reply(204)
        except (Conflict, NotFound) as error:
            return problem(409, "Conflict", error.message)
        return Reply(200, self.pod(self.need(pod.id)))

    def need(self, ident: str) -> Instance:
        found = self.see(ident)
        if not alive(found):
            raise Refuse(problem(404, "Not Found", "pod not found"))
        assert found is not None
        return found

    def pod(self, i: Instance) -> dict[str, Any]:
        own, status = self.own[i.id], STATUS[i.state]
        order = own["order"]
        running = status == "RUNNING"
        new = host, port = self.address(i.id)
        if running and self.clock.now() - own["started"] < self.stale_ready_s and own.get("old"):
            host, port = own["old"]  # the first RUNNING after a start still shows the old mapping
        direct = {"host": host, "port": port, "username": "root", "command": f"ssh root@{host} -p {port}"}
        proxy = {"host": "ssh.runpod.io", "port": 22, "username": f"{i.id}-64411eb2", "command": "ssh ..."}
        ports = [{"private": 22, "public": new[1] if (host, port) == new else port, "type": "tcp", "ip": host}]
        return {
            "id": i.id,
            "name": own["label"],
            "image": order["image"],
            "args": "",
            "disk": order.get("disk", 50),
            "ports": order.get("ports", []),
            "env": order.get("env", {}),
            "registry": None,
            "status": status,
            "actions": ACTIONS[status],
            "mounts": order.get("mounts", {}),
            "gpu": {"id": order["gpu"]["id"], "count": order["gpu"].get("count", 1)},
            "cloud": order.get("cloud", "SECURE"),
            "dataCenterId": DATA_CENTER if order.get("cloud", "SECURE") == "SECURE" else None,
            "cudaVersion": "12.8",
            "ssh": {"proxy": proxy, "direct": direct if running and "22/tcp" in order.get("ports", []) else None},
            "template": None,
            "cost": 0.0 if status in {"EXITED", "TERMINATED"} else self.usd(i),
            "locked": own["locked"],
            "globalNetworking": {"enabled": False},
            "runtime": {"uptime": int(self.clock.now() - own["started"]), "ports": ports} if running else None,
            "createdAt": self.iso(i.created_at),
            "startedAt": self.iso(own["started"]),
        }

    def usd(self, i: Instance) -> float | None:
        """Return a Pod's hourly price, which is halved in the community cloud."""
        half = self.own[i.id]["order"].get("cloud") == "COMMUNITY"
        return i.price_usd_per_hour / 2 if half and i.price_usd_per_hour else i.price_usd_per_hour

    # ------------------------------------------------------------------------------------------------------- the rest

    @route("GET", "/catalog/gpus")
    def gpu_types(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.parameters(request)
        if (request.query.get("include") == "AVAILABILITY") != ("product" in request.query):
            return problem(400, "Bad Request", "include=AVAILABILITY and product go together")
        if request.query.get("cloud", "SECURE") not in {"SECURE", "COMMUNITY"}:
            return problem(422, "Unprocessable Entity", "Request validation failed.", errors=["cloud"])
        full = self.cloud.settings.capacity == 0
        kinds = [
            {
                "id": name,
                "name": displayed(name),
                "pool": None,
                "manufacturer": "NVIDIA",
                "memory": 80,
                "secure": True,
                "community": True,
                "price": {"secure": usd, "community": usd / 2},
                "maxCount": {"secure": 8, "community": 4},
                "availability": "NONE" if full else "HIGH",
            }
            for name, usd in self.prices.items()
        ]
        return Reply(200, {"gpus": kinds})

    @route("GET", "/network-volumes")
    def network_volumes(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"networkVolumes": self.volumes})

    @route("GET", "/account/ssh-keys")
    def keys(self, request: Request, at: Mapping[str, str]) -> Reply:
        return Reply(200, {"keys": self.ssh_keys})

    @route("GET", "/billing/pods")
    def billing(self, request: Request, at: Mapping[str, str]) -> Reply:
        self.parameters(request)
        ident = request.query.get("podId", "")
        pod = self.see(ident) if ident in self.own else None
        cost = (pod.cost_usd or 0.0) if pod else 0.0
        amounts = {"totalAmount": cost, "gpuAmount": cost, "cpuAmount": 0, "diskAmount": 0}
        span = {"startTime": self.iso(0), "endTime": self.iso(self.clock.now())}
        records = [{**span, "podId": ident, **amounts}] if pod else []
        query = {**span, "bucketSize": request.query.get("bucketSize", "day"), "podId": ident}
        meta = {"query": query, "recordCount": len(records), "uniquePodCount": len(records), "totals": amounts}
        return Reply(200, {"records": records, "metadata": meta})


PLATFORM = Platform(
    name="runpod", account=RunPodCloud, provider=RunPod, taken="stopped",
    creates=r"^POST /(pods$|graphql mutation)",
    lists=r"^GET /pods$",
    gets=r"^GET /pods/",
    ends=r"^DELETE /pods/",
    gets_balance=r"^POST /graphql query$",
    reports_no_instances=lambda status, body: body.get("status") == 404 if status == 404 else body.get("pods") == [],
    spec=("runpod-v2.openapi.json", "/v2"),
    gaps=("POST /graphql query: no such route",),  # the older interface
    durable="out",
    facts={
        "rests": ["stop", "terminate"], "bills": ["stop"], "bills_with_durable_storage": ["stop", "terminate"],
        "reversible": ["stop"], "by_hand": False, "spot": False,
        "survives": [
            {"path": "/opt/x", "lives": "nnny"},
            {"path": "/opt/x", "durable": True, "lives": "nnny"},
            {"path": "/workspace/x", "lives": "ynny"},
            {"path": "/workspace/x", "durable": True, "lives": "yyyy"},
            {"path": "/workspaces/x", "durable": True, "lives": "nnny"},
        ],
    },
)  # fmt: skip
