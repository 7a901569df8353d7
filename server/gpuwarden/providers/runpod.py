"""Provider `runpod`: Pods through REST v2.

| variable | meaning |
|---|---|
| `RUNPOD_API_KEY`, `RUNPOD_API_KEY_FILE` | the account's key; scope: read and write for Pods, read for the rest |
| `RUNPOD_IMAGE` | the container image for new Pods, which must start sshd |
| `RUNPOD_NETWORK_VOLUME` | id or name of the network volume for durable storage; default: `gpuwarden` |
| `RUNPOD_CLOUD` | SECURE, RunPod's own data centers (default), or COMMUNITY, third-party machines |

Only the older GraphQL API reports the balance and the account's id, and supports a stop date for a Pod. It requires
another key scope, and will be shut down early in 2027. It does not report whether the account is billed by invoice.
Pods are created through REST v2, without a stop date.

REST v2 supports neither price caps nor interruptible Pods; a cap is compared with the list price before a Pod is
created.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, cast

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, NoCapacity, NotFound, NotSupported, WardenError, nothing_sent
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Answer, Balance, Instance, InstanceState, Known, Quote, Resources, Unknown
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Severity
from gpuwarden.core.sanitize import line
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers._http import (
    Api,
    ApiClient,
    ApiResponse,
    Ident,
    ResponseModel,
    is_safe_id,
)
from gpuwarden.providers._rented import (
    DURABLE_NAME,
    Findings,
    HttpProvider,
    epoch,
    gpu_matches,
    no_such,
    positive_price,
)

_S = InstanceState
DEFAULT_IMAGE: Final = "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
CONTAINER_DISK_GB: Final = 50
VOLUME_DISK_GB: Final = 50
BALANCE: Final = "query { myself { clientBalance currentSpendPerHr } }"
WHOSE: Final = "query { myself { id } }"
Cloud = Literal["SECURE", "COMMUNITY"]
STATES: Final = {
    "PROVISIONING": _S.BOOTING,
    "STARTING": _S.BOOTING,
    "RUNNING": _S.RUNNING,
    "EXITED": _S.STOPPED,
    "ERROR": _S.FAILED,
    "TERMINATED": _S.GONE,
}
_CAPACITY = ("capacity", "available", "no longer any instances", "out of stock", "resources")


class _Endpoint(ResponseModel):
    host: str
    port: int
    username: str


class _Ssh(ResponseModel):
    direct: _Endpoint | None


class _Port(ResponseModel):
    private: int | None = None
    public: int | None = None


class _Runtime(ResponseModel):
    uptime: int | None = None
    ports: tuple[_Port, ...] = ()


class _Gpu(ResponseModel):
    count: int = 1


class _Pod(ResponseModel):
    id: Ident
    name: str
    status: Literal["PROVISIONING", "STARTING", "RUNNING", "EXITED", "ERROR", "TERMINATED"]
    cost: float
    locked: bool
    ssh: _Ssh
    runtime: _Runtime | None
    createdAt: datetime  # noqa: N815
    startedAt: datetime | None  # noqa: N815
    gpu: _Gpu | None = None


class _Pods(ResponseModel):
    pods: tuple[dict[str, Any], ...]


class _PodName(ResponseModel):
    """The fields that even an invalid row must have, so that no Pod is overlooked."""

    id: Ident
    name: str


class _Price(ResponseModel):
    secure: float
    community: float = 0.0

    def of(self, cloud: Cloud) -> float:
        """Return the value for a cloud."""
        return self.secure if cloud == "SECURE" else self.community


class _GpuType(ResponseModel):
    id: str
    name: str
    secure: bool
    community: bool = False
    price: _Price
    maxCount: _Price  # noqa: N815
    availability: Literal["NONE", "LOW", "MEDIUM", "HIGH"] | None = None


class _GpuTypes(ResponseModel):
    gpus: tuple[_GpuType, ...]


class _Volume(ResponseModel):
    id: str
    name: str
    dataCenter: str  # noqa: N815


class _Volumes(ResponseModel):
    networkVolumes: tuple[_Volume, ...]  # noqa: N815


class _Amounts(ResponseModel):
    totalAmount: float  # noqa: N815


class _BillMeta(ResponseModel):
    recordCount: int  # noqa: N815
    totals: _Amounts


class _Bill(ResponseModel):
    metadata: _BillMeta


class _Myself(ResponseModel):
    clientBalance: float  # noqa: N815
    currentSpendPerHr: float | None = None  # noqa: N815


class _Account(ResponseModel):
    myself: _Myself


class _Graph(ResponseModel):
    """A GraphQL reply. If it contains an error, all other fields are invalid, regardless of the HTTP status."""

    data: _Account
    errors: None = None


class _Owner(ResponseModel):
    id: Ident


class _Owned(ResponseModel):
    myself: _Owner


class _Whose(ResponseModel):
    data: _Owned
    errors: None = None


class _Keys(ResponseModel):
    keys: tuple[str, ...]


def _refusal(reply: ApiResponse, message: str) -> WardenError | None:
    """Map refusals to errors. A 404 counts as *not found* only if the body is the API's own problem document."""
    body = reply.json
    if (
        reply.status == 404
        and isinstance(body, dict)
        and body.get("status") == 404
        and isinstance(body.get("title"), str)
    ):
        return NotFound(f"RunPod did not find the requested object: {message}")
    return None


