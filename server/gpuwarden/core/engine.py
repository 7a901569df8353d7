"""An engine's queues and limits, and a job's request to the engine, in the form that rules read.

An engine is an existing scheduler, such as Slurm, Kubernetes or Ray. It decides where and when a job runs. A field that
the engine did not report is None. None never means "no limit"; a field without a limit is `UNLIMITED`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

from pydantic import Field, ValidationError

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Frozen
from gpuwarden.core.sanitize import line

UNLIMITED: Final = 2**31
"""The value of a limit that the engine reports as unlimited."""

Image = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,499}$")]
"""The name of a container image or a machine image. It contains no character that an engine parses as a variable
or as a separator."""

_Options = TypeVar("_Options", bound=Frozen)


def engine_options(options: type[_Options], given: object, engine: str) -> _Options:
    """Return a job's options for an engine. Raises BadRequest if one is invalid; the fix lists the valid options."""
    try:
        return options.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("options", *map(str, first["loc"])))
        message, valid = first["msg"].removeprefix("Value error, "), ", ".join(options.model_fields)
        raise BadRequest(f"{line(where, 80)}: {message}", f"{engine} accepts {valid}.") from None


class Queue(Frozen):
    """An engine's queue, such as a Slurm partition. `open` is False if it currently does not accept or start jobs.

    `preempts` is the action that the engine takes on the queue's jobs to make room for other jobs. `gpus` maps each GPU
    type to the number per machine; the type is "" if the engine does not report it. `accounts` and `qos` are the values
    that the queue admits, or None if it admits all; `own_qos` is the QOS whose limits apply to all of the queue's jobs.
    """

    name: str
    default: bool = False
    open: bool | None = None
    state: str = ""
    max_s: int | None = None
    default_s: int | None = None
    max_nodes: int | None = None
    nodes: int | None = None
    cpus: int | None = None
    memory_mb: int | None = None
    gpus: dict[str, int] | None = None
    preempts: Literal["no", "requeue", "cancel", "suspend"] | None = None
    grace_s: int | None = None
    accounts: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None
    own_qos: str = ""


class EngineRequest(Frozen):
    """A job's request to the engine. "" and None mean the engine's default."""

    queue: str = ""
    account: str = ""
    qos: str = ""
    walltime_s: int | None = None
    nodes: int = 1
    cpus: int | None = None
    memory_mb: int | None = None
    gpu: str = ""
    gpus: int = 0
    tasks: int = 1
    """Number of tasks in an array; 1 for a plain job."""

    def of_machine(self, resource: str) -> int:
        """Return the minimum amount of a resource per machine.

        If the engine chooses the amount, the minimum is 0, or 1 for CPUs.
        """
        kind = resource.removeprefix("gres/gpu").removeprefix(":").lower()
        if resource.startswith("gres/gpu"):
            return self.gpus if kind in ("", self.gpu.lower()) else 0
        return {"cpu": self.cpus or 1, "node": 1, "mem": self.memory_mb or 0}.get(resource, 0)


class Ceiling(Frozen):
    """One limit that an engine's accounting sets on a job, and the current usage.

    `kind` is the limited quantity: the number of queued or running jobs, the run time of a job in seconds, the amount
    of a resource per job or per machine, or resource-minutes, for one job or for all jobs of `owner` together.
    `resource` is Slurm's name, such as `cpu`, `mem` in MB, `node` or `gres/gpu:a100`, or `wall` for run time regardless
    of resources. `used` is 0 for limits that apply to each job separately.
    """

    owner: str
    kind: Literal["submitted", "running", "walltime", "job", "machine", "minutes", "job_minutes"]
    most: int
    used: int = 0
    resource: str = ""

    def wanted(self, request: EngineRequest) -> int:
        """Return the minimum amount of the limited quantity that the job uses.

        Values that the engine chooses count as 0 or 1.
        """
        if self.kind in ("submitted", "running"):
            return request.tasks
        if self.kind == "walltime":
            return request.walltime_s or 0
        minutes = max((request.walltime_s or 0) // 60, 1)
        if self.resource == "wall":
            return minutes
        each = request.of_machine(self.resource)
        if self.kind == "machine":
            return each
        return each * request.nodes * (minutes if self.kind in ("minutes", "job_minutes") else 1)

    @property
    def left(self) -> int:
        """Return the unused amount."""
        return max(self.most - self.used, 0)

    def exceeded(self, request: EngineRequest) -> bool:
        """Return whether the job can never start under this limit.

        For a limit on running jobs, the current usage is ignored, because it decreases when jobs end.
        """
        return self.wanted(request) > self.left if self.kind != "running" else self.most == 0


class EngineLimits(Frozen):
    """An engine's limits, read before a job is submitted. `accounts` and `qos` are the user's own, or None if unknown.

    `ceilings` are the accounting limits that apply to this job. `unread` is the reason why some of the engine's limits
    could not be read. `refusal` is the engine's own message from a dry run of this job; it is empty if a ceiling
    already explains the refusal better.
    """

    engine: str
    version: str
    request: EngineRequest
    queues: tuple[Queue, ...]
    accounts: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None
    ceilings: tuple[Ceiling, ...] = ()
    max_array: int | None = None
    """The maximum number of tasks in an array."""
    requeue_s: float | None = None
    """Seconds during which a requeued job can't start again."""
    refusal: str = ""
    unread: str = ""

    @property
    def queue(self) -> Queue | None:
        """Return the job's queue; None if the engine has no queue with that name, or no default queue."""
        request = self.request.queue
        return next((q for q in self.queues if (q.name == request if request else q.default)), None)
