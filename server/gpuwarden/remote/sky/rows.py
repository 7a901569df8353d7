"""What the helper tells of clusters, jobs and costs, and the options of a task."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from pydantic import Field, ValidationError

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Frozen, Resources
from gpuwarden.core.sanitize import line

PREFIX: Final = "gw-"
_TOKEN: Final = re.compile(r"[A-Za-z0-9-]{0,59}[A-Za-z0-9]")
ANY_GPU: Final = frozenset({"any", "gpu"})


class Info(Frozen):
    """The API server, and as whom it is asked."""

    url: str
    version: str
    api: str
    user: str
    infra: tuple[str, ...]


class Plan(Frozen):
    """What SkyPilot would launch, and its price for an hour in US dollars where the catalog has one."""

    usd: float | None
    plan: str
    cloud: str
    stops: bool


class Launched(Frozen):
    """Whether a launch or a job was there already. `idle_minutes` None: its machine can't stop itself."""

    adopted: bool
    idle_minutes: int | None = None


class Cluster(Frozen):
    """One cluster. `hash` is its identity: a name is given again. `ids` are the machines' own at their cloud."""

    name: str
    hash: str
    status: str
    kind: str
    why: str
    cloud: str
    user: str
    launched_at: float
    nodes: int
    autostop: int
    to_down: bool
    controller: bool
    usd: float | None
    stops: bool | None
    ids: tuple[str, ...]


class ManagedJob(Frozen):
    """A job that SkyPilot's controller rents machines for, again and again where they are taken.

    `schedule` is DONE once the controller has nothing more to do for it, the end of its machine `cluster` included.
    """

    id: int
    name: str
    status: str
    schedule: str
    cloud: str
    where: str
    resources: str
    submitted_at: float | None
    started_at: float | None
    ended_at: float | None
    recoveries: int
    why: str
    cluster: str

    @property
    def over(self) -> bool:
        """Return whether its command will not run any more."""
        return self.status == "SUCCEEDED" or self.status == "CANCELLED" or self.status.startswith("FAILED")


class ManagedQueue(Frozen):
    """Managed jobs, the names of those on their way to the controller, and why other names have no job."""

    rows: tuple[ManagedJob, ...]
    sent: tuple[str, ...] = ()
    failed: dict[str, str] = {}


class Request(Frozen):
    """A launch that the server was asked for."""

    status: str
    live: bool
    at: float
    id: str


class Clusters(Frozen):
    """Clusters and, where one was named, its launches. `why` is what the newest of them failed with."""

    clusters: tuple[Cluster, ...]
    requests: tuple[Request, ...]
    why: str


class QueuedJob(Frozen):
    """One job of a cluster's queue."""

    id: int
    name: str | None
    status: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    resources: str


class JobQueue(Frozen):
    """A cluster's queue, and the names of the jobs on their way into it."""

    rows: tuple[QueuedJob, ...]
    sent: tuple[str, ...]


class Cost(Frozen):
    """What one cluster cost by SkyPilot's report. `live`: it is still in SkyPilot's list."""

    name: str
    hash: str
    usd: float | None
    seconds: float | None
    live: bool


class Log(Frozen):
    """A job's log."""

    text: str


class Done(Frozen):
    """Whether a verb was carried out already; it goes on in the API server otherwise."""

    done: bool


class SkyOptions(Frozen):
    """The options that only SkyPilot has. `region` and `zone` are the second and third part of its `infra`."""

    region: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,100}$")
    zone: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,100}$")
    instance_type: str | None = Field(default=None, max_length=100)
    cpus: str | None = Field(default=None, pattern=r"^\d{1,4}\+?$")
    memory: str | None = Field(default=None, pattern=r"^\d{1,5}\+?$")
    image: str | None = Field(default=None, max_length=300)
    managed: bool = False
    """Whether SkyPilot's jobs controller rents the machine, and again where it is taken: `sky-jobs/INFRA`."""


def read_options(options: dict[str, Any]) -> SkyOptions:
    """Return a job's options. Raises BadRequest for one that SkyPilot lacks."""
    try:
        return SkyOptions.model_validate(options)
    except ValidationError as error:
        at = ", ".join(line(".".join(map(str, e["loc"])), 60) for e in error.errors())
        known = ", ".join(SkyOptions.model_fields)
        raise BadRequest(f"options of sky can't be used: {at}", f"There are {known}.") from error


def cluster_name(token: str) -> str:
    """Return the name of a token's cluster. Raises BadRequest for a token that SkyPilot would not take."""
    if not _TOKEN.fullmatch(token):
        raise BadRequest(f"{line(token, 80)} can't be the name of a cluster", "Letters, digits and dashes are allowed.")
    return PREFIX + token


def token_of(name: str) -> str:
    """Return the token of a cluster's name; empty where it can't be one of ours, such as one with a path in it."""
    token = name.removeprefix(PREFIX)
    return token if name.startswith(PREFIX) and _TOKEN.fullmatch(token) else ""


def task(infra: str, resources: Resources) -> dict[str, Any]:
    """Return the task that launches a machine and runs nothing on it."""
    options = read_options(resources.options)
    given: dict[str, Any] = {
        "infra": "/".join(
            part for part in (infra, options.region or ("*" if options.zone else None), options.zone) if part
        ),
        "instance_type": options.instance_type,
        "cpus": options.cpus,
        "memory": options.memory,
        "image_id": options.image,
        "disk_size": resources.disk_gb,
        "use_spot": resources.interruptible or None,
    }
    gpu = resources.gpu
    if gpu is not None and gpu.lower() in ANY_GPU:
        raise BadRequest("SkyPilot has to be told which GPU", "Name one, as `sky gpus list` shows it.")
    given["accelerators"] = {gpu: resources.gpu_count} if gpu else None
    return {"name": "gpuwarden", "resources": {k: v for k, v in given.items() if v is not None}}


def minutes(seconds: int | None, default: int = 60) -> int:
    """Return the whole minutes after which a machine stops itself."""
    return default if seconds is None else max(1, math.ceil(seconds / 60))