class RunPod(HttpProvider):
    """A `Provider` for one RunPod account."""

    name = "runpod"
    machine_options = frozenset({"image", "region"})
    api = Api(
        platform="RunPod",
        url="https://api.runpod.io/v2",
        url_variable="GPUWARDEN_RUNPOD_URL",
        key_variable="RUNPOD_API_KEY",
        refusal=_refusal,
        message_fields=("detail", "title"),
    )
    max_name = 128

    def __init__(self, profile: Profile, clock: Clock, env: dict[str, str] | None = None) -> None:
        super().__init__(profile, clock, env)
        self.graph = ApiClient(self.api, clock, self.env)
        self.graph.url = self.client.url.removesuffix("/v2")
        self._left: dict[str, tuple[str, int]] = {}
        """The SSH address that a Pod had before this process stopped it.

        The first replies after a restart repeat this address.
        """

    async def check_account(self) -> Findings:
        """Return an error finding if no public SSH key exists, because a Pod without a key is unreachable."""
        if self.ssh_key() is not None:
            return []
        answer = await self.client.ask("GET", "/account/ssh-keys", _Keys)
        if isinstance(answer, Known) and not answer.value.keys:
            message = "neither this machine nor the RunPod account has a public SSH key, so no Pod would be reachable"
            return [self.finding(Severity.ERROR, message, "Create one with `ssh-keygen -t ed25519`.")]
        return []

    async def ask_account(self) -> Answer[str]:
        """Return the id of the key's user."""
        answer = await self.graph.ask("POST", "/graphql", _Whose, body={"query": WHOSE}, safe=True)
        return answer if isinstance(answer, Unknown) else Known(answer.value.data.myself.id)

    async def quote(self, resources: Resources) -> Answer[Quote]:
        """Return the list price of the cheapest GPU type in stock."""
        answer = await self._offer(resources)
        if isinstance(answer, Unknown):
            return answer
        kind, cloud = answer.value, self._cloud(resources)
        where = ", Community Cloud" if cloud == "COMMUNITY" else ""
        return Known(
            Quote(
                platform=self.profile.id,
                price_usd_per_hour=_price(kind, resources, cloud),
                source="RunPod catalog, list price",
                at=self.clock.now(),
                note=f"{resources.gpu_count} x {kind.id}{where}; the volume disk is billed in addition",
            )
        )

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        """Rent a Pod with the cheapest GPU type in stock that meets the request."""
        with nothing_sent():
            label = self.label(token)
            offer = await self._offer(resources)
            if isinstance(offer, Unknown):
                return offer
            volume = await self._volume() if resources.durable_storage else Known(None)
            if isinstance(volume, Unknown):
                return volume
            region = self.option(resources, "region")
            if volume.value is not None and region not in {"", volume.value.dataCenter}:
                raise BadRequest(
                    f"the network volume is in {volume.value.dataCenter}, but the region is {line(region, 40)}",
                    do(Action.LEAVE_OUT_ARGUMENT, name="options"),
                )
        order = self._order(label, resources, offer.value, volume.value)
        try:
            answer = await self.client.ask("POST", "/pods", _Pod, body=order, creates=True)
        except BadRequest as refusal:
            if any(word in refusal.message.casefold() for word in _CAPACITY):
                raise NoCapacity(refusal.message, "Try another GPU, or try again later.") from None
            raise
        if isinstance(answer, Unknown):
            return answer
        made, cap = self._view(answer.value), resources.max_price_usd_per_hour
        if cap is not None and answer.value.cost > cap:
            made = made.model_copy(update={"why": f"{made.why}; its price exceeds the cap of {usd_per_hour(cap)}"})
        return Known(made)

    async def look_up(self, id: str) -> Answer[Instance | None]:  # noqa: A002
        """Return one Pod."""
        answer = await self.client.ask("GET", f"/pods/{id}", _Pod)
        return answer if isinstance(answer, Unknown) else Known(self._view(answer.value))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        """Return every Pod that is not gone, including Pods in clusters. RunPod's list has only one page."""
        answer = await self.client.ask("GET", "/pods", _Pods, params={"includeClusterPods": "true"})
        if isinstance(answer, Unknown):
            return answer
        rows = self.read_rows(answer.value.pods, _Pod, self._view, _PodName, lambda row: (row.id, row.name))
        return rows if isinstance(rows, Unknown) else Known(tuple(i for i in rows.value if i.state is not _S.GONE))

    async def balance(self) -> Answer[Balance]:
        """Return the account's credit, and the hourly cost of everything in the account."""
        answer = await self.graph.ask("POST", "/graphql", _Graph, body={"query": BALANCE}, safe=True)
        if isinstance(answer, Unknown):
            return answer
        user = answer.value.data.myself
        return Known(Balance(amount=user.clientBalance, per_hour=user.currentSpendPerHr))

    async def start(self, id: str) -> Answer[None]:  # noqa: A002
        """Start a stopped Pod. If another customer has rented its GPU, the Pod boots without a GPU."""
        return await self._act(id, "start")

    async def stop(self, id: str) -> Answer[None]:  # noqa: A002
        """Request a stop. Raises Conflict if the Pod is locked."""
        return await self._act(id, "stop")

    async def terminate(self, id: str) -> Answer[None]:  # noqa: A002
        """Request termination of a Pod and its volume disk."""
        if not is_safe_id(id):
            return Known(None)
        try:
            return await self.client.ask("DELETE", f"/pods/{id}", None)
        except NotFound:
            return Known(None)

    # ---------------------------------------------------------------------------------------------------- internal

    async def _act(self, id: str, action: str) -> Answer[None]:  # noqa: A002
        if not is_safe_id(id):
            raise no_such("RunPod", id)
        before = await self.client.ask("GET", f"/pods/{id}", _Pod)
        if isinstance(before, Known) and before.value.ssh.direct is not None:
            self._left[id] = (before.value.ssh.direct.host, before.value.ssh.direct.port)
        answer = await self.client.ask("POST", f"/pods/{id}/action", _Pod, body={"action": action})
        return answer if isinstance(answer, Unknown) else Known(None)

    async def _offer(self, resources: Resources) -> Answer[_GpuType]:
        """Return the cheapest GPU type in stock that meets the request.

        Raises BadRequest if the GPU is unknown, NoCapacity if no type meets the request.
        """
        asked, cloud = self.refuse_unsold(resources), self._cloud(resources)
        params: dict[str, str | int] = {
            "include": "AVAILABILITY",
            "product": "POD",
            "count": resources.gpu_count,
            "cloud": cloud,
        }
        answer = await self.client.ask("GET", "/catalog/gpus", _GpuTypes, params=params)
        if isinstance(answer, Unknown):
            return answer
        kinds = [k for k in answer.value.gpus if gpu_matches(asked, (k.id, k.name))]
        if not kinds:
            names = ", ".join(sorted(k.name for k in answer.value.gpus)[:30])
            raise BadRequest(f"RunPod has no GPU called {asked!r}", f"Known GPUs: {names}.")
        cap = resources.max_price_usd_per_hour
        fitting = [
            k
            for k in kinds
            if (k.secure if cloud == "SECURE" else k.community)
            and k.maxCount.of(cloud) >= resources.gpu_count
            and k.availability != "NONE"
            and (cap is None or (_price(k, resources, cloud) or cap + 1) <= cap)
        ]
        if not fitting:
            limit = "" if cap is None else f" at {usd_per_hour(cap)} or less"
            raise NoCapacity(f"RunPod has no {resources.gpu_count} x {asked}{limit} in stock", "Try again later.")
        prices = {k.id: _price(k, resources, cloud) for k in fitting}
        return Known(min(fitting, key=lambda k: (prices[k.id] is None, prices[k.id] or 0.0, k.id)))

    def _cloud(self, resources: Resources) -> Cloud:
        """Return the cloud to rent from. Raises BadRequest if RUNPOD_CLOUD is invalid, NotSupported if it is
        unsuitable.
        """
        cloud = (self.env.get("RUNPOD_CLOUD") or "SECURE").upper()
        if cloud not in {"SECURE", "COMMUNITY"}:
            raise BadRequest(f"RUNPOD_CLOUD is {cloud!r}", "Set it to SECURE or COMMUNITY.")
        if cloud == "COMMUNITY" and self.option(resources, "region"):
            raise NotSupported("RunPod lets you choose a data center only in its Secure Cloud", "Unset RUNPOD_CLOUD.")
        if cloud == "COMMUNITY" and resources.durable_storage:
            raise NotSupported("RunPod's network volumes exist only in its Secure Cloud", "Unset RUNPOD_CLOUD.")
        return cast("Cloud", cloud)

    async def _volume(self) -> Answer[_Volume | None]:
        """Return the network volume for durable storage. Raises BadRequest unless there is exactly one."""
        wanted = self.env.get("RUNPOD_NETWORK_VOLUME") or DURABLE_NAME
        answer = await self.client.ask("GET", "/network-volumes", _Volumes)
        if isinstance(answer, Unknown):
            return answer
        found = [v for v in answer.value.networkVolumes if wanted in {v.id, v.name}]
        if len(found) != 1:
            raise BadRequest(
                f"RunPod has {len(found)} network volumes called {wanted!r}, but durable storage needs exactly one",
                "Create a volume with that name, or set RUNPOD_NETWORK_VOLUME to a volume's id.",
            )
        return Known(found[0])

    def _order(self, label: str, resources: Resources, kind: _GpuType, volume: _Volume | None) -> dict[str, object]:
        tier = self.durable_tier()
        order: dict[str, object] = {
            "name": label,
            "image": self.option(resources, "image", "RUNPOD_IMAGE") or DEFAULT_IMAGE,
            "cloud": self._cloud(resources),
            "gpu": {"id": kind.id, "count": resources.gpu_count},
            "disk": CONTAINER_DISK_GB,
            "ports": ["22/tcp"],
            "startSsh": True,
        }
        if key := self.ssh_key():
            order["env"] = {"PUBLIC_KEY": key}
        if volume is not None and tier is not None:
            order["mounts"] = {"network": [{"volumeId": volume.id, "path": tier.path}]}
            order["dataCenterIds"] = [volume.dataCenter]
        else:
            order |= {"dataCenterIds": [region]} if (region := self.option(resources, "region")) else {}
            size = max(10, resources.disk_gb or VOLUME_DISK_GB)
            order["mounts"] = {"persistent": {"size": size, "path": "/workspace"}}
        return order

    def _view(self, pod: _Pod) -> Instance:
        state = STATES[pod.status]
        why = f"status {pod.status}"
        place = None
        if state is _S.RUNNING:
            if pod.ssh.direct is None or self._stale(pod):
                why += "; its SSH address is not known yet"
            else:
                place = self.place(pod.id, pod.ssh.direct.host, pod.ssh.direct.port, pod.ssh.direct.username)
            if pod.gpu is None or pod.gpu.count == 0:
                why += "; it runs without a GPU"
        if pod.locked:
            why += "; locked"
        return Instance(
            id=pod.id,
            token=self.token_in(pod.name),
            state=state,
            place=place,
            meter=_meter(state, pod.cost),
            price_usd_per_hour=positive_price(pod.cost),
            created_at=epoch(pod.createdAt),
            why=why,
        )

    def _stale(self, pod: _Pod) -> bool:
        """Return whether the reported SSH address is outdated.

        A restart changes the port, but the first replies repeat the old port.
        """
        direct, runtime = pod.ssh.direct, pod.runtime
        if direct is None or runtime is None:
            return True
        mapped = {p.public for p in runtime.ports if p.private == 22}
        if mapped and direct.port not in mapped:
            return True
        ran = self.clock.now() - (epoch(pod.startedAt) or 0.0)
        if runtime.uptime is not None and runtime.uptime > ran + 60:
            return True  # the reported uptime belongs to an earlier start
        if self._left.get(pod.id) == (direct.host, direct.port) and ran < self.settle_s:
            return True
        self._left.pop(pod.id, None)
        return False

    async def bill(self, id: str, token: str) -> Instance | None:  # noqa: A002
        """Return a Pod that is gone, with its bill, or None if RunPod has no bill for it."""
        days = {"bucketSize": "day", "lastN": "365"}  # without a period, RunPod returns only the last 30 days
        try:
            answer = await self.client.ask("GET", "/billing/pods", _Bill, params={"podId": id, **days})
        except WardenError:
            return None
        if isinstance(answer, Unknown) or not answer.value.metadata.recordCount:
            return None
        cost = answer.value.metadata.totals.totalAmount
        return Instance(
            id=id, token=token, state=_S.GONE, meter=False, cost_usd=cost, why="RunPod reports only the Pod's bill"
        )


