"""Models for the helper's replies about clusters, jobs and costs, and for a task's options."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Final

from pydantic import Field

from gpuwarden.core.engine import engine_options
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Frozen, Resources
from gpuwarden.core.sanitize import line

PREFIX: Final = "gw-"
_TOKEN: Final = re.compile(r"[A-Za-z0-9-]{0,59}[A-Za-z0-9]")
ANY_GPU: Final = frozenset({"any", "gpu"})


class Info(Frozen):
    """The API server, and the user who is logged in to it."""

    url: str
    version: str
    api: str
    user: str
    infra: tuple[str, ...]


class Plan(Frozen):
    """SkyPilot's plan for a launch, and its price per hour in US dollars if the catalog has one."""

    usd: float | None
    plan: str
    cloud: str
    stops: bool


class Launched(Frozen):
    """The result of a launch.

    `adopted` is true if the cluster or job already existed. `idle_minutes` is None if no self-stop is set.
    """

    adopted: bool
    idle_minutes: int | None = None


class Cluster(Frozen):
    """One cluster. `hash` identifies it, because names are reused. `ids` lists its machines' ids in the cloud."""

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
    """A managed job: SkyPilot's controller rents its machines, and replaces them if they are preempted.

    `schedule` is DONE once the controller has finished all work for the job and has terminated its machine (`cluster`).
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
        """Return whether the job has ended, so that its command will not run again."""
        return self.status == "SUCCEEDED" or self.status == "CANCELLED" or self.status.startswith("FAILED")


class ManagedQueue(Frozen):
    """Managed jobs, the names of jobs being submitted, and the errors from failed submissions, keyed by job name."""

    rows: tuple[ManagedJob, ...]
    sent: tuple[str, ...] = ()
    failed: dict[str, str] = {}


class Request(Frozen):
    """A launch request to the server."""

    status: str
    live: bool
    at: float
    id: str


class Clusters(Frozen):
    """Clusters and, if only one was requested, its launches. `why` is the error from the newest launch."""

    clusters: tuple[Cluster, ...]
    requests: tuple[Request, ...]
    why: str


class QueuedJob(Frozen):
    """One job in a cluster's queue."""

    id: int
    name: str | None
    status: str
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    resources: str


class JobQueue(Frozen):
    """A cluster's queue, and the names of jobs being submitted to it."""

    rows: tuple[QueuedJob, ...]
    sent: tuple[str, ...]


class Cost(Frozen):
    """The cost of one cluster as reported by SkyPilot. `live` is true if the cluster is still in SkyPilot's list."""

    name: str
    hash: str
    usd: float | None
    seconds: float | None
    live: bool


class Log(Frozen):
    """The end of a job's log. `missing` is the number of bytes omitted before it."""

    text: str
    missing: int = 0


class Done(Frozen):
    """Whether a request has completed. If not, it continues on the API server."""

    done: bool


_CloudName = Annotated[str, Field(max_length=300, pattern=r"^[A-Za-z0-9/]([A-Za-z0-9._:/@+|-]|\$_)*$")]
"""The name of an image or machine type in any cloud: Azure images begin with `/`, and Oracle types contain `$_`."""


class SkyOptions(Frozen):
    """The SkyPilot-specific options. `region` and `zone` become the second and third parts of SkyPilot's `infra`."""

    region: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,100}$")
    zone: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,100}$")
    instance_type: _CloudName | None = None
    cpus: str | None = Field(default=None, pattern=r"^\d{1,4}\+?$")
    memory: str | None = Field(default=None, pattern=r"^\d{1,5}\+?$")
    image: _CloudName | None = None
    managed: bool = False
    """True if SkyPilot's jobs controller rents the machine and replaces it after a preemption: `sky-jobs/INFRA`."""


def read_options(options: dict[str, Any]) -> SkyOptions:
    """Return a job's options. Raises BadRequest for an unknown or invalid option."""
    return engine_options(SkyOptions, options, "SkyPilot")


def cluster_name(token: str) -> str:
    """Return the cluster name for a token. Raises BadRequest for a token that SkyPilot would not accept."""
    if not _TOKEN.fullmatch(token):
        raise BadRequest(f"{line(token, 80)} is not a valid cluster name", "Letters, digits and dashes are allowed.")
    return PREFIX + token


def token_of(name: str) -> str:
    """Return the token in a cluster's name; empty if gpuwarden did not create the name."""
    token = name.removeprefix(PREFIX)
    return token if name.startswith(PREFIX) and _TOKEN.fullmatch(token) else ""


def task(infra: str, resources: Resources) -> dict[str, Any]:
    """Return the task that launches a machine and runs no command."""
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
        raise BadRequest("SkyPilot requires a GPU name", "Choose one from `sky gpus list`.")
    given["accelerators"] = {gpu: resources.gpu_count} if gpu else None
    return {"name": "gpuwarden", "resources": {k: v for k, v in given.items() if v is not None}}


def minutes(seconds: int | None, default: int = 60) -> int:
    """Return the time after which a machine stops itself, in minutes, rounded up."""
    return default if seconds is None else max(1, math.ceil(seconds / 60))
