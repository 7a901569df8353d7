"""What an engine decides about a job: its queues, its limits, and what was asked of it. Rules read these values.

An engine is a scheduler that exists already, such as Slurm, Kubernetes or Ray. It decides where and when a job runs.
A field that the engine did not answer is None, which is never read as "no limit": `UNLIMITED` says that.
"""

from __future__ import annotations

from typing import Final, Literal

from gpuwarden.core.models import Frozen

UNLIMITED: Final = 2**31
"""A limit that the engine says it does not have."""


class Queue(Frozen):
    """One queue of an engine, such as a partition of Slurm. `open` is False where it takes or starts no jobs now.

    `preempts` is what happens to its jobs for the sake of others; `gpus` has the GPUs of one machine by type, "" for
    those whose type the engine does not name. `accounts` and `qos` are those that it admits, None for all; `own_qos` is
    the QOS whose limits count for all of its jobs.
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


class Asked(Frozen):
    """A job as the engine will get it. "" and None leave it to the engine's default."""

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
    """How many tasks an array has; 1 for a plain job."""

    def of_machine(self, resource: str) -> int:
        """Return what it asks of each machine, at the least: 0 for what is left to the engine."""
        kind = resource.removeprefix("gres/gpu").removeprefix(":").lower()
        if resource.startswith("gres/gpu"):
            return self.gpus if kind in ("", self.gpu.lower()) else 0
        return {"cpu": self.cpus or 1, "node": 1, "mem": self.memory_mb or 0}.get(resource, 0)


class Ceiling(Frozen):
    """One limit that an engine's accounting sets on a job, and what counts against it already.

    `kind` is what it limits: jobs in the queue, jobs that run, seconds of one job, a resource of one job or of each of
    its machines, or minutes of a resource, of one job or over all jobs of `owner`. `resource` is Slurm's word, such as
    `cpu`, `mem` in MB, `node` or `gres/gpu:a100`, or `wall` for the time of jobs whatever they use. `used` is 0 for the
    limits of one job.
    """

    owner: str
    kind: Literal["submitted", "running", "walltime", "job", "machine", "minutes", "job_minutes"]
    most: int
    used: int = 0
    resource: str = ""

    def wanted(self, asked: Asked) -> int:
        """Return what the job takes of it at the least: what a request leaves to the engine counts as 0 or 1."""
        if self.kind in ("submitted", "running"):
            return asked.tasks
        if self.kind == "walltime":
            return asked.walltime_s or 0
        minutes = max((asked.walltime_s or 0) // 60, 1)
        if self.resource == "wall":
            return minutes
        each = asked.of_machine(self.resource)
        if self.kind == "machine":
            return each
        return each * asked.nodes * (minutes if self.kind in ("minutes", "job_minutes") else 1)

    @property
    def left(self) -> int:
        """Return what is left of it."""
        return max(self.most - self.used, 0)

    def exceeded(self, asked: Asked) -> bool:
        """Return whether the job can never start under it. Jobs that run end, and make room for others."""
        return self.wanted(asked) > self.left if self.kind != "running" else self.most == 0


class EngineLimits(Frozen):
    """An engine's answer before a job is sent to it. `accounts` and `qos` are the user's own, None where unknown.

    `ceilings` are the limits of accounting that count for this job. `unread` says why some of what the engine enforces
    is not known. `refusal` is what the engine itself said to this very job when it was asked to check it and start
    nothing; it is empty where a ceiling already says that better.
    """

    engine: str
    version: str
    asked: Asked
    queues: tuple[Queue, ...]
    accounts: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None
    ceilings: tuple[Ceiling, ...] = ()
    max_array: int | None = None
    """How many tasks an array may have."""
    requeue_s: float | None = None
    """Seconds for which a job that was requeued can't start again."""
    refusal: str = ""
    unread: str = ""

    @property
    def queue(self) -> Queue | None:
        """Return the queue that the job goes to; None where the engine has none of that name, or no default."""
        asked = self.asked.queue
        return next((q for q in self.queues if (q.name == asked if asked else q.default)), None)