def _price(kind: _GpuType, resources: Resources, cloud: Cloud) -> float | None:
    each = positive_price(kind.price.of(cloud))
    return each * resources.gpu_count if each is not None else None


def _meter(state: InstanceState, cost: float) -> bool | None:
    """Return whether compute is billed; None if unknown. A stopped Pod counts as billed while it has a cost."""
    if state is _S.GONE:
        return False
    if state is _S.STOPPED:
        return cost > 0
    return True if cost > 0 or state is _S.RUNNING else None


ACCOUNT_KEYS: Final = (RunPod.api.key_variable, "RUNPOD_AI_API_KEY")
SHELL_GUARD: Final = ShellGuard(
    ends={
        "runpodctl": (
            "remove|delete|stop",
            "pod|pods remove|delete|stop|terminate|reset",
            "serverless|sls delete|remove",
            "network-volume|nv delete|remove",
        )
    },
    remote={"runpodctl": ("exec|ssh",)},
    hosts=("runpod.io", "runpod.ai"),
    requests=(r"pod(?:Terminate|Stop|Reset)", r"/(?:stop|reset)\b", r"delete(?:Endpoint|NetworkVolume|Pod)"),
    code=(r"\brunpod\.(?:terminate|stop)_pod\b", r"\brunpod\.delete_\w+"),
    servers=("runpod",),
)


def create(profile: Profile, state: Path, clock: Clock) -> RunPod:
    """Return the provider for one profile. The provider stores no files."""
    return RunPod(profile, clock)
